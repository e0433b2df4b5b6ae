"""The loss of distillation: a teacher's forward, then the student's, then chunks of tokens.

    teacher (given)  gather, block, ...   --> hidden (tokens, width)  --.
    student          gather, block, ...   --> hidden (tokens, width)  --+--> chunks: logits of both,
    labels                                                            --'    divergence, gradients

[Note: chunks on XLA]
Logits are made a chunk at a time, in a loop, and with them the gradients of hidden states and of
the head's weight: nobody holds logits of all tokens, and none are made a second time in backward.
Shapes must not depend on data, so tokens that predict nothing take part and count nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.xla.decoder import IGNORED, DecoderConfig, head_of, hidden_of, token_loss
from fullshard.xla.divergence import divergence, top_k_divergence
from fullshard.xla.losses import LossFn
from fullshard.xla.plan import Tree, XlaPlan

PROJECTION = "distill_projection"  # of a student whose width is not its teacher's
TOP_VALUES, TOP_IDS = "teacher_values", "teacher_ids"  # of a batch whose teacher ran before

# (student's logits, what else a chunk's tokens have, teacher's head) -> their loss, summed.
ChunkLoss = Callable[[jax.Array, Any, Any], jax.Array]


@dataclass(frozen=True)
class Decoder:
    """A model and where its arrays lie."""

    config: DecoderConfig
    plan: XlaPlan


def distillation(student: Decoder, teacher: Decoder | None, settings: DistillConfig) -> LossFn:
    """(parameters, batch, the teacher's arrays) -> summed loss, number of label tokens.

    Args:
        student: The model whose arrays are differentiated.
        teacher: None: the batch brings the logits that it left, `teacher_values` and
            `teacher_ids`, (batch, length, k).
        settings: Loss, temperature, shares, tokens at a time.
    """

    def beside_teacher(params: Tree, batch: Any, given: Tree) -> tuple[jax.Array, jax.Array]:
        assert teacher is not None, "its arrays are given"
        seen = _predicting(hidden_of(teacher.config, teacher.plan, given, batch))
        own = hidden_of(student.config, student.plan, params, batch)
        rows, head = _Rows.of(own, batch), head_of(student.config, params)
        if settings.loss is DistillLoss.HIDDEN:
            labels = (1 - settings.alpha) * _chunked(rows, head, None, _cross_entropy, settings)
            apart = _apart(rows, seen, params.get(PROJECTION))
            return settings.alpha * apart + labels, rows.count
        rows = rows.beside({"hidden": seen})
        total = _chunked(rows, head, head_of(teacher.config, given), _against(settings), settings)
        return total, rows.count

    def beside_cache(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        own = hidden_of(student.config, student.plan, params, batch)
        kept = {name: _predicting(batch[name]) for name in (TOP_VALUES, TOP_IDS)}
        rows, head = _Rows.of(own, batch).beside(kept), head_of(student.config, params)
        return _chunked(rows, head, None, _against(settings), settings), rows.count

    return beside_cache if teacher is None else beside_teacher


def cross_entropy(student: Decoder, settings: DistillConfig) -> LossFn:
    """The student's alone, in chunks: what evaluation tells."""

    def loss(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        own = hidden_of(student.config, student.plan, params, batch)
        rows, head = _Rows.of(own, batch), head_of(student.config, params)
        return _chunked(rows, head, None, _cross_entropy, settings), rows.count

    return loss


def _predicting(states: jax.Array) -> jax.Array:
    """(batch x (length - 1), ...): all positions but each row's last, which predicts nothing."""
    return states[:, :-1].reshape(-1, *states.shape[2:])


@dataclass(frozen=True)
class _Rows:
    """Positions of a device's batch, one after another.

    Attributes:
        hidden: (rows, width) of the student.
        others: (rows, ...) arrays of which nobody wants gradients; `labels` among them.
    """

    hidden: jax.Array
    others: dict[str, jax.Array]

    @classmethod
    def of(cls, hidden: jax.Array, batch: Any) -> _Rows:
        """With the token that each position predicts."""
        return cls(_predicting(hidden), {"labels": batch["labels"][:, 1:].reshape(-1)})

    def beside(self, others: dict[str, jax.Array]) -> _Rows:
        """With more of a teacher's."""
        return _Rows(self.hidden, self.others | others)

    @property
    def count(self) -> jax.Array:
        """Positions that count."""
        return jnp.sum(self.others["labels"] != IGNORED)


def _against(settings: DistillConfig) -> ChunkLoss:
    """Divergence and cross-entropy by their shares."""

    def loss(student: jax.Array, others: Any, head: Any) -> jax.Array:
        if TOP_VALUES in others:
            value = top_k_divergence(student, others[TOP_VALUES], others[TOP_IDS], settings)
        else:
            value = divergence(student, others["hidden"] @ head.T, settings)
        value = jnp.where(others["labels"] != IGNORED, value, 0.0).sum()
        if settings.alpha == 1:
            return value
        share = 1 - settings.alpha
        return settings.alpha * value + share * _cross_entropy(student, others, head)

    return loss


def _cross_entropy(student: jax.Array, others: Any, head: Any) -> jax.Array:
    del head
    return token_loss(student, others["labels"])[0]


def _apart(rows: _Rows, teacher: jax.Array, projection: Tree | None) -> jax.Array:
    """Mean square over the width, summed over tokens."""
    seen = rows.hidden if projection is None else rows.hidden @ projection["weight"].T
    wide = jnp.promote_types(seen.dtype, jnp.float32)
    each = jnp.mean(jnp.square(seen.astype(wide) - teacher.astype(wide)), axis=-1)
    return jnp.sum(jnp.where(rows.others["labels"] != IGNORED, each, 0.0))


def _chunked(
    rows: _Rows, head: jax.Array, other_head: Any, loss: ChunkLoss, settings: DistillConfig
) -> jax.Array:
    """A loss over positions, summed; see [Note: chunks on XLA].

    Args:
        rows: Positions.
        head: (vocabulary, width) of the student.
        other_head: The teacher's, or None.
        loss: Loss of a chunk's logits, summed.
        settings: Settings; tokens_at_once is read.
    """
    num_rows = rows.hidden.shape[0]
    num_chunks = -(-num_rows // settings.tokens_at_once)
    size = -(-num_rows // num_chunks)
    wide = jnp.promote_types(rows.hidden.dtype, jnp.float32)

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
        here, weight = ((g.astype(wide) * grad).astype(head.dtype) for g in kept)
        return here, weight, None, None

    summed = jax.custom_vjp(total)
    summed.defvjp(forward, backward)
    labels = {"labels": part(rows.others["labels"], IGNORED)}
    others = {name: part(leaf) for name, leaf in rows.others.items()} | labels
    return summed(part(rows.hidden), head, others, other_head)
