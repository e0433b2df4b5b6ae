"""What loss functions take and return.

[Note: losses]
A loss function sees one device's samples of one micro-batch, and returns sums over them:

    loss_fn(params, batch)                   -> total, count
    loss_fn(params, batch)                   -> total, count, metrics
    loss_fn(params, batch, variables=...)    -> total, count, metrics, variables
    loss_fn(params, batch, rng=...)             where the step is given a key

The step adds totals, counts and metrics of all devices and micro-batches and divides by the count.
So a term that is no sum over tokens, such as a regularizer, is multiplied by the count:
`total + weight * norm * count` is the mean plus `weight * norm`, on any number of devices.

`variables` is `state.variables`, such as BatchNorm's running averages. Those that come back are
given to the device's next micro-batch; at the end of the step they are averaged over devices
(integers and keys are the first device's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fullshard.errors import ConfigError

LossFn = Callable[..., tuple[Any, ...]]
RESERVED = ("loss", "grad_norm", "num_tokens")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("total", "count", "metrics", "variables"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Sums:
    """What a loss function returned. See [Note: losses]."""

    total: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array]
    variables: Any


def sums_of(found: Any, variables: Any, *, new: bool = True) -> Sums:
    """What a loss function returned, checked.

    Args:
        found: What it returned.
        variables: What it was given as variables; None: it was given none.
        new: Whether it has to return such ones.

    Raises:
        ConfigError: It has another form.
    """
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4:
        size = f" of {len(found)}" if isinstance(found, tuple) else ""
        raise _wrong(type(found).__name__ + size)
    total, count, metrics, changed = (*found, *({}, None)[len(found) - 2 :])
    for what, value in (("total", total), ("count", count)):
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
            raise _wrong(f"a {what} that is a {type(value).__name__}")
        if jnp.ndim(value):
            raise _wrong(f"a {what} of shape {jnp.shape(value)}")
    if not isinstance(metrics, Mapping):
        raise _wrong(f"metrics that are a {type(metrics).__name__}")
    if taken := [name for name in RESERVED if name in metrics]:
        raise _wrong(f"metrics with the name {taken[0]!r}, which the step's own have")
    total = jnp.asarray(total)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise _wrong(f"a total of {total.dtype}")
    table = cast("Mapping[str, Any]", metrics)
    values = {name: jnp.asarray(value) for name, value in table.items()}
    changed = _like(variables, changed) if new else None
    return Sums(total, jnp.asarray(count), values, changed)


def _like(old: Any, new: Any) -> Any:
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise _wrong(
            f"variables of another structure than it was given ({jax.tree.structure(old)})"
        )
    shapes = [tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree)) for tree in (old, new)]
    if shapes[0] != shapes[1]:
        raise _wrong(f"variables of shapes {shapes[1]}; it was given {shapes[0]}")
    return jax.tree.map(lambda a, b: jnp.asarray(b, getattr(a, "dtype", None)), old, new)


def _wrong(got: str) -> ConfigError:
    return ConfigError(
        f"loss_fn: expected (summed loss, number of label tokens), both scalars, then a mapping of "
        f"summed metrics and, where the state has variables, the new ones; got {got}. A mean is "
        "returned as (mean * count, count)."
    )
