"""Distillation on XLA: the teacher next to the student, or its cached logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from fullshard import xla_state
from fullshard.config.schema import DistillConfig, RunConfig
from fullshard.config.values import DistillLoss, DType
from fullshard.errors import ConfigError
from fullshard.models.config import config_from_folder
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.text import human_bytes
from fullshard.recipes.base import Batch
from fullshard.recipes.distill.loss import TopK, with_logits
from fullshard.recipes.distill.recipe import settings_of
from fullshard.xla.decoder import DecoderConfig, teacher_table
from fullshard.xla.loss import PROJECTION, Decoder, distillation, next_token
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import Fixed, LossFn


@dataclass(frozen=True)
class XlaTeaching:
    """The teacher of a run on XLA.

    Attributes:
        settings: Settings of the loss.
        student: The trained model.
        teacher: The teacher; None if a cache replaces it.
        folder: Folder of the teacher's weights, or of the cache.
        kept: The cache, if there is one.
    """

    settings: DistillConfig
    student: Decoder
    teacher: Decoder | None
    folder: Path
    kept: TopK | None = None

    @property
    def loss(self) -> LossFn:
        """The loss that a step minimises."""
        return distillation(self.student, self.teacher, self.settings)

    @property
    def eval_loss(self) -> LossFn:
        """The loss of an evaluation: the student's cross-entropy."""
        return next_token(self.student, self.settings.tokens_at_once)

    def given(self) -> Fixed | None:
        """The teacher's arrays; each process reads its devices' bytes. A collective."""
        if self.teacher is None:
            return None
        return Fixed(self.teacher.plan, xla_state.load(self.teacher.plan, self.folder)[0].params)

    def beside(self, batch: Batch) -> Batch:
        """The batch with cached logits, if there is a cache."""
        return batch if self.kept is None else with_logits(batch, self.kept)

    def lines(self, num_micro_batches: int) -> Iterator[tuple[str, str]]:
        """Labelled lines of the banner."""
        if self.teacher is None:
            yield "teacher", f"its logits in {self.folder}"
            return
        table = self.teacher.plan.table
        moved = table.forward_gathers(num_micro_batches)
        yield (
            "teacher",
            f"{table.num_parameters:,} parameters of {self.folder}, {table.strategy}, "
            f"{table.arrays[0].dtypes.compute}, {human_bytes(table.state_bytes)} per device; a "
            f"step: all-gather {moved.count:,} x ({human_bytes(moved.num_bytes)} in all)",
        )


def teaching(config: RunConfig, student: Decoder) -> XlaTeaching:
    """The teacher of a run, given the student with its plan.

    Raises:
        ConfigError: The teacher's strategy needs another mesh.
    """
    settings = settings_of(config)
    if settings.cache is not None:
        folder = Path(settings.cache)
        return XlaTeaching(settings, student, None, folder, TopK.load(folder))
    assert config.teacher is not None, "checked before"
    default = DType.FLOAT32 if jax.default_backend() == "cpu" else DType.BFLOAT16
    decoder, table = _decoder(config), _table(config, student.plan.table, default)
    structure = jax.tree.structure(_shapes(decoder, settings))
    placed = XlaPlan(table, student.plan.mesh, structure)
    folder = Path(config.teacher.name_or_path or "")
    return XlaTeaching(settings, student, Decoder(decoder, placed), folder)


def check_teacher(config: RunConfig, student: ArraysPlan) -> None:
    """Refuses, before a rank starts, a teacher that XLA cannot compute.

    Raises:
        ConfigError: The decoder does not support it, or its strategy needs another mesh.
    """
    if config.teacher is None or settings_of(config).cache is not None:
        return
    dtype = settings_of(config).teacher_dtype
    if dtype is DType.FLOAT64 and config.sharding.master_dtype is not DType.FLOAT64:
        raise ConfigError(
            "distill.teacher_dtype: expected float32 or less with backend: jax, which computes in "
            "float64 throughout or not at all; got float64. Set master_dtype to float64 too, or "
            "leave it out."
        )
    _table(config, student, DType.FLOAT32)


def more_shapes(config: RunConfig, width: int) -> Tree:
    """The projection of a student, needed if the teacher's hidden states have another width.

    Args:
        config: Configuration of the run.
        width: Width of the student's hidden states.
    """
    if config.teacher is None or settings_of(config).loss is not DistillLoss.HIDDEN:
        return {}
    theirs = _decoder(config).hidden_size
    if theirs == width:
        return {}
    return {PROJECTION: {"weight": jax.ShapeDtypeStruct((theirs, width), jnp.float32)}}


def _table(config: RunConfig, student: ArraysPlan, default: DType) -> ArraysPlan:
    settings = settings_of(config)
    strategy, dtype = settings.teacher_strategy or student.strategy, settings.teacher_dtype
    teacher = _decoder(config)
    is_dense = not any(".experts." in array.name for array in student.arrays)
    teacher.check_axes(config.sharding, "teacher: ", alone=is_dense)
    shapes, expert = _shapes(teacher, settings), config.sharding.expert
    return teacher_table(shapes, strategy, dtype or default, student, expert)


def _shapes(teacher: DecoderConfig, settings: DistillConfig) -> Tree:
    """A teacher whose hidden states are compared needs no head."""
    shapes = teacher.shapes()
    if settings.loss is DistillLoss.HIDDEN:
        shapes.pop("lm_head", None)
    return shapes


def _decoder(config: RunConfig) -> DecoderConfig:
    try:
        assert config.teacher is not None, "checked before"
        return DecoderConfig.of(config_from_folder(config.teacher, "teacher"), "teacher")
    except ConfigError as error:
        raise ConfigError(
            f"{error} Write its logits with `fullshard distill cache` and backend: torch, and use "
            "them (distill.cache) with backend: jax."
        ) from error
