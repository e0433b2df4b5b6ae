"""The loss of distillation: a teacher's forward, then the student's, then chunks of tokens.

    teacher (given)  gather, block, ...   --> hidden (tokens, width)  --.
    student          gather, block, ...   --> hidden (tokens, width)  --+--> chunks: logits of both,
    labels                                                            --'    divergence, gradients

See [Note: chunks on XLA].
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.config.schema import DistillConfig, ShardConfig
from fullshard.config.values import DistillLoss, DType, Strategy
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.mesh import row_of
from fullshard.xla.decoder import BLOCKS, IGNORED, head_of, hidden_of, rules
from fullshard.xla.head import ChunkLoss, Decoder, chunked, cross_entropy, labels_of, predicting
from fullshard.xla.plan import Tree, table_of
from fullshard.xla.step import LossFn

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
            told, count = chunked(own, labels, (head, None), cross_entropy, size)
            apart = _hidden_loss(own, labels["labels"], seen, params.get(PROJECTION))
            return settings.alpha * apart + (1 - settings.alpha) * told, count
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


def teacher_table(
    shapes: Tree, strategy: Strategy, dtype: DType, student: ArraysPlan, expert: int = 1
) -> ArraysPlan:
    """Returns the plan of a teacher's arrays; needs no device.

    Args:
        shapes: Shapes of the teacher's arrays.
        strategy: no_shard replicates it on every device; the others shard it as the student.
        dtype: The dtype in which weights are stored, gathered and computed with.
        student: The student's plan, whose mesh is used.
        expert: Size of the expert axis.

    Raises:
        ConfigError: The strategy needs a different mesh than the student's.
    """
    own, theirs = row_of(strategy), row_of(student.strategy)
    alike = theirs.shard_params and own.hybrid == theirs.hybrid
    if own.shard_params and not alike and student.mesh.num_copies > 1:
        raise ConfigError(
            f"distill.teacher_strategy: expected no_shard or one like the student's "
            f"({student.strategy}) with backend: jax, whose teacher lies on the student's mesh; "
            f"got {strategy}. Choose such a one, shard the student likewise or use backend: torch."
        )
    mesh = student.mesh if own.shard_params else student.mesh.unsharded()
    settings = ShardConfig.of(None, strategy=strategy, master_dtype=dtype)
    return table_of(shapes, settings, mesh, BLOCKS, ("*",), rules(expert, mesh.inner))
