"""`fullshard train`: what is known of it without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.recipes.registry import Command, RecipeCommand, of_other

if TYPE_CHECKING:
    from fullshard.config.problems import Problem
    from fullshard.config.schema import RunConfig


def _check(config: RunConfig, _: Command) -> Iterator[Problem]:
    from fullshard.config.problems import show

    sft = config.sft
    asked = sft.model_dump(exclude_none=True, exclude_defaults=True) if sft else {}
    for key, value in asked.items():
        if value is not (key == "packing"):  # running text is packed, and all of it is learned
            yield of_other(f"sft.{key}", show(value), Command.SFT)


COMMAND = RecipeCommand(
    help="""Train a model on text; without a configuration file, the main job.

    The main job trains a small Llama on the text of Python's language reference, on two local
    ranks, in two or three minutes. --NAME VALUE is training.NAME=VALUE; torchrun's flags may stand
    after `--`: fullshard train CONFIG -- --nproc-per-node 4.
    """,
    example="model=FOLDER data=texts/ max_steps=100",
    sections=("sft",),
    check=_check,
)
