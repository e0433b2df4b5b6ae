"""The teacher in the plan of a run: its memory, and the joint step of student and teacher.

The teacher has a plan of its own, whose rows are listed next to the student's. Activations of both
are traced together, because the student runs inside the teacher's head (see loss.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import fullshard as fs
from fullshard.config.schema import DistillConfig, RunConfig, ShardConfig
from fullshard.engine.hugging_face import build_on_meta
from fullshard.models.config import config_from_folder
from fullshard.outlook.memory import TEACHER
from fullshard.planner.memory import MemoryRow
from fullshard.planner.plan import Plan
from fullshard.recipes.distill.logits import TOP_IDS, TOP_VALUES, TopK
from fullshard.recipes.distill.loss import Distillation, Teacher
from fullshard.recipes.distill.recipe import settings_of, teacher_dtype, teacher_sharding
from fullshard.recipes.head import Head


@dataclass(frozen=True)
class Taught:
    """The teacher of a planned run.

    Attributes:
        config: Configuration of the run.
        teacher: The teacher on meta with its head installed; None if a cache replaces it.
        local_world_size: Ranks per host.
        resolved: Fills in what a sharding leaves open, for the planned machine.
    """

    config: RunConfig
    teacher: nn.Module | None
    local_world_size: int | None
    resolved: Callable[[ShardConfig], ShardConfig]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        local_world_size: int | None,
        *,
        on_gpu: bool,
        resolved: Callable[[ShardConfig], ShardConfig] = lambda sharding: sharding,
    ) -> Taught | None:
        """The teacher of a run; None for a run without one."""
        settings = settings_of(config)
        if config.teacher is None or settings.cache is not None:
            if settings.cache is None:
                return None
            return cls(config, None, local_world_size, resolved)
        dtype = teacher_dtype(settings, on_gpu=on_gpu)
        model = build_on_meta(config_from_folder(config.teacher, "teacher"), dtype).eval()
        model.requires_grad_(requires_grad=False)
        Head(model)
        return cls(config, model, local_world_size, resolved)

    @property
    def settings(self) -> DistillConfig:
        return settings_of(self.config)

    @property
    def beside(self) -> tuple[nn.Module, ...]:
        """Models that run in the student's step."""
        return () if self.teacher is None else (self.teacher,)

    def rows(self, plan: Plan, sharding: ShardConfig) -> tuple[MemoryRow, ...]:
        """Memory of the teacher next to a student with this plan and sharding."""
        if self.teacher is None:
            return ()
        config = self.config.model_copy(update={"sharding": sharding})
        dtype = next(self.teacher.parameters()).dtype
        own = teacher_sharding(config, self.settings, dtype, Path())
        found = fs.plan(
            self.teacher,
            self.resolved(own),
            world_size=plan.mesh.world_size,
            local_world_size=self.local_world_size,
        )
        return tuple(replace(row, name=TEACHER + row.name) for row in found.memory if row.num_bytes)

    def work(self, samples: int, length: int) -> Callable[..., torch.Tensor]:
        """Forward and loss of a micro-batch of full rows, as in training."""
        s = self.settings

        def work(student: nn.Module, *teachers: nn.Module) -> torch.Tensor:
            ids = torch.zeros(samples, length, dtype=torch.long)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            if teachers:
                teacher = Teacher(teachers[0], Head.of(teachers[0]))
            else:
                teacher = TopK(None, None, None)
                values = torch.zeros(samples, length, s.top_k)
                batch |= {TOP_VALUES: values, TOP_IDS: values.long()}
            objective = Distillation(Head.of(student), teacher, s)
            return objective.loss(student.train(), batch)[0] * 1.0

        return work
