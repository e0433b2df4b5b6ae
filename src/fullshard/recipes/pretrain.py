"""The recipe of pretraining: packed sequences, next-token loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fullshard.data.order import Indices, SampleOrder, evaluation_samples
from fullshard.data.tokenizer import Tokens
from fullshard.recipes.base import IGNORED, Batch, causal_lm_loss


@dataclass(frozen=True)
class Sequences:
    """Packed text.

    Attributes:
        train: (num_sequences, length) token ids.
        held_out: The same, or None.
        per_device_eval: Held-out sequences that a rank takes at a time.
    """

    train: Tokens
    held_out: Tokens | None
    per_device_eval: int


class PackedText:
    """Batches of one rank from packed sequences.

    Args:
        sequences: What is trained and evaluated on.
        order: Which samples each step sees.
        rank: This rank.
        device: Where batches go.
    """

    def __init__(
        self, sequences: Sequences, order: SampleOrder, rank: int, device: torch.device
    ) -> None:
        self._train = sequences.train
        self._held_out = sequences.held_out
        self._order = order
        self._rank = rank
        self._device = device
        self._evaluation: Indices | None = None
        if sequences.held_out is not None:
            self._evaluation = evaluation_samples(
                len(sequences.held_out), sequences.per_device_eval, order.shape.world_size
            )

    @property
    def samples_per_step(self) -> int:
        return self._order.shape.global_batch

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def tokens_per_step(self) -> int | None:
        """Known: each sequence predicts all its tokens but the first."""
        return self.samples_per_step * (self._train.shape[1] - 1)

    def micro_batches(self, step: int) -> list[Batch]:
        samples = self._order.of_step(step)[:, self._rank]
        return [self._batch(self._train, chosen) for chosen in samples]

    @property
    def train_lengths(self) -> Indices:
        """Tokens of each row."""
        return np.full(len(self._train), self._train.shape[1], dtype=np.int64)

    def train_rows(self, chosen: Indices) -> Batch:
        """Some rows as a batch."""
        return self._batch(self._train, chosen)

    def held_out(self) -> Iterable[Batch]:
        if self._held_out is None or self._evaluation is None:
            return
        for chosen in self._evaluation[:, self._rank]:
            yield self._batch(self._held_out, chosen)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return causal_lm_loss(logits, batch["labels"])

    def _batch(self, sequences: Tokens, chosen: Indices) -> Batch:
        """Sequences as a batch; a place that holds -1 gets labels that count nothing."""
        ids = torch.from_numpy(sequences[np.maximum(chosen, 0)].astype(np.int64))
        labels = ids.clone()
        labels[torch.from_numpy(chosen < 0)] = IGNORED
        arrays = {"input_ids": ids, "labels": labels, "rows": torch.from_numpy(chosen.copy())}
        return {name: value.to(self._device) for name, value in arrays.items()}
