"""The recipe of pre-training: next-token loss of packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from fullshard.config.schema import RunConfig
from fullshard.models.build import build_sharded
from fullshard.recipes.base import Objective, RecipeKind, RowBatches, Seat, whole_logits_loss
from fullshard.recipes.context import divide
from fullshard.recipes.head import Head, next_token, whole_logits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build(
    config: RunConfig, model_config: PretrainedConfig, data: RowBatches, seat: Seat, _: Path
) -> nn.Module:
    """Builds the sharded model and sets the objective of the batches. A collective."""
    model, data.objective = sharded(config, model_config, seat)
    return model


def sharded(
    config: RunConfig, model_config: PretrainedConfig, seat: Seat
) -> tuple[nn.Module, Objective]:
    """The sharded model and its loss, which its head computes if it can. A collective."""

    def prepare(model: nn.Module) -> None:
        divide(model, seat)
        if not whole_logits(model, config):
            Head(model)

    model = build_sharded(config, model_config, seat.device, prepare)
    if whole_logits(model, config):
        return model, whole_logits_loss
    return model, next_token(Head.of(model), config.training.loss_chunk_size)


KINDS = {"train": RecipeKind(build=build)}
