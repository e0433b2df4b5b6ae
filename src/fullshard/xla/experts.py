"""The experts of a mixture: each token's weighted sum over those that it chose.

[Note: experts on XLA]
Pairs of a token and an expert are sorted by expert, and divided into blocks of equal size that have
one expert each:

    pairs     e0 e0 e0 e0 e0 | e1 | e2 e2 e2
    blocks    e0 e0 | e0 e0 | e0 -- | e1 -- | e2 e2 | e2 --

Shapes must not depend on data, but the number of turns of a loop may. The loop runs the blocks that
there are: no token is dropped, and an expert without tokens costs nothing. jax derives no gradient
of such a loop, so it is written here. Backward computes each block again: only tokens are kept.

A grouped product (`jax.lax.ragged_dot`) is compiled for CPUs and GPUs as a dense one, with every
expert for every pair.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_ROWS = 256  # of a block; smaller ones where an expert has fewer pairs on average


class _Route(NamedTuple):
    """Pairs of a token and an expert, sorted by expert, in blocks.

    Attributes:
        order: (pairs + rows of a block,) indices of pairs, filled up with the number of pairs.
        ends: (experts,) end of each expert's pairs in this order.
        counts: (experts,) number of pairs per expert.
        blocks: (experts,) number of their blocks.
        stops: (experts,) number of blocks up to the expert's last.
    """

    order: jax.Array
    ends: jax.Array
    counts: jax.Array
    blocks: jax.Array
    stops: jax.Array


def weighted_sum(
    tokens: jax.Array, shares: jax.Array, chosen: jax.Array, experts: Any, num_experts: int
) -> jax.Array:
    """Returns (tokens, width), the sum over each token's experts. See [Note: experts on XLA].

    Args:
        tokens: (tokens, width) inputs of the experts.
        shares: (tokens, chosen) weight of each expert that a token chose.
        chosen: (tokens, chosen) its index in `experts`; any other number is none of these.
        experts: `gate_up_proj` (experts, 2 x inner, width) and `down_proj` (experts, width, inner).
        num_experts: Number of all experts, which tokens choose from.
    """
    gate_up, down = experts["gate_up_proj"], experts["down_proj"]
    own, size = len(gate_up), min(MOST_ROWS, -(-chosen.size // num_experts))
    ids = jnp.where((chosen >= 0) & (chosen < own), chosen, own).reshape(-1)
    order = jnp.pad(jnp.argsort(ids), (0, size), constant_values=ids.size)
    counts = jnp.sum(ids[:, None] == jnp.arange(own), axis=0)
    blocks = -(-counts // size)
    route = _Route(order, jnp.cumsum(counts), counts, blocks, jnp.cumsum(blocks))
    found = jax.custom_vjp(partial(_forward, size))
    found.defvjp(lambda *given: (_forward(size, *given), given), partial(_backward, size))
    return found(tokens, shares.reshape(-1), gate_up, down, route)


def _forward(size: int, *given: Any) -> jax.Array:
    tokens = given[0]

    def turn(at: Any, total: jax.Array) -> jax.Array:
        (token, *_), inputs = _block(at, size, given)
        return total.at[token].add(_expert(*inputs).astype(total.dtype), mode="drop")

    total = lax.fori_loop(0, given[-1].stops[-1], turn, _wide_zeros(tokens))
    return total.astype(tokens.dtype)


def _backward(size: int, given: Any, grad: jax.Array) -> Any:
    *arrays, route = given

    def turn(at: Any, sums: list[jax.Array]) -> list[jax.Array]:
        places, inputs = _block(at, size, given)
        _, pull = jax.vjp(_expert, *inputs)
        found = zip(sums, places, pull(_rows(grad, places[0])), strict=True)
        return [total.at[i].add(x.astype(total.dtype), mode="drop") for total, i, x in found]

    sums = lax.fori_loop(0, route.stops[-1], turn, [_wide_zeros(array) for array in arrays])
    return *(x.astype(array.dtype) for x, array in zip(sums, arrays, strict=True)), None


def _block(at: Any, size: int, given: Any) -> tuple[Any, Any]:
    """Places and values of a block's tokens, shares and weights; rows without a pair are zero."""
    tokens, shares, gate_up, down, route = given
    expert = jnp.sum(route.stops <= at)
    start = route.ends[expert] - route.counts[expert]
    start += (at - route.stops[expert] + route.blocks[expert]) * size
    is_there = start + jnp.arange(size) < route.ends[expert]
    pair = jnp.where(is_there, lax.dynamic_slice(route.order, (start,), (size,)), len(shares))
    token = pair // (len(shares) // len(tokens))
    inputs = _rows(tokens, token), _rows(shares, pair), gate_up[expert], down[expert]
    return (token, pair, expert, expert), inputs


def _expert(rows: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    gate, up = jnp.split(rows @ gate_up.T, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down.T * shares[:, None]


def _rows(array: jax.Array, places: jax.Array) -> jax.Array:
    return array.at[places].get(mode="fill", fill_value=0)


def _wide_zeros(array: jax.Array) -> jax.Array:
    return jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))
