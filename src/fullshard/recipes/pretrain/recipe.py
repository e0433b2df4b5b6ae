"""The recipe of pre-training: next-token loss of packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from fullshard.config.schema import RunConfig
from fullshard.models.build import build_sharded
from fullshard.recipes.base import RecipeKind, RowBatches, Seat
from fullshard.recipes.context import divide
from fullshard.recipes.head import Head, next_token, whole_logits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build(
    config: RunConfig, model_config: PretrainedConfig, data: RowBatches, seat: Seat, _: Path
) -> nn.Module:
    """Builds the sharded model, whose head computes the loss if it can. A collective."""

    def prepare(model: nn.Module) -> None:
        divide(model, seat)
        if not whole_logits(model, config):
            Head(model)

    model = build_sharded(config, model_config, seat.device, prepare)
    if not whole_logits(model, config):
        data.objective = next_token(Head.of(model), config.training.loss_chunk_size)
    return model


KINDS = {"train": RecipeKind(build=build)}
