"""The objective of distillation: the loss against a teacher.

    teacher body --> teacher's head -----> student body --> student's head
                     (its weight gathered)                  (both weights gathered)
                                                            chunks of tokens: see head.py

The student runs inside the teacher's head, so both heads are gathered once and at the same time.
Only predicted tokens count. Evaluation uses only the student's cross-entropy.

With p the teacher's and q the student's probabilities at temperature T, a token adds T^2 times

    forward_kl   sum p (log p - log q)
    reverse_kl   sum q (log q - log p)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)        m = beta p + (1 - beta) q

T^2 restores the size of the gradient, which the temperature divides by T^2.

References:
    Hinton et al., Distilling the knowledge in a neural network, 2015. Agarwal et al., On-policy
    distillation of language models, 2024 (jsd by beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.models.lora import PROJECTION
from fullshard.recipes.base import Batch, cross_entropy
from fullshard.recipes.distill.logits import TOP_IDS, TOP_VALUES, TopK, with_logits
from fullshard.recipes.head import ChunkLoss, Head, Tokens


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, settings: DistillConfig
) -> torch.Tensor:
    """The divergence, summed over tokens.

    Args:
        student: (num_tokens, vocabulary) logits of the student.
        teacher: (num_tokens, vocabulary) logits of the teacher.
        settings: Loss, temperature and beta.
    """
    q = log_probabilities(student, settings.temperature)
    p = log_probabilities(teacher, settings.temperature).to(q.dtype)
    match settings.loss:
        case DistillLoss.FORWARD_KL:
            value = _kl(p, q)
        case DistillLoss.REVERSE_KL:
            value = _kl(q, p)
        case DistillLoss.JSD:
            middle = torch.logaddexp(p + math.log(settings.beta), q + math.log(1 - settings.beta))
            value = settings.beta * _kl(p, middle) + (1 - settings.beta) * _kl(q, middle)
        case DistillLoss.HIDDEN:
            raise AssertionError("hidden states have no vocabulary")
    return value * settings.temperature**2


def top_k_divergence(
    student: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, settings: DistillConfig
) -> torch.Tensor:
    """forward_kl against k cached logits per token, as if there were no others.

    Args:
        student: (num_tokens, vocabulary) logits of the student.
        values: (num_tokens, k) logits of the teacher.
        ids: (num_tokens, k) token ids of these logits.
        settings: Temperature.
    """
    q = log_probabilities(student, settings.temperature).gather(1, ids)
    p = log_probabilities(values, settings.temperature).to(q.dtype)
    return _kl(p, q) * settings.temperature**2


def log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-softmax in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits.to(dtype) / temperature, dim=-1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@dataclass(frozen=True)
class Teacher:
    """A sharded teacher without gradients, and its head."""

    model: nn.Module
    head: Head


class Distillation:
    """The objective of a student.

    Args:
        head: Head of the student.
        teacher: A model, or the cached logits of one.
        settings: Loss, and number of tokens whose logits are in memory at a time.
    """

    def __init__(self, head: Head, teacher: Teacher | TopK, settings: DistillConfig) -> None:
        self._head = head
        self._teacher = teacher
        self._settings = settings

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        tokens = Tokens.of(batch)
        if not model.training:
            own = partial(self._cross_entropy, tokens)
            total = self._head.loss(model, tokens, own, self._settings.tokens_at_once)
        elif isinstance(self._teacher, TopK):
            known = batch if TOP_VALUES in batch else with_logits(batch, self._teacher)
            beside = self._beside_cache(tokens, known)
            total = self._head.loss(model, tokens, beside, self._settings.tokens_at_once)
        else:
            total = self._inside_teacher(self._teacher, model, tokens)
        return total, len(tokens.targets)

    def _inside_teacher(self, teacher: Teacher, model: nn.Module, tokens: Tokens) -> torch.Tensor:
        found: list[torch.Tensor] = []
        share, size = 1 - self._settings.alpha, self._settings.tokens_at_once

        def labels(student: torch.Tensor, at: slice) -> torch.Tensor:
            return share * self._cross_entropy(tokens, student, at)

        def answer(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            rows, loss, apart = tokens.rows(h), labels, None
            if self._settings.loss is DistillLoss.HIDDEN:
                apart = partial(self._apart, model, rows)
            else:
                loss = self._beside(tokens, rows, w, b)
            with torch.enable_grad():
                found.append(self._head.loss(model, tokens, loss, size, apart))
            return h.new_zeros(1, 1, 1)

        with torch.no_grad(), teacher.head.asked(answer):
            teacher.model(**tokens.inputs, use_cache=False)
        return found[0]

    def _beside(
        self, tokens: Tokens, rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> ChunkLoss:
        """Loss against the teacher's logits, which are computed chunk by chunk too."""

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            with torch.no_grad():
                teacher = F.linear(rows[at], w, b)
            size = min(student.shape[1], teacher.shape[1])  # the rest is padding
            value = divergence(student[:, :size], teacher[:, :size], self._settings)
            return self._mixed(value, student, tokens.targets[at])

        return loss

    def _beside_cache(self, tokens: Tokens, batch: Batch) -> ChunkLoss:
        """Loss against the logits that `distill cache` wrote."""
        values, ids = tokens.rows(batch[TOP_VALUES]), tokens.rows(batch[TOP_IDS])

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            value = top_k_divergence(student, values[at], ids[at], self._settings)
            return self._mixed(value, student, tokens.targets[at])

        return loss

    def _cross_entropy(self, tokens: Tokens, student: torch.Tensor, at: slice) -> torch.Tensor:
        return cross_entropy(student, tokens.targets[at])

    def _mixed(
        self, value: torch.Tensor, student: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        alpha = self._settings.alpha
        if alpha == 1:
            return value
        return alpha * value + (1 - alpha) * cross_entropy(student, targets)

    def _apart(self, model: nn.Module, other: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Mean squared difference of hidden states over the width, summed over tokens."""
        projection = getattr(model, PROJECTION, None)
        seen = own if projection is None else projection(own)
        dtype = torch.promote_types(seen.dtype, torch.float32)
        return self._settings.alpha * (seen.to(dtype) - other.to(dtype)).square().mean(-1).sum()
