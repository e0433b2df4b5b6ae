"""Distill a teacher into a student.

Without a configuration file, the built-in job distills a small mixture of experts into a student
with half of its layers and experts. The teacher is trained first if it does not exist. With
backend=jax a smaller student learns from the model in runs/train.

`fullshard distill cache CONFIG` writes the teacher's logits to disk, for runs without the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.config.values import Backend, DistillLoss, Problem, show
from fullshard.recipes.registry import Command, RecipeCommand
from fullshard.recipes.sft import check as check_chats

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved
    from fullshard.config.schema import RunConfig

EXAMPLE = "teacher=FOLDER student=FOLDER data=texts/"
_UNCUT = "Give the student its own configuration or folder, or use backend: torch"
_NOT_ON_XLA = {
    "teacher_offload": ("Leave it out, or use backend: torch",),
    **dict.fromkeys(("experts", "layers"), (_UNCUT,)),
}


def _check(config: RunConfig, command: Command) -> Iterator[Problem]:
    from fullshard.config.schema import DistillConfig
    from fullshard.config.supported import unsupported

    yield from check_chats(config, command)
    settings = config.distill or DistillConfig()
    cached = settings.cache is not None and command is Command.DISTILL
    if config.backend is Backend.JAX:
        if command is Command.CACHE:
            says = "'jax' under `fullshard distill cache` is not yet supported"
            yield Problem("backend", "", says, "Use torch; runs with backend: jax read the cache")
        else:
            yield from unsupported(settings, _NOT_ON_XLA, "distill", "with backend: jax ")
    if config.teacher is None and not cached:
        advice = "Set a model folder, or distill.cache"
        yield Problem("teacher", "the model from which the student learns", "none", advice)
    cuts = [name for name in ("experts", "layers") if getattr(settings, name) is not None]
    if cuts and (config.model != config.teacher or cached):
        expected, advice = "a teacher and no student, which is cut out of it", "Leave model out"
        yield Problem(f"distill.{cuts[0]}", expected, "another model or a cache", advice)
    if cached and settings.teacher_offload is not None:
        says, advice = show(settings.teacher_offload), "Leave it out, because no teacher runs"
        yield Problem("distill.teacher_offload", "no distill.cache together with it", says, advice)
    if cached and settings.loss is not DistillLoss.FORWARD_KL:
        advice = "Other losses need logits that the cache does not contain"
        yield Problem("distill.loss", "forward_kl with distill.cache", show(settings.loss), advice)


def job(resolved: Resolved | None) -> File:
    """The job without a configuration file; its cuts apply only to its own teacher.

    A student that is named together with a cache needs no teacher.
    """
    from fullshard.config.files import OriginKind, read_job

    if resolved is None:
        return read_job("distill_job.yaml", __package__)
    on_xla = resolved.config.backend is Backend.JAX
    file = read_job("distill_jax_job.yaml" if on_xla else "distill_job.yaml", __package__)
    keys = ("teacher.name_or_path", "model.name_or_path", "distill.cache")
    found = (resolved.origins.get(key) for key in keys)
    named = [origin is not None and origin.kind is OriginKind.COMMAND_LINE for origin in found]
    if any(named[:2]):
        file.remove(["distill.layers", "distill.experts"])
    if named == [False, True, True]:
        file.remove(["teacher"])
    return file


def _begins_with(config: RunConfig) -> tuple[str | None, File]:
    from fullshard.config.files import read_job

    on_xla = config.backend is Backend.JAX
    maker = read_job() if on_xla else read_job("teacher_job.yaml", __package__)
    return config.teacher and config.teacher.name_or_path, maker


COMMAND = RecipeCommand(
    sections=("teacher", "distill", "sft"), check=_check, job=job, begins_with=_begins_with
)
