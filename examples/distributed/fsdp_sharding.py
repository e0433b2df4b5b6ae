"""FSDP in JAX on a mesh with an axis `fsdp`: shard an NNX model, train it, see where it lies.

    python examples/distributed/fsdp_sharding.py

Runs on eight devices that the CPU plays; on real devices leave the first line of `main` out.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

from fullshard.jax import (
    analyze_memory,
    create_fsdp_train_step,
    fsdp_with_checkpointing,
    print_sharding,
    selective_fsdp,
    shard_fsdp,
)

VOCABULARY, WIDTH, CLASSES, NUM_STEPS = 1000, 64, 10, 10


class Block(nnx.Module):
    """A residual layer whose activations backward computes anew."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        inside = fsdp_with_checkpointing(lambda h: self.down(nnx.gelu(self.up(self.norm(h)))))
        return x + inside(x)


class Classifier(nnx.Module):
    """Token ids to classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def train(mesh: jax.sharding.Mesh) -> list[float]:
    """Losses of a few steps; each prints one."""
    graph, params = nnx.split(Classifier(nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        params = shard_fsdp(params, threshold=1024)
    state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adamw(1e-3))
    step = create_fsdp_train_step(mesh)
    generator = np.random.default_rng(0)
    losses = []
    for number in range(NUM_STEPS):
        ids = generator.integers(0, VOCABULARY, (16, 12))
        state, loss, metrics = step(state, {"input_ids": ids, "labels": ids[:, 0] % CLASSES})
        losses.append(float(loss))
        print(f"step {number}: loss {loss:.4f}, accuracy {metrics['accuracy']:.2f}")
    print_sharding(nnx.state(state.model))
    return losses


def main() -> None:
    """Plain FSDP, then FSDP times tensor parallelism; the losses are the same."""
    jax.config.update("jax_num_cpu_devices", 8)
    plain = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    hybrid = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    losses = train(plain)
    np.testing.assert_allclose(train(hybrid), losses, rtol=1e-4)
    params = nnx.state(Classifier(nnx.Rngs(0)), nnx.Param)
    selective_fsdp(params, size_threshold=10_000, mesh=plain)
    analyze_memory(params, num_devices=8)


if __name__ == "__main__":
    main()
