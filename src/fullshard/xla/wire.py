"""What devices tell each other inside of `shard_map`: gathers, scattered sums, sums.

[Note: messages over gloo]
Each is one collective of XLA's, but between CPU processes. There XLA's gloo is at its best where
each rank sends each other what that one needs, so all three are such an exchange:

    sum, 2 ranks      exchange     add up, in the order of ranks    exchange
    a0 a1             a0 b0        s0                               s0 s1
    b0 b1             a1 b1        s1                               s0 s1

What a step issues is the same in number and bytes; a sum is the last two, scattered and gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def gather(part: jax.Array, axis: str, dim: int) -> jax.Array:
    """All devices' parts along the mesh axis, one after another on `dim`."""
    if not over_gloo():
        return lax.all_gather(part, axis, axis=dim, tiled=True)
    copies = jnp.concatenate([part] * lax.axis_size(axis), dim)
    return lax.all_to_all(copies, axis, dim, dim, tiled=True)


def scatter(whole: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part, on `dim`, of the sum over the mesh axis."""
    if not over_gloo():
        return lax.psum_scatter(whole, axis, scatter_dimension=dim, tiled=True)
    num, parts = lax.axis_size(axis), lax.all_to_all(whole, axis, dim, dim, tiled=True)
    shape = (*whole.shape[:dim], num, whole.shape[dim] // num, *whole.shape[dim + 1 :])
    return parts.reshape(shape).sum(dim)


def total(value: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over mesh axes."""
    if not over_gloo():
        return lax.psum(value, tuple(axes)) if axes else value
    for axis in axes:
        flat = jnp.pad(value.reshape(-1), (0, -value.size % lax.axis_size(axis)))
        summed = gather(scatter(flat, axis, 0), axis, 0)
        value = summed[: value.size].reshape(value.shape)
    return value


def over_gloo() -> bool:
    """Whether the devices are CPUs of several processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
