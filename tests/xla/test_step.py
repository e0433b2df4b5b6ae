"""A sharded step equals one device, communicates as planned, and keeps its shardings."""

import numpy as np
import pytest

from support.lazy import fj, fx, jax, xla

NUM_STEPS = 2
GRID = [
    # strategy, replicate, shard, activation checkpointing, micro-batches
    ("full_shard", 1, 3, "every_2", 2),
    ("hybrid_shard", 2, 2, "selective", 1),
    *(
        pytest.param(case, marks=pytest.mark.long)
        for case in (
            ("shard_grad_op", 1, 8, "offload", 1),
            ("full_shard", 1, 1, "none", 1),
            ("full_shard", 1, 2, "every_2", 2),
            ("full_shard", 1, 3, "none", 1),
            ("no_shard", 2, 1, "none", 2),
            ("hybrid_shard_zero2", 2, 4, "none", 1),
        )
    ),
]


def trained(strategy, replicate, shard, recompute, num_micro_batches):
    """Returns values to compare after some steps."""
    mesh = fj.make_mesh(replicate, shard, devices=jax.devices()[: replicate * shard])
    config = {"strategy": strategy, "activation_checkpointing": recompute}
    shapes = jax.eval_shape(xla.init_fn, jax.random.key(0))
    plan = fj.plan(shapes, config, mesh, blocks=xla.BLOCKS)

    def loss(params, batch):
        x = params["embed"][batch["input_ids"]]
        return xla.head_loss(params, fj.scan_blocks(xla.block, x, params["layers"], plan), batch)

    tx = xla.optimizer()
    state = fj.init(plan, xla.init_fn, tx, jax.random.key(0))
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    step = fj.train_step(
        plan, loss, tx, max_grad_norm=xla.MAX_GRAD_NORM, num_micro_batches=num_micro_batches
    )
    losses = []
    for batch in xla.batches(NUM_STEPS):
        if num_micro_batches > 1:
            parts = (num_micro_batches, -1)
            batch = {key: value.reshape(*parts, value.shape[-1]) for key, value in batch.items()}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    compiled = step.compile(state, step.place(batch))
    sizes = compiled.memory_analysis()
    wanted_losses, wanted = xla.reference(NUM_STEPS)
    found = jax.tree.leaves(fj.full_params(state))
    wide = np.asarray(state.params["wide"])
    padding = wide[xla.LONG :], wide[:, xla.LONG :]
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)),
        "weights": max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)),
        "padding": max((np.abs(part).max() for part in padding if part.size), default=0.0),
        "census": {kind: (c.count, c.num_bytes) for kind, c in fj.census(compiled).items()},
        "planned": {
            kind: (c.count, c.num_bytes)
            for kind, c in plan.table.collectives(num_micro_batches).items()
            if c.count
        },
        "compiled": step.num_compiled(),
        "moved": [a != b.sharding for a, b in zip(before, jax.tree.leaves(state), strict=True)],
        "state": plan.table.state_bytes,
        "arguments": sizes.argument_size_in_bytes,
        "in place": sizes.alias_size_in_bytes,
    }


def check(found):
    assert found["loss"] < 1e-12
    assert found["weights"] < 1e-12
    assert found["padding"] == 0.0
    assert found["census"] == found["planned"]
    assert found["compiled"] == 1
    assert not any(found["moved"])
    assert 0 <= found["arguments"] - found["state"] < 64 << 10
    assert found["in place"] >= found["state"]


@pytest.mark.short(1)
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_a_sharded_step_equals_one_device_and_the_plan(devices, case):
    check(devices(trained, *case))


def exchanged(*case):
    """Runs `trained` with messages as between CPU processes."""
    real, fx.gather.over_gloo = fx.gather.over_gloo, lambda: True
    try:
        return trained(*case)
    finally:
        fx.gather.over_gloo = real


@pytest.mark.short(1)
@pytest.mark.parametrize("mesh", [(2, 2), (1, 2), (1, 3)], ids=str)
def test_arrays_requested_together_are_one_exchange(devices, mesh):
    found = devices(exchanged, "full_shard", *mesh, "none", 1)
    assert found["loss"] < 1e-12
    assert found["weights"] < 1e-12
    assert found["padding"] == 0.0
    # A block is gathered for each pass and reduced, and its `odd` array is summed over each axis;
    # outside of blocks there are a large array, small ones together, and a small sum. Scattered
    # gradients are summed over replicas.
    axes, again = (1, 0) if mesh[0] == 1 else (2, 2)
    blocks = xla.LAYERS * (3 + 2 * axes + again)
    exchanges = blocks + 2 * 2 + again + 2 * axes
    assert set(found["census"]) == {"all-to-all"}
    assert found["census"] == found["planned"]
    assert found["census"]["all-to-all"][0] == exchanges


def ready():
    """Whether all results of a step and of an evaluation are ready where they return."""
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    plan = fj.plan({"w": jax.ShapeDtypeStruct((64, 64), "float64")}, None, mesh)

    def loss(params, batch):
        layer = lambda x, _: (jax.numpy.tanh(x @ params["w"]), None)  # noqa: E731
        return jax.lax.scan(layer, batch["x"], length=300)[0].sum(), 1

    tx, batch = xla.optimizer(), {"x": np.ones((64, 64))}
    state = fj.init(plan, lambda key: {"w": jax.random.normal(key, (64, 64))}, tx)
    step, evaluate = fj.train_step(plan, loss, tx), fj.eval_step(plan, loss)
    found = []
    for _ in range(2):  # the first ones compile
        state, metrics = step(state, batch)
        found.append(all(leaf.is_ready() for leaf in jax.tree.leaves((state, metrics))))
        found.append(all(leaf.is_ready() for leaf in jax.tree.leaves(evaluate(state, batch))))
    return found


def test_no_step_or_evaluation_is_left_running_on_several_cpu_devices(devices):
    """Two that run at once can wait for the same threads forever."""
    assert devices(ready) == [True] * 4
