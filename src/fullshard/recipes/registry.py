"""The registry of recipes: one line per command. Each recipe has a folder:

    recipes/NAME/
      __init__.py  the docstring is the command's help; EXAMPLE: words that follow the command;
                   COMMAND: its sections, checks, and the job without a configuration file
      recipe.py    KINDS: the data and the loss of each command

`distill-cache` is `fullshard distill cache`. This module and every `__init__.py` import no other
library: `fullshard --help` loads them all and must stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.config.values import ConfigProblems, Problem
from fullshard.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved
    from fullshard.config.schema import RunConfig
    from fullshard.recipes.base import RecipeKind


class Command(StrEnum):
    """A recipe, by the name of its command."""

    TRAIN = "train", "pretrain"
    SFT = "sft", "sft"
    DISTILL = "distill", "distill"
    CACHE = "distill-cache", "distill"  # a teacher's logits, to distill without the teacher

    folder: str

    def __new__(cls, name: str, folder: str) -> Command:
        """A member with its name and its folder in `recipes/`."""
        member = str.__new__(cls, name)
        member._value_, member.folder = name, folder
        return member

    @property
    def help(self) -> tuple[str, str]:
        """Help of the command, and an example of the words that follow it."""
        package = import_module(f"fullshard.recipes.{self.folder}")
        return package.__doc__ or "", package.EXAMPLE

    @property
    def about(self) -> RecipeCommand:
        """The recipe's command line."""
        return import_module(f"fullshard.recipes.{self.folder}").COMMAND

    @property
    def kind(self) -> RecipeKind:
        """The recipe's model and data."""
        return import_module(f"fullshard.recipes.{self.folder}.recipe").KINDS[self.value]


@dataclass(frozen=True)
class RecipeCommand:
    """The command line of a recipe.

    Args:
        sections: Configuration sections that the recipe reads. Recipes that do not list a section
            refuse it.
        check: (configuration, command) -> further problems of the configuration.
        job: (configuration that was read, or None) -> the job without a configuration file; None
            means the built-in job of `train`.
        begins_with: (configuration) -> the model folder that the job needs, and the job that makes
            it. None: no built-in job makes a model for this recipe.
    """

    sections: tuple[str, ...] = ()
    check: Callable[[RunConfig, Command], Iterable[Problem]] = lambda *_: ()
    job: Callable[[Resolved | None], File | None] = lambda _: None
    begins_with: Callable[[RunConfig], tuple[str | None, File]] | None = None


def check_command(config: RunConfig, command: Command) -> None:
    """Refuse sections that only another recipe reads, because they would have no effect.

    Raises:
        ConfigError: Names every such section.
    """
    problems = list(command.about.check(config, command))
    owners = {section: other for other in reversed(Command) for section in other.about.sections}
    owners |= {str(other): other for other in Command if str(other) in owners}  # sft: `sft`
    for section, owner in owners.items():
        if section not in command.about.sections and getattr(config, section) is not None:
            problems.append(of_other(section, "a mapping", owner))
    if problems:
        raise ConfigProblems(problems)


def of_other(key: str, got: str, command: Command) -> Problem:
    """The problem of a key that only another recipe reads."""
    return Problem(key, "", f"applies to `fullshard {command}` only; got {got}", "Leave it out")


def check_paths(
    resolved: Resolved, coming: Path | None = None, *, reads_data: bool = False
) -> None:
    """Raise an error if a path of the configuration does not exist, before torch is imported.

    Args:
        resolved: Configuration with origins, which name the line of the file in errors.
        coming: Folder of a model that will be made later.
        reads_data: Whether the command reads the data, which must exist then.

    Raises:
        ConfigError: A model's or tokenizer's folder is missing.
        DataError: The data is missing.
    """
    from fullshard.data.records import files_at, under
    from fullshard.models.config import check_model_folder

    config, folders = resolved.config, [(resolved.config.model.name_or_path, "model")]
    if config.teacher is not None:
        folders.append((config.teacher.name_or_path, "teacher"))
    tokenizer = config.data.tokenizer
    try:
        for named, what in folders:
            if named is not None and Path(named) != coming:
                check_model_folder(Path(named), f"{what}.name_or_path")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise ConfigError(
                f"data.tokenizer: expected a local folder with a tokenizer, got '{tokenizer}'. Set "
                "the folder that contains tokenizer.json."
            )
        sources = {f"data.mixture.{n}": one.path for n, one in enumerate(config.data.mixture)}
        for key, path in {"data": config.data.path, **sources}.items():
            if reads_data and path is not None:
                with under(key):
                    files_at(Path(path))
    except (ConfigError, DataError) as error:
        raise resolved.located(error) from error


def check_resume(resolved: Resolved, asked: str | None) -> None:
    """Raise an error if there is no checkpoint to resume from, before torch is imported."""
    from fullshard.checkpoint.retain import path_to_resume

    try:
        if asked is not None:
            path_to_resume(asked)
        elif written := resolved.config.training.resume_from_checkpoint:
            path_to_resume(written, "training.resume_from_checkpoint")
    except (CheckpointError, ConfigError) as error:
        raise resolved.located(error) from error
