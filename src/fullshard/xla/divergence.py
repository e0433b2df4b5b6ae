"""How far a student's distribution is from its teacher's: as in recipes/distill/loss.py."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss


def divergence(student: jax.Array, teacher: jax.Array, settings: DistillConfig) -> jax.Array:
    """(num_tokens,) each token's.

    Args:
        student: (num_tokens, vocabulary) logits.
        teacher: The same; entries that one of them has alone are padding.
        settings: Settings; loss, temperature and beta are read.
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
    """(num_tokens,) forward_kl against the k logits a token that were kept.

    Args:
        student: (num_tokens, vocabulary) logits.
        values: (num_tokens, k) of the teacher's logits.
        ids: (num_tokens, k) token ids that they belong to.
        settings: Settings; the temperature is read.
    """
    whole = _log_probabilities(student, settings.temperature)
    q = jnp.take_along_axis(whole, ids, axis=-1)
    p = _log_probabilities(values, settings.temperature).astype(q.dtype)
    return _kl(p, q) * settings.temperature**2


def _log_probabilities(logits: jax.Array, temperature: float) -> jax.Array:
    """In float32 at least."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.log_softmax(wide / temperature, axis=-1)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
