"""`fullshard train`: the configurations that it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.config.schema import RunConfig
from fullshard.errors import Problem, show
from fullshard.recipes.registry import Command, RecipeCommand, of_other


def _check(config: RunConfig, _: Command) -> Iterator[Problem]:
    sft = config.sft
    asked = sft.model_dump(exclude_none=True, exclude_defaults=True) if sft else {}
    for key, value in asked.items():
        if value is not (key == "packing"):  # text is always packed, and all of it is learned
            yield of_other(f"sft.{key}", show(value), Command.SFT)


COMMAND = RecipeCommand(sections=("sft",), check=_check)
