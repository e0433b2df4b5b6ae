"""Fine-tune a model on questions and answers or on conversations.

Without a configuration file, the built-in job teaches the model in runs/train to say what the
functions of Python's library do, from their docstrings. That model is trained first if it does not
exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.config.values import Backend, Problem
from fullshard.recipes.registry import Command, RecipeCommand

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.schema import RunConfig

EXAMPLE = "model=FOLDER data=chats.jsonl max_steps=100"


def check(config: RunConfig, _: Command) -> Iterator[Problem]:
    """Refuses prompts on XLA, which does not answer them."""
    sft = config.sft
    if config.backend is not Backend.JAX or sft is None:
        return
    if "num_samples" in sft.model_fields_set and sft.num_samples:
        says = f"{sft.num_samples} with backend: jax is not yet supported"
        yield Problem("sft.num_samples", "", says, "Leave it out; no prompts are answered")


def _job(_: object) -> File:
    from fullshard.config.files import read_job

    return read_job("sft_job.yaml", __package__)


def _begins_with(config: RunConfig) -> tuple[str | None, File]:
    from fullshard.config.files import read_job

    return config.model.name_or_path, read_job()


COMMAND = RecipeCommand(sections=("sft",), check=check, job=_job, begins_with=_begins_with)
