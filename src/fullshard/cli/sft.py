"""`fullshard sft`: supervised fine-tuning on chat data."""

from __future__ import annotations

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
)

app = typer.Typer(help="Fine-tune a model on conversations.")

JOB, MAIN_JOB = "sft_job.yaml", "main_job.yaml"


@app.command(context_settings=OPEN_WORDS)
def sft(  # noqa: PLR0913  (one parameter an option)
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    resume: ResumeFlag = None,
    max_restarts: RestartsFlag = 0,
    as_json: JsonFlag = False,  # noqa: ARG001  read by cli.app
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Fine-tune a model on questions and answers or conversations.

    Without a configuration file, the model in runs/train (which is trained first if it is missing)
    learns from docstrings to answer what the functions of Python's library do.
    """
    from fullshard.config.values import Command

    resolved = load(words, config, config_file, flags=FLAGS, default=JOB)
    how = How(resume, max_restarts, dry_run)
    ended = made_first(Command.SFT, resolved, resolved.config.model.name_or_path, MAIN_JOB, how)
    if ended is not None:
        return ended
    return run_recipe(Command.SFT, resolved, how)
