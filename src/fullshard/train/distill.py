"""The recipe of distillation: another recipe's batches, the loss against a teacher.

    teacher body --> teacher's head asked --> student body --> student's head asked
                     (its weight is there)                     (both weights are there)
                                                               chunks of tokens: see head.py

The student runs inside the teacher's head, so both heads are gathered at the same time and once.
Only tokens that are predicted take part; evaluation is the student's cross-entropy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.values import DistillLoss
from fullshard.models.lora import PROJECTION
from fullshard.train.divergence import Mix, cross_entropy, divergence, top_k_divergence
from fullshard.train.head import Head, chunked
from fullshard.train.loop import Batch, Recipe
from fullshard.train.loss import IGNORED
from fullshard.train.top_k import TOP_IDS, TOP_VALUES, TopK, with_logits


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
        mix: The loss.
        chunk_size: Tokens whose logits are held at a time.
    """

    def __init__(
        self, data: Recipe, head: Head, teacher: Teacher | TopK, mix: Mix, chunk_size: int
    ) -> None:
        self._data = data
        self._head = head
        self._teacher = teacher
        self._mix = mix
        self._chunk_size = chunk_size

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
            {name: batch[name] for name in ("input_ids", "position_ids") if name in batch},
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
                rows, w, b, lambda h, w, b, rows: loss(F.linear(h, w, b), rows), self._chunk_size
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
                if self._mix.loss is DistillLoss.HIDDEN:
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
            value = divergence(student[:, :size], teacher[:, :size], self._mix)
            return self._mixed(value, student, step.targets[at])

        return loss

    def _beside_cache(
        self, step: _Step, batch: Batch
    ) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        """Against the logits that `distill cache` kept."""
        values, ids = (batch[name][:, :-1][step.predicted] for name in (TOP_VALUES, TOP_IDS))

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            value = top_k_divergence(student, values[at], ids[at], self._mix)
            return self._mixed(value, student, step.targets[at])

        return loss

    def _labels(self, step: _Step) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        share = 1 - self._mix.alpha
        return lambda student, at: share * cross_entropy(student, step.targets[at])

    def _mixed(
        self, value: torch.Tensor, student: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        alpha = self._mix.alpha
        if alpha == 1:
            return value
        return alpha * value + (1 - alpha) * cross_entropy(student, targets)

    def _apart(self, model: nn.Module, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Mean square over the width, summed over tokens."""
        projection = getattr(model, PROJECTION, None)
        seen = own if projection is None else projection(own)
        dtype = torch.promote_types(seen.dtype, torch.float32)
        return self._mix.alpha * (seen.to(dtype) - other.to(dtype)).square().mean(-1).sum()


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
