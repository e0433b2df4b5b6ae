"""`fullshard train`: pretraining from a configuration, or the main job without one."""

from __future__ import annotations

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.recipe import FLAGS, How, RestartsFlag, ResumeFlag, run_recipe
from fullshard.cli.words import (
    OPEN_WORDS,
    ConfigFileFlag,
    ConfigFlag,
    DryRunFlag,
    JsonFlag,
    Words,
    load,
)

app = typer.Typer(
    help="Train a causal language model on text.",
)


@app.command(context_settings=OPEN_WORDS)
def train(  # noqa: PLR0913  (one parameter an option)
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    resume: ResumeFlag = None,
    max_restarts: RestartsFlag = 0,
    as_json: JsonFlag = False,  # noqa: ARG001  read by cli.app
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Train a model on text; without a configuration file, the main job.

    The main job trains a small Llama on the text of Python's language reference, on two local
    ranks, in two or three minutes. --NAME VALUE is training.NAME=VALUE; torchrun's flags may stand
    after `--`: fullshard train CONFIG -- --nproc-per-node 4.
    """
    from fullshard.config.values import Command

    resolved = load(words, config, config_file, flags=FLAGS)
    return run_recipe(Command.TRAIN, resolved, How(resume, max_restarts, dry_run))
