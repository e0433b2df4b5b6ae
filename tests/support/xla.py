"""A model of stacked blocks in JAX, its batches, and its training on one device without fullshard.

Shapes are deliberately odd: no number of devices divides some arrays, and one is padded.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, VOCABULARY, LONG = 4, 48, 53, 257
MAX_GRAD_NORM = 0.5
BLOCKS = ("layers",)


def init_fn(key: Any, dtype: Any = jnp.float64) -> Any:
    """Creates the parameters; `wide` (257, 257) is large and padded, `odd` (7,) is small."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype) * 0.2

    return {
        "embed": normal(VOCABULARY, WIDTH),
        "head": normal(WIDTH, VOCABULARY),
        "layers": {
            "down": normal(LAYERS, 2 * WIDTH, WIDTH),
            "odd": normal(LAYERS, 7),
            "up": {"bias": normal(LAYERS, 2 * WIDTH), "weight": normal(LAYERS, WIDTH, 2 * WIDTH)},
        },
        "wide": normal(LONG, LONG),
    }


def block(layer: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ layer["up"]["weight"] + layer["up"]["bias"])
    return x + hidden @ layer["down"] * layer["odd"].sum()


def head_loss(params: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns cross-entropy summed over labels other than -100, and their number."""
    logits = (x @ params["head"] + params["wide"][0, :VOCABULARY])[:, :-1]
    labels = batch["labels"][:, 1:]
    counts = labels != -100
    chosen = jnp.where(counts, labels, 0)[..., None]
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, -1)[..., 0]
    return -(likely * counts).sum(), counts.sum()


def batches(num: int, samples: int = 48, vocabulary: int = VOCABULARY) -> list[dict[str, Any]]:
    """Returns tokens with ragged labels, so that a mean of means differs from the mean."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(num):
        ids = generator.integers(0, vocabulary, (samples, 9))
        labels = ids.copy()
        for row in labels:
            row[: generator.integers(1, 8)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-2, b2=0.95, weight_decay=0.1)


@cache
def reference(num_steps: int) -> tuple[list[float], list[np.ndarray]]:
    """Returns losses and final parameters of plain jax on one device, layers in a Python loop."""
    tx = optimizer()

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["input_ids"]]
        for layer in range(LAYERS):
            x = block(jax.tree.map(lambda leaf: leaf[layer], params["layers"]), x)  # noqa: B023
        total, count = head_loss(params, x, batch)
        return total / count

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
        factor = jnp.minimum(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        updates, state = tx.update(jax.tree.map(lambda g: g * factor, grads), state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.jit(init_fn)(jax.random.key(0))
    state, losses = tx.init(params), []
    for batch in batches(num_steps):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
