"""A transformer in JAX that runs as its plan says: stacked blocks, gathered one at a time.

    python examples/19_fsdp_sharding.py

Before the run, the plan lists each device's memory and the collectives of a step. A count of the
collectives in the compiled step gives the same list. Runs on eight simulated CPU devices.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fullshard.jax as fj

LAYERS, WIDTH, VOCABULARY, NUM_STEPS, DEVICES = 4, 64, 512, 40, 8


def init_fn(key: Any) -> Any:
    """Creates the parameters; those of equal blocks are stacked along a first axis."""
    keys = iter(jax.random.split(key, 4))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.02

    return {
        "embed": normal(VOCABULARY, WIDTH),
        "layers": {
            "up": normal(LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(LAYERS, 4 * WIDTH, WIDTH),
        },
        "head": normal(WIDTH, VOCABULARY),
    }


def block(layer: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def show_savings(shapes: Any) -> None:
    """Prints the memory formulas for any model, then what each strategy saves on this one."""
    fj.analyze_memory(shapes, DEVICES)
    whole = 0
    print("\nstate per device (parameters and Adam's moments), by strategy")
    for strategy, shard in (("no_shard", 1), ("hybrid_shard", 4), ("full_shard", 8)):
        mesh = fj.make_mesh(replicate=DEVICES // shard, shard=shard)
        num_bytes = fj.plan(
            shapes, {"strategy": strategy}, mesh, blocks=["layers"]
        ).table.state_bytes
        whole = whole or num_bytes
        print(f"  {strategy:<12}  {num_bytes / 1e6:5.2f} MB, saves {1 - num_bytes / whole:.1%}")


def device_bytes(state: Any) -> int:
    """Returns the bytes of a state on the first device."""
    shards = (x.addressable_shards for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    return sum(one.data.nbytes for found in shards for one in found if one.device.id == 0)


def main() -> None:
    """Plans, trains, compares the plan with the program, saves, and loads on another mesh."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    key, tx = jax.random.key(0), optax.adamw(1e-2)
    shapes = jax.eval_shape(init_fn, key)
    show_savings(shapes)
    config = {"strategy": "hybrid_shard", "activation_checkpointing": "block"}
    plan = fj.plan(shapes, config, fj.make_mesh(replicate=2, shard=4), blocks=["layers"])
    print(plan)

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["embed"][batch["input_ids"]]
        x = fj.scan_blocks(block, x, params["layers"], plan)
        likely = jax.nn.log_softmax(x @ params["head"])
        chosen = jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1)
        return -chosen.sum(), jnp.asarray(chosen.size)

    state = fj.init(plan, init_fn, tx, key)
    step = fj.train_step(plan, loss_fn, tx, max_grad_norm=1.0)
    generator = np.random.default_rng(0)
    batch = {}
    for number in range(NUM_STEPS):
        ids = generator.integers(0, VOCABULARY, (16, 32))
        batch = {"input_ids": ids, "labels": (ids + 1) % VOCABULARY}
        state, metrics = step(state, batch)
        if number % 10 == 0 or number == NUM_STEPS - 1:
            print(f"step {number}: loss {metrics['loss']:.4f}")
    print(f"state per device: planned {plan.table.state_bytes:,} B, held {device_bytes(state):,} B")

    found = fj.census(step.compile(state, step.place(batch)))
    planned = {kind: c for kind, c in plan.table.collectives().items() if c.count}
    assert found == planned, (found, planned)
    print("the compiled step runs the collectives of the plan:", found)

    with tempfile.TemporaryDirectory() as folder:
        fj.save(folder, state, step=NUM_STEPS)
        other = fj.plan(shapes, None, fj.make_mesh(shard=8), blocks=["layers"])
        again = fj.load(other, folder, tx)
    pairs = zip(*(jax.tree.leaves(fj.full_params(s)) for s in (state, again)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    print(f"saved and loaded over {other.table.mesh.shard} devices: the same bits")


if __name__ == "__main__":
    main()
