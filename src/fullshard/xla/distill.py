"""The loss of distillation: a teacher's forward, then the student's, then chunks of tokens.

    teacher (given)  gather, block, ...   --> hidden (tokens, width)  --.
    student          gather, block, ...   --> hidden (tokens, width)  --+--> chunks: logits of both,
    labels                                                            --'    divergence, gradients

See [Note: chunks on XLA].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.xla.decoder import IGNORED, head_of, hidden_of
from fullshard.xla.divergence import divergence, top_k_divergence
from fullshard.xla.head import ChunkLoss, Decoder, Rows, chunked, cross_entropy, predicting
from fullshard.xla.losses import LossFn
from fullshard.xla.plan import Tree

PROJECTION = "distill_projection"  # of a student whose width is not its teacher's
TOP_VALUES, TOP_IDS = "teacher_values", "teacher_ids"  # of a batch whose teacher ran before


def distillation(student: Decoder, teacher: Decoder | None, settings: DistillConfig) -> LossFn:
    """(parameters, batch, the teacher's arrays) -> summed loss, number of label tokens.

    Args:
        student: The model whose arrays are differentiated.
        teacher: None: the batch brings the logits that it left, `teacher_values` and
            `teacher_ids`, (batch, length, k).
        settings: Loss, temperature, shares, tokens at a time.
    """

    size = settings.tokens_at_once

    def beside_teacher(params: Tree, batch: Any, given: Tree) -> tuple[jax.Array, jax.Array]:
        assert teacher is not None, "its arrays are given"
        seen = predicting(hidden_of(teacher.config, teacher.plan, given, batch))
        own = hidden_of(student.config, student.plan, params, batch)
        rows, head = Rows.of(own, batch), head_of(student.config, params)
        if settings.loss is DistillLoss.HIDDEN:
            labels = (1 - settings.alpha) * chunked(rows, head, None, cross_entropy, size)
            apart = _apart(rows, seen, params.get(PROJECTION))
            return settings.alpha * apart + labels, rows.count
        rows = rows.beside({"hidden": seen})
        total = chunked(rows, head, head_of(teacher.config, given), _against(settings), size)
        return total, rows.count

    def beside_cache(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        own = hidden_of(student.config, student.plan, params, batch)
        kept = {name: predicting(batch[name]) for name in (TOP_VALUES, TOP_IDS)}
        rows, head = Rows.of(own, batch).beside(kept), head_of(student.config, params)
        return chunked(rows, head, None, _against(settings), size), rows.count

    return beside_cache if teacher is None else beside_teacher


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
        return settings.alpha * value + share * cross_entropy(student, others, head)

    return loss


def _apart(rows: Rows, teacher: jax.Array, projection: Tree | None) -> jax.Array:
    """Mean square over the width, summed over tokens."""
    seen = rows.hidden if projection is None else rows.hidden @ projection["weight"].T
    wide = jnp.promote_types(seen.dtype, jnp.float32)
    each = jnp.mean(jnp.square(seen.astype(wide) - teacher.astype(wide)), axis=-1)
    return jnp.sum(jnp.where(rows.others["labels"] != IGNORED, each, 0.0))
