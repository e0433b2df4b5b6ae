"""`fullshard distill`: what is known of it without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.recipes.registry import Command, RecipeCommand

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved
    from fullshard.config.problems import Problem
    from fullshard.config.schema import RunConfig

_DENSE = (
    "Give the student a dense configuration: mixtures of experts, of which students are cut, are "
    "torch's"
)


def _check(config: RunConfig, command: Command) -> Iterator[Problem]:
    from fullshard.config.problems import Problem, show
    from fullshard.config.schema import DistillConfig
    from fullshard.config.supported import NotYet
    from fullshard.config.values import Backend, DistillLoss

    settings = config.distill or DistillConfig()
    cached = settings.cache is not None and command is Command.DISTILL
    if config.backend is Backend.JAX:
        if command is Command.CACHE:
            says = "'jax' under `fullshard distill cache` is not yet supported"
            yield Problem("backend", "", says, "Use torch: backend: jax learns from what it leaves")
        else:
            instead = {"teacher_offload": "Leave it out, or use backend: torch"}
            for key in ("teacher_offload", "experts", "layers"):
                row = NotYet(key, instead.get(key, _DENSE))
                yield from row.problems(settings, "distill", "with backend: jax ")
    if config.teacher is None and not cached:
        advice = "Name a model folder, or distill.cache"
        yield Problem("teacher", "the model that is learned from", "none", advice)
    cuts = (settings.experts, settings.layers) != (None, None)
    if cuts and (config.model != config.teacher or cached):
        expected, advice = "a teacher, and no student: it is cut out of it", "Leave model out"
        yield Problem("distill.experts", expected, "another model or a cache", advice)
    if cached and settings.teacher_offload is not None:
        says, advice = show(settings.teacher_offload), "Leave it out: no teacher runs"
        yield Problem("distill.teacher_offload", "no distill.cache beside it", says, advice)
    if cached and settings.loss is not DistillLoss.FORWARD_KL:
        advice = "The others need logits that were not kept"
        yield Problem("distill.loss", "forward_kl with distill.cache", show(settings.loss), advice)


def job(resolved: Resolved | None) -> File:
    """The job without a configuration file; how its student is cut is for its own teacher."""
    from fullshard.config.files import read_job
    from fullshard.config.origins import OriginKind
    from fullshard.config.values import Backend

    if resolved is None:
        return read_job("distill_job.yaml", __package__)
    on_xla = resolved.config.backend is Backend.JAX
    file = read_job("distill_jax_job.yaml" if on_xla else "distill_job.yaml", __package__)
    named = (resolved.origins.get(key) for key in ("teacher.name_or_path", "model.name_or_path"))
    if any(origin and origin.kind is OriginKind.COMMAND_LINE for origin in named):
        return file.without(["distill.layers", "distill.experts"])
    return file


def _begins_with(config: RunConfig) -> tuple[str | None, File]:
    from fullshard.config.files import read_job
    from fullshard.config.values import Backend

    on_xla = config.backend is Backend.JAX
    maker = read_job() if on_xla else read_job("teacher_job.yaml", __package__)
    return config.teacher and config.teacher.name_or_path, maker


COMMAND = RecipeCommand(
    help="""Distill a teacher into a student.

    Without a configuration file, a small mixture of experts is trained as the teacher if it is
    missing, and a student with half of its layers and experts is cut out of it. With backend=jax a
    smaller student learns from the model in runs/train.

    `fullshard distill cache CONFIG` writes the teacher's logits to disk, for runs without it.
    """,
    example="teacher=FOLDER student=FOLDER data=texts/",
    sections=("teacher", "distill", "sft"),
    check=_check,
    job=job,
    begins_with=_begins_with,
)
