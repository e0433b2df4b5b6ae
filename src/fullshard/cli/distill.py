"""`fullshard distill`: a student learns from a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.recipe import FLAGS, How, RestartsFlag, ResumeFlag, made_first, run_recipe
from fullshard.cli.words import (
    OPEN_WORDS,
    ConfigFileFlag,
    ConfigFlag,
    DryRunFlag,
    JsonFlag,
    Words,
    load,
    split_config,
)

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved

app = typer.Typer(help="Train a student to predict what a teacher predicts.")

# By the engine: the job without a configuration file, and the one that makes its teacher.
JOBS = {
    "torch": ("distill_job.yaml", "teacher_job.yaml"),
    "jax": ("distill_jax_job.yaml", "main_job.yaml"),
}


@app.command(context_settings=OPEN_WORDS)
def distill(  # noqa: PLR0913  (one parameter an option)
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    resume: ResumeFlag = None,
    max_restarts: RestartsFlag = 0,
    as_json: JsonFlag = False,  # noqa: ARG001  read by cli.app
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Distill a teacher into a student.

    Without a configuration file, a small mixture of experts is trained as the teacher if it is
    missing, and a student with half of its layers and experts is cut out of it. With backend=jax a
    smaller student learns from the model in runs/train.

    `fullshard distill cache CONFIG` writes the teacher's logits to disk, for runs without it.
    """
    from fullshard.config.values import Command

    caches = bool(words) and words[0] == "cache"
    words = words[1:] if words and caches else words
    resolved = load(words, config, config_file, flags=FLAGS, default=JOBS["torch"][0])
    job, teacher_job = JOBS[resolved.config.backend]
    if config_file is None and split_config(words or (), config)[0] is None:
        resolved = load(words, flags=FLAGS, default=job_file(job, resolved))
    how = How(resume, max_restarts, dry_run)
    command = Command.CACHE if caches else Command.DISTILL
    teacher = resolved.config.teacher and resolved.config.teacher.name_or_path
    ended = made_first(command, resolved, teacher, teacher_job, how)
    if ended is not None:
        return ended
    return run_recipe(command, resolved, how)


def job_file(name: str, resolved: Resolved) -> File:
    """The job without a configuration file; how its student is cut is for its own teacher."""
    from fullshard.config.files import read_file
    from fullshard.config.origins import OriginKind

    file = read_file(None, name)
    named = (resolved.origins.get(key) for key in ("teacher.name_or_path", "model.name_or_path"))
    if any(origin and origin.kind is OriginKind.COMMAND_LINE for origin in named):
        return file.without(["distill.layers", "distill.experts"])
    return file
