"""The losses of a decoder: of the next token, and of distillation from a teacher.

    teacher (given)  gather, block, ...   --> hidden (tokens, width)  --.
    student          gather, block, ...   --> hidden (tokens, width)  --+--> chunks: logits of both,
    labels                                                            --'    loss, gradients

[Note: chunks on XLA]
A loop computes the logits of one chunk and, from them, the gradients of the hidden states and of
the head's weight. The logits of all tokens never exist at once, and the backward recomputes none.
Shapes must not depend on data, so ignored tokens are computed too and contribute zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
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


# ---- distillation --------------------------------------------------------------------------------


PROJECTION = "distill_projection"  # if the student's width differs from the teacher's
TOP_VALUES, TOP_IDS = "teacher_values", "teacher_ids"  # in batches with stored teacher logits


def distillation(student: Decoder, teacher: Decoder | None, settings: DistillConfig) -> LossFn:
    """Makes (parameters, batch, teacher's arrays) -> (summed loss, number of label tokens).

    Args:
        student: The trained model.
        teacher: None: the batch contains its stored logits as `teacher_values` and `teacher_ids`,
            (batch, length, k).
        settings: Loss, temperature, weights of the loss terms, chunk size in tokens.
    """

    size = settings.tokens_at_once

    def beside_teacher(params: Tree, batch: Any, given: Tree) -> tuple[jax.Array, jax.Array]:
        assert teacher is not None, "its arrays are given"
        seen = predicting(hidden_of(teacher.config, teacher.plan, given, batch))
        own = predicting(hidden_of(student.config, student.plan, params, batch))
        labels, head = labels_of(batch), head_of(student.config, params)
        if settings.loss is DistillLoss.HIDDEN:
            of_labels, count = chunked(own, labels, (head, None), cross_entropy, size)
            apart = _hidden_loss(own, labels["labels"], seen, params.get(PROJECTION))
            return settings.alpha * apart + (1 - settings.alpha) * of_labels, count
        heads = head, head_of(teacher.config, given)
        return chunked(own, labels | {"hidden": seen}, heads, _against(settings), size)

    def beside_cache(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        own = predicting(hidden_of(student.config, student.plan, params, batch))
        kept = {name: predicting(batch[name]) for name in (TOP_VALUES, TOP_IDS)}
        heads = head_of(student.config, params), None
        return chunked(own, labels_of(batch) | kept, heads, _against(settings), size)

    return beside_cache if teacher is None else beside_teacher


def _against(settings: DistillConfig) -> ChunkLoss:
    """The weighted sum of divergence and cross-entropy."""

    def loss(student: jax.Array, others: Any, head: Any) -> jax.Array:
        if TOP_VALUES in others:
            value = top_k_divergence(student, others[TOP_VALUES], others[TOP_IDS], settings)
        else:
            value = divergence(student, others["hidden"] @ head.T, settings)
        value = jnp.where(others["labels"] != IGNORED, value, 0.0).sum()
        if settings.alpha == 1:
            return value
        share = 1 - settings.alpha
        return settings.alpha * value + share * cross_entropy(student, others, head)

    return loss


def _hidden_loss(
    hidden: jax.Array, labels: jax.Array, teacher: jax.Array, projection: Tree | None
) -> jax.Array:
    """Mean squared difference over the width, summed over tokens."""
    seen = hidden if projection is None else hidden @ projection["weight"].T
    wide = jnp.promote_types(seen.dtype, jnp.float32)
    each = jnp.mean(jnp.square(seen.astype(wide) - teacher.astype(wide)), axis=-1)
    return jnp.sum(jnp.where(labels != IGNORED, each, 0.0))


def divergence(student: jax.Array, teacher: jax.Array, settings: DistillConfig) -> jax.Array:
    """Returns the divergence per token, (num_tokens,).

    Args:
        student: (num_tokens, vocabulary) logits.
        teacher: (num_tokens, vocabulary) logits; columns that only one of the two has are padding.
        settings: Their loss, temperature and beta are used.
    """
    size = min(student.shape[1], teacher.shape[1])
    q = _log_probabilities(student[:, :size], settings.temperature)
    p = _log_probabilities(teacher[:, :size], settings.temperature).astype(q.dtype)
    match settings.loss:
        case DistillLoss.FORWARD_KL:
            value = _kl(p, q)
        case DistillLoss.REVERSE_KL:
            value = _kl(q, p)
        case DistillLoss.JSD:
            beta = settings.beta
            middle = jnp.logaddexp(p + math.log(beta), q + math.log(1 - beta))
            value = beta * _kl(p, middle) + (1 - beta) * _kl(q, middle)
        case DistillLoss.HIDDEN:
            raise AssertionError("hidden states have no vocabulary")
    return value * settings.temperature**2


def top_k_divergence(
    student: jax.Array, values: jax.Array, ids: jax.Array, settings: DistillConfig
) -> jax.Array:
    """Returns forward_kl per token, (num_tokens,), against k stored logits per token.

    Args:
        student: (num_tokens, vocabulary) logits.
        values: (num_tokens, k) logits of the teacher.
        ids: (num_tokens, k) token ids of these logits.
        settings: Their temperature is used.
    """
    whole = _log_probabilities(student, settings.temperature)
    q = jnp.take_along_axis(whole, ids, axis=-1)
    p = _log_probabilities(values, settings.temperature).astype(q.dtype)
    return _kl(p, q) * settings.temperature**2


def _log_probabilities(logits: jax.Array, temperature: float) -> jax.Array:
    """Log-probabilities in float32 or wider."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.log_softmax(wide / temperature, axis=-1)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
