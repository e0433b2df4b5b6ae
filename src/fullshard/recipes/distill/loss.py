"""The recipe of distillation: another recipe's batches, the loss against a teacher.

    teacher body --> teacher's head asked --> student body --> student's head asked
                     (its weight is there)                     (both weights are there)
                                                               chunks of tokens: see head.py

The student runs inside the teacher's head, so both heads are gathered at the same time and once.
Only tokens that are predicted take part; evaluation is the student's cross-entropy alone.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.models.lora import PROJECTION
from fullshard.recipes.base import IGNORED, Batch, Recipe, inputs_of
from fullshard.recipes.distill.head import Head, chunked
from fullshard.recipes.distill.logits import TOP_IDS, TOP_VALUES, TopK, with_logits


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, settings: DistillConfig
) -> torch.Tensor:
    """The sum over tokens.

    Args:
        student: (num_tokens, vocabulary) logits.
        teacher: The same.
        settings: loss, temperature and beta are read.
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
    """forward_kl against the k logits a token that were kept, as if there were no others.

    Args:
        student: (num_tokens, vocabulary) logits.
        values: (num_tokens, k) of the teacher's logits.
        ids: (num_tokens, k) token ids that they belong to.
        settings: the temperature is read.
    """
    q = log_probabilities(student, settings.temperature).gather(1, ids)
    p = log_probabilities(values, settings.temperature).to(q.dtype)
    return _kl(p, q) * settings.temperature**2


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


@dataclass(frozen=True)
class Teacher:
    """A sharded model without gradients, and its head."""

    model: nn.Module
    head: Head


class Distillation:
    """A recipe around another one's data.

    Args:
        data: Whose batches these are.
        head: Head of the student.
        teacher: A model, or the logits that one left.
        settings: The loss, and tokens whose logits are held at a time.
    """

    def __init__(
        self, data: Recipe, head: Head, teacher: Teacher | TopK, settings: DistillConfig
    ) -> None:
        self._data = data
        self._head = head
        self._teacher = teacher
        self._settings = settings

    @property
    def samples_per_step(self) -> int:
        return self._data.samples_per_step

    @property
    def steps_per_epoch(self) -> int:
        return self._data.steps_per_epoch

    @property
    def tokens_per_step(self) -> int | None:
        return self._data.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        batches = self._data.micro_batches(step)
        if isinstance(self._teacher, TopK):
            return [with_logits(batch, self._teacher) for batch in batches]
        return batches

    def held_out(self) -> Iterable[Batch]:
        return self._data.held_out()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        labels = batch["labels"][:, 1:]
        step = _Step(
            inputs_of(batch),
            predicted := (labels != IGNORED).nonzero(as_tuple=True),
            labels[predicted],
        )
        if not model.training:
            total = self._student(model, step, lambda z, rows: cross_entropy(z, step.targets[rows]))
        elif isinstance(self._teacher, TopK):
            total = self._student(model, step, self._beside_cache(step, batch))
        else:
            total = self._inside_teacher(self._teacher, model, step)
        return total, len(step.targets)

    def _student(
        self,
        model: nn.Module,
        step: _Step,
        loss: Callable[[torch.Tensor, slice], torch.Tensor],
        hidden_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The student's forward, whose head makes the loss of (logits, which tokens)."""

        def answer(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            rows = h[:, :-1][step.predicted]
            total = chunked(
                rows,
                w,
                b,
                lambda h, w, b, rows: loss(F.linear(h, w, b), rows),
                self._settings.chunk_size,
            )
            if hidden_loss is not None:
                total = total + hidden_loss(rows)
            return total.reshape(1, 1, 1)

        with self._head.asked(answer):
            return model(**step.inputs, use_cache=False).logits.reshape(())

    def _inside_teacher(self, teacher: Teacher, model: nn.Module, step: _Step) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def answer(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            rows = h[:, :-1][step.predicted]
            with torch.enable_grad():
                if self._settings.loss is DistillLoss.HIDDEN:
                    total = self._student(
                        model, step, self._labels(step), lambda own: self._apart(model, own, rows)
                    )
                else:
                    total = self._student(model, step, self._beside(step, rows, w, b))
            found.append(total)
            return h.new_zeros(1, 1, 1)

        with torch.no_grad(), teacher.head.asked(answer):
            teacher.model(**step.inputs, use_cache=False)
        return found[0]

    def _beside(
        self, step: _Step, rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        """Against the teacher's logits, which are made a chunk at a time too."""

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            with torch.no_grad():
                teacher = F.linear(rows[at], w, b)
            size = min(student.shape[1], teacher.shape[1])  # entries behind are padding
            value = divergence(student[:, :size], teacher[:, :size], self._settings)
            return self._mixed(value, student, step.targets[at])

        return loss

    def _beside_cache(
        self, step: _Step, batch: Batch
    ) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        """Against the logits that `distill cache` kept."""
        values, ids = (batch[name][:, :-1][step.predicted] for name in (TOP_VALUES, TOP_IDS))

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            value = top_k_divergence(student, values[at], ids[at], self._settings)
            return self._mixed(value, student, step.targets[at])

        return loss

    def _labels(self, step: _Step) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        share = 1 - self._settings.alpha
        return lambda student, at: share * cross_entropy(student, step.targets[at])

    def _mixed(
        self, value: torch.Tensor, student: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        alpha = self._settings.alpha
        if alpha == 1:
            return value
        return alpha * value + (1 - alpha) * cross_entropy(student, targets)

    def _apart(self, model: nn.Module, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Mean square over the width, summed over tokens."""
        projection = getattr(model, PROJECTION, None)
        seen = own if projection is None else projection(own)
        dtype = torch.promote_types(seen.dtype, torch.float32)
        return self._settings.alpha * (seen.to(dtype) - other.to(dtype)).square().mean(-1).sum()


@dataclass(frozen=True)
class _Step:
    """A micro-batch.

    Attributes:
        inputs: Arguments of both models.
        predicted: Rows and columns of (batch, length - 1) that predict a token that counts.
        targets: (num_predicted,) these tokens.
    """

    inputs: Batch
    predicted: tuple[torch.Tensor, ...]
    targets: torch.Tensor
