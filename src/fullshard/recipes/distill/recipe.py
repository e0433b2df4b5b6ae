"""The recipe of distillation: batches, and a teacher or its cached logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from fullshard.config.schema import ModelConfig, RunConfig
from fullshard.data.chat import is_chat
from fullshard.data.dataset import DatasetFacts
from fullshard.models.student import is_cut
from fullshard.recipes.base import RecipeKind, RowBatches, Seat
from fullshard.recipes.distill.logits import TopK, check_facts
from fullshard.recipes.distill.teacher import (
    build_student,
    build_teacher,
    check_teacher,
    cut_student,
    settings_of,
    write_cache,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _uses_chats(config: RunConfig) -> bool:
    return config.data.path is not None and is_chat(Path(config.data.path))


def _check_data(config: RunConfig, facts: DatasetFacts) -> None:
    """Checks that cached logits belong to this data."""
    cache = settings_of(config).cache
    if cache:
        check_facts(Path(cache), facts)


def _build(
    config: RunConfig, model_config: PretrainedConfig, data: RowBatches, seat: Seat, folder: Path
) -> nn.Module:
    """Builds the teacher, then the student, which may be cut out of the teacher."""
    settings = settings_of(config)
    if settings.cache is not None:
        teacher = TopK.load(Path(settings.cache))
    else:
        teacher = build_teacher(config, seat, folder)
        if is_cut(settings):
            place = folder / "student"
            cut_student(config, teacher, data, place, seat)
            whole = settings.model_copy(update={"experts": None, "layers": None})
            model = ModelConfig(name_or_path=str(place))
            config = config.model_copy(update={"model": model, "distill": whole})
    student, distillation = build_student(config, teacher, model_config, seat)
    data.objective = distillation.loss
    return student


_CACHE = RecipeKind(_build, _uses_chats, check_teacher, write=write_cache)
_DISTILL = replace(
    _CACHE,
    check_data=_check_data,
    write=None,
    xla="fullshard.recipes.distill.xla",
)
KINDS = {"distill": _DISTILL, "distill-cache": _CACHE}
