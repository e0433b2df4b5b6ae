"""What devices tell each other inside of `shard_map`: gathers, scattered sums, sums.

[Note: messages over gloo]
Each is one collective of XLA's for an array, but between CPU processes. There XLA's gloo is at its
best where each rank sends each other what that one needs, so all three are such an exchange:

    sum, 2 ranks      exchange     add up, in the order of ranks    exchange
    a0 a1             a0 b0        s0                               s0 s1
    b0 b1             a1 b1        s1                               s0 s1

And arrays that are asked for at once, those of a block, travel as one message a dtype: in every
exchange the ranks wait for the slowest, and on CPU nobody joins collectives as XLA does for other
devices. Bytes are the same; a sum is the last two, scattered and gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Arrays = Sequence[jax.Array]


def gather(parts: Arrays, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """All devices' parts along the mesh axis, one after another on each array's dimension."""
    pairs = list(zip(parts, dims, strict=True))
    if not over_gloo():
        return [lax.all_gather(part, axis, axis=dim, tiled=True) for part, dim in pairs]
    num = lax.axis_size(axis)
    found = _exchange([jnp.broadcast_to(part, (num, *part.shape)) for part in parts], axis)
    return [jnp.concatenate([*rows], dim) for rows, dim in zip(found, dims, strict=True)]


def scatter(wholes: Arrays, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """This device's parts, on each array's dimension, of the sums over the mesh axis."""
    pairs = list(zip(wholes, dims, strict=True))
    if not over_gloo():
        return [lax.psum_scatter(w, axis, scatter_dimension=dim, tiled=True) for w, dim in pairs]
    num = lax.axis_size(axis)
    found = _exchange([jnp.stack(jnp.split(whole, num, dim)) for whole, dim in pairs], axis)
    return [rows.sum(0, dtype=rows.dtype) for rows in found]


def total(values: Arrays, axes: Sequence[str]) -> list[jax.Array]:
    """The sums over mesh axes."""
    if not over_gloo():
        return [lax.psum(value, tuple(axes)) if axes else value for value in values]
    summed, dims = list(values), [0] * len(values)
    for axis in axes:
        flat = [jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(axis))) for x in summed]
        wholes = gather(scatter(flat, axis, dims), axis, dims)
        summed = [w[: x.size].reshape(x.shape) for w, x in zip(wholes, summed, strict=True)]
    return summed


def _exchange(rows: Arrays, axis: str) -> list[jax.Array]:
    """Row i of each array goes to rank i; row i of what comes is that of rank i."""
    found: list[jax.Array] = list(rows)
    for dtype in dict.fromkeys(array.dtype for array in rows):
        chosen = [at for at, array in enumerate(rows) if array.dtype == dtype]
        flat = [rows[at].reshape(rows[at].shape[0], -1) for at in chosen]
        came = lax.all_to_all(jnp.concatenate(flat, 1), axis, 0, 0, tiled=True)
        stops = [sum(part.shape[1] for part in flat[:count]) for count in range(1, len(flat))]
        for at, part in zip(chosen, jnp.split(came, stops, 1), strict=True):
            found[at] = part.reshape(rows[at].shape)
    return found


def over_gloo() -> bool:
    """Whether the devices are CPUs of several processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
