"""FSDP in JAX on a mesh with an axis `fsdp`: shards an NNX model, trains it, shows its sharding.

    python examples/distributed/fsdp_sharding.py

Runs on eight simulated CPU devices; on real devices, remove the first line of `main`.
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

VOCABULARY, WIDTH, CLASSES, NUM_STEPS, SAMPLES = 1000, 64, 10, 40, 64


class Block(nnx.Module):
    """A residual layer that recomputes its activations in backward."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        inside = fsdp_with_checkpointing(lambda h: self.down(nnx.gelu(self.up(self.norm(h)))))
        return x + inside(x)


class Classifier(nnx.Module):
    """Classifies sequences of token ids."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Creates samples: half of a sample's tokens come from a vocabulary range of its class."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, SAMPLES)
    ids = generator.integers(0, VOCABULARY, (SAMPLES, 12))
    ids[:, ::2] = ids[:, ::2] // CLASSES + labels[:, None] * (VOCABULARY // CLASSES)
    return {"input_ids": ids, "label": labels}


def train(mesh: jax.sharding.Mesh) -> list[float]:
    """Trains on a new batch per step; the accuracy is measured before each update.

    Returns:
        The losses.
    """
    graph, params = nnx.split(Classifier(nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        params = shard_fsdp(params, threshold=1024)
    state = nnx.ModelAndOptimizer(nnx.merge(graph, params), optax.adamw(1e-2))
    step = create_fsdp_train_step(mesh)
    losses = []
    for number in range(NUM_STEPS):
        state, loss, metrics = step(state, make_batch(number))
        losses.append(float(loss))
        if number % 10 == 0 or number == NUM_STEPS - 1:
            print(f"step {number}: loss {loss:.4f}, accuracy {metrics['accuracy']:.2f}")
    print_sharding(nnx.state(state.model))
    return losses


def main() -> None:
    """Runs plain FSDP, then FSDP with tensor parallelism; the losses are equal."""
    jax.config.update("jax_num_cpu_devices", 8)
    plain = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    hybrid = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    losses = train(plain)
    np.testing.assert_allclose(train(hybrid)[:10], losses[:10], rtol=1e-3)
    params = nnx.state(Classifier(nnx.Rngs(0)), nnx.Param)
    selective_fsdp(params, size_threshold=10_000, mesh=plain)
    analyze_memory(params, num_devices=8)


if __name__ == "__main__":
    main()
