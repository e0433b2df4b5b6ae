"""The recipe of pretraining: packed sequences, next-token loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fullshard.config.schema import RunConfig
from fullshard.data.order import Indices, SampleOrder
from fullshard.data.text import Dataset
from fullshard.models.build import build_sharded
from fullshard.recipes.base import IGNORED, Objective, RecipeKind, RowBatches, Seat, WholeLogits
from fullshard.recipes.head import Head, NextToken, whole_logits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PackedText(RowBatches):
    """Batches of one rank from packed sequences.

    Args:
        data: What is trained and evaluated on.
        per_device_eval: Held-out sequences that a rank takes at a time.
        order: Which samples each step sees.
        seat: Rank and device.
    """

    def __init__(self, data: Dataset, per_device_eval: int, order: SampleOrder, seat: Seat) -> None:
        super().__init__(len(data.held_out), per_device_eval, order, seat)
        self._train, self._held_out = data.train, data.held_out
        # Known: each sequence predicts all its tokens but the first.
        self.tokens_per_step = self.samples_per_step * (data.train.length - 1)

    @property
    def train_lengths(self) -> Indices:
        """Tokens of each row."""
        return np.full(len(self._train), self._train.length, dtype=np.int64)

    def _arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        sequences = self._held_out if held_out else self._train
        ids = sequences.take(np.maximum(chosen, 0))
        labels = np.where(chosen[:, None] < 0, IGNORED, ids)
        return {"input_ids": ids, "labels": labels}


def build(
    config: RunConfig, model_config: PretrainedConfig, data: RowBatches, seat: Seat, _: Path
) -> nn.Module:
    """The sharded model; the batches have its objective. A collective."""
    model, data.objective = sharded(config, model_config, seat.device)
    return model


def sharded(
    config: RunConfig, model_config: PretrainedConfig, device: torch.device
) -> tuple[nn.Module, Objective]:
    """The sharded model, and its loss: its head makes it where it can. A collective."""

    def before(model: nn.Module) -> object:
        return whole_logits(model, config) or Head(model)

    model = build_sharded(config, model_config, device, before)
    if whole_logits(model, config):
        return model, WholeLogits()
    return model, NextToken(Head.of(model), config.training.loss_chunk_size)


KINDS = {"train": RecipeKind(build)}
