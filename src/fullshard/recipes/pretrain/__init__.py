"""Train a causal language model on text.

Without a configuration file, the built-in job trains a small Llama on the text of Python's language
reference, on two local ranks, in two or three minutes. --NAME VALUE means training.NAME=VALUE.
Flags of torchrun follow after `--`: fullshard train CONFIG -- --nproc-per-node 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullshard.config.values import Problem, show
from fullshard.recipes.registry import Command, RecipeCommand, of_other

if TYPE_CHECKING:
    from fullshard.config.schema import RunConfig

EXAMPLE = "model=FOLDER data=texts/ max_steps=100"


def _check(config: RunConfig, _: Command) -> Iterator[Problem]:
    sft = config.sft
    asked = sft.model_dump(exclude_none=True, exclude_defaults=True) if sft else {}
    for key, value in asked.items():
        if value is not (key == "packing"):  # text is always packed, and all of it is learned
            yield of_other(f"sft.{key}", show(value), Command.SFT)


COMMAND = RecipeCommand(sections=("sft",), check=_check)
