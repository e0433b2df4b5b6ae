"""Models that are objects (Equinox's, NNX's), as the parameters and the rest of them.

params, rebuild = split(model)
plan(params, ...), shard(plan, params, tx)     loss_fn(params, batch): rebuild(params)(batch)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.errors import ConfigError
from fullshard.xla.plan import Tree


def split(model: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    """A model's parameters, and what makes the model of any such again.

    Args:
        model: An nnx.Module, or a pytree such as an Equinox module, whose floating-point arrays
            are its parameters.

    Raises:
        ConfigError: It has state beside its parameters, which a step would leave as it is.
    """
    graph = _split_nnx(model)
    return graph if graph is not None else _split_pytree(model)


def _split_nnx(model: Any) -> tuple[Tree, Callable[[Tree], Any]] | None:
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return None
    graph, params, others = nnx.split(model, nnx.Param, ...)
    for path, variable in nnx.to_flat_state(others):
        name = ".".join(map(str, path))
        raise ConfigError(
            f"{name}: expected a model whose state is its parameters; got a "
            f"{type(variable).__name__}, which no step of fullshard.jax.train_step would change. "
            "Leave it out of the model (dropout: give the call its rngs), or use "
            "create_fsdp_train_step, which carries the whole state."
        )
    return params, partial(nnx.merge, graph)


def _split_pytree(model: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    def is_parameter(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    rest = jax.tree.map(lambda leaf: None if is_parameter(leaf) else leaf, model)
    params = jax.tree.map(lambda leaf: leaf if is_parameter(leaf) else None, model)

    def rebuild(arrays: Tree) -> Any:
        return jax.tree.map(
            lambda array, other: other if array is None else array,
            arrays,
            rest,
            is_leaf=lambda leaf: leaf is None,
        )

    return params, rebuild
