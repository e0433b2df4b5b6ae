"""The head's loss, computed in chunks of tokens together with its gradients.

    gather, block, ...   --> hidden (tokens, width)  --> chunks: logits, loss, gradients

[Note: chunks on XLA]
A loop computes the logits of one chunk and, from them, the gradients of the hidden states and of
the head's weight. The logits of all tokens never exist at once, and the backward recomputes none.
Shapes must not depend on data, so ignored tokens are computed too and contribute zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fullshard.xla.decoder import IGNORED, DecoderConfig, head_of, hidden_of, loss_fn, token_loss
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import LossFn

# (logits, other arrays of the chunk's tokens, teacher's head) -> summed loss.
ChunkLoss = Callable[[jax.Array, Any, Any], jax.Array]


@dataclass(frozen=True)
class Decoder:
    """A model and the plan of its arrays."""

    config: DecoderConfig
    plan: XlaPlan


def next_token(model: Decoder, chunk_size: int) -> LossFn:
    """Makes (parameters, batch) -> (summed next-token loss, number of label tokens).

    Args:
        model: The model that predicts.
        chunk_size: Number of tokens whose logits exist at once; 0: all.
    """
    if chunk_size == 0:
        return loss_fn(model.config, model.plan)

    def loss(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        hidden = hidden_of(model.config, model.plan, params, batch)
        heads = head_of(model.config, params), None
        return chunked(predicting(hidden), labels_of(batch), heads, cross_entropy, chunk_size)

    return loss


def predicting(states: jax.Array) -> jax.Array:
    """(batch x (length - 1), ...): all positions except the last of each row."""
    return states[:, :-1].reshape(-1, *states.shape[2:])


def labels_of(batch: Any) -> dict[str, jax.Array]:
    """The token that each of these positions predicts, as `labels`."""
    return {"labels": batch["labels"][:, 1:].reshape(-1)}


def cross_entropy(logits: jax.Array, others: Any, other_head: Any) -> jax.Array:
    """Returns the summed cross-entropy of a chunk."""
    del other_head
    return token_loss(logits, others["labels"])[0]


def chunked(
    hidden: jax.Array,
    others: dict[str, jax.Array],
    heads: tuple[jax.Array, Any],
    loss: ChunkLoss,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed loss and the number of labels; see [Note: chunks on XLA].

    Args:
        hidden: (positions, width) hidden states of the model, without ends of rows.
        others: (positions, ...) arrays that need no gradient, including `labels`.
        heads: (vocabulary, width) weights of the model's head and of a teacher's, or None.
        loss: Summed loss of a chunk's logits.
        chunk_size: Positions per chunk.
    """
    num_rows, count = hidden.shape[0], jnp.sum(others["labels"] != IGNORED)
    num_chunks = -(-num_rows // chunk_size)
    size = -(-num_rows // num_chunks)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def part(leaf: jax.Array, fill: int = 0) -> jax.Array:
        more = [(0, num_chunks * size - num_rows), *[(0, 0)] * (leaf.ndim - 1)]
        filled = jnp.pad(leaf, more, constant_values=fill)
        return filled.reshape(num_chunks, size, *leaf.shape[1:])

    def of_chunk(hidden: jax.Array, head: jax.Array, others: Any, other_head: Any) -> jax.Array:
        return loss(hidden @ head.T, others, other_head).astype(wide)

    def total(hidden: jax.Array, head: jax.Array, others: Any, other_head: Any) -> jax.Array:
        def turn(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
            return total + of_chunk(chunk[0], head, chunk[1], other_head), None

        return lax.scan(turn, jnp.zeros((), wide), (hidden, others))[0]

    def forward(hidden: jax.Array, head: jax.Array, others: Any, other_head: Any) -> Any:
        value_and_grad = jax.value_and_grad(of_chunk, (0, 1))

        def turn(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
            value, (here, weight) = value_and_grad(chunk[0], head, chunk[1], other_head)
            return (carry[0] + value, carry[1] + weight.astype(wide)), here

        zeros = jnp.zeros((), wide), jnp.zeros(head.shape, wide)
        (value, weight), here = lax.scan(turn, zeros, (hidden, others))
        return value, (here, weight)

    def backward(kept: Any, grad: jax.Array) -> Any:
        here, weight = ((g.astype(wide) * grad).astype(heads[0].dtype) for g in kept)
        return here, weight, None, None

    summed = jax.custom_vjp(total)
    summed.defvjp(forward, backward)
    labels = {"labels": part(others["labels"], IGNORED)}
    others = {name: part(leaf) for name, leaf in others.items()} | labels
    return summed(part(hidden), heads[0], others, heads[1]), count
