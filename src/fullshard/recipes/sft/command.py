"""`fullshard sft`: what is known of it without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.recipes.registry import RecipeCommand

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved
    from fullshard.config.schema import RunConfig


def _job(_: Resolved | None) -> File:
    from fullshard.config.files import read_job

    return read_job("sft_job.yaml", __package__)


def _begins_with(config: RunConfig) -> tuple[str | None, File]:
    from fullshard.config.files import read_job

    return config.model.name_or_path, read_job()


COMMAND = RecipeCommand(
    help="""Fine-tune a model on questions and answers or conversations.

    Without a configuration file, the model in runs/train (which is trained first if it is missing)
    learns from docstrings to answer what the functions of Python's library do.
    """,
    example="model=FOLDER data=chats.jsonl max_steps=100",
    sections=("sft",),
    job=_job,
    begins_with=_begins_with,
)
