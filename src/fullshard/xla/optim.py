"""The optimizers of a run, whose updates are torch's."""

from __future__ import annotations

from typing import Any

import jax
import optax

from fullshard.xla.plan import Tree


def adamw(
    betas: tuple[float, float], epsilon: float, weight_decay: Tree
) -> optax.GradientTransformationExtraArgs:
    """AdamW with decoupled weight decay; its update is given `learning_rate`.

    Args:
        betas: Decay rates of the moments.
        epsilon: Added outside of the root.
        weight_decay: A number a parameter.
    """
    inner = optax.scale_by_adam(*betas, epsilon)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        scaled, state = inner.update(updates, state, params)
        learning_rate = extra["learning_rate"]

        def step(scaled: jax.Array, param: jax.Array, decay: float) -> jax.Array:
            return -learning_rate.astype(param.dtype) * (scaled + decay * param)

        return jax.tree.map(step, scaled, params, weight_decay), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def sgd() -> optax.GradientTransformationExtraArgs:
    """Plain gradient descent; its update is given `learning_rate`."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        learning_rate = extra["learning_rate"]
        return jax.tree.map(lambda g: -learning_rate.astype(g.dtype) * g, updates), state

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    return optax.GradientTransformationExtraArgs(init, update)
