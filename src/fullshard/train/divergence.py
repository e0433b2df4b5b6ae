"""How far a student's distribution over the vocabulary is from its teacher's.

With p the teacher's and q the student's probabilities at temperature T, a token adds T^2 times

    forward_kl   sum p (log p - log q)
    reverse_kl   sum q (log q - log p)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)        m = beta p + (1 - beta) q

T^2 keeps the size of the gradient, which softening divides by it.

References:
    Hinton et al., Distilling the knowledge in a neural network, 2015. Agarwal et al., On-policy
    distillation of language models, 2024 (jsd by beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fullshard.config.values import DistillLoss


@dataclass(frozen=True)
class Mix:
    """How teacher and labels share the loss; the fields are those of DistillConfig."""

    loss: DistillLoss
    temperature: float
    alpha: float
    beta: float


def divergence(student: torch.Tensor, teacher: torch.Tensor, mix: Mix) -> torch.Tensor:
    """The sum over tokens.

    Args:
        student: (num_tokens, vocabulary) logits.
        teacher: The same.
        mix: Settings; loss, temperature and beta are read.
    """
    q = log_probabilities(student, mix.temperature)
    p = log_probabilities(teacher, mix.temperature).to(q.dtype)
    match mix.loss:
        case DistillLoss.FORWARD_KL:
            value = _kl(p, q)
        case DistillLoss.REVERSE_KL:
            value = _kl(q, p)
        case DistillLoss.JSD:
            middle = torch.logaddexp(p + math.log(mix.beta), q + math.log(1 - mix.beta))
            value = mix.beta * _kl(p, middle) + (1 - mix.beta) * _kl(q, middle)
        case DistillLoss.HIDDEN:
            raise AssertionError("hidden states have no vocabulary")
    return value * mix.temperature**2


def top_k_divergence(
    student: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, mix: Mix
) -> torch.Tensor:
    """forward_kl against the k logits a token that were kept, as if there were no others.

    Args:
        student: (num_tokens, vocabulary) logits.
        values: (num_tokens, k) of the teacher's logits.
        ids: (num_tokens, k) token ids that they belong to.
        mix: Settings; the temperature is read.
    """
    q = log_probabilities(student, mix.temperature).gather(1, ids)
    p = log_probabilities(values, mix.temperature).to(q.dtype)
    return _kl(p, q) * mix.temperature**2


def cross_entropy(student: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    return F.cross_entropy(student.to(dtype), labels, reduction="sum")


def log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits.to(dtype) / temperature, dim=-1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()
