"""Arguments that several commands share: `CONFIG key=value --name value`, --dry-run.

    app = typer.Typer()

    @app.command(context_settings=OPEN_WORDS)
    def train(words: Words = None, config: ConfigFlag = None,
              dry_run: DryRunFlag = False) -> Outcome:
        resolved = load(words, config)

With OPEN_WORDS, Hugging Face flags (`--max_steps 5`) arrive in `words` in the order in which they
were typed.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from fullshard.config.files import File
    from fullshard.config.load import Resolved

OPEN_WORDS: dict[Any, Any] = {"ignore_unknown_options": True}


def _checked(ctx: typer.Context, words: list[str] | None) -> list[str] | None:
    """Return the words. A word that looks like a misspelt flag is an error."""
    check_flags(words or (), [name for one in ctx.command.params for name in one.opts])
    return words


Words = Annotated[
    list[str] | None,
    typer.Argument(
        callback=_checked,
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A configuration file, then values that override the file: training.max_steps=5, "
        "max_steps=5 or --max_steps 5.",
        show_default=False,
    ),
]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; the same as CONFIG.")
]
ConfigFileFlag = Annotated[
    Path | None,
    typer.Option("--config_file", help="File of launch and sharding, such as Accelerate's."),
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and print what would be done.")
]


def load(
    words: Sequence[str] | None,
    config: Path | None = None,
    config_file: Path | None = None,
    *,
    accept_model: bool = False,
    explaining: bool = False,
    default: File | None = None,
) -> Resolved:
    """Read the configuration that a command line describes.

    Args:
        words: Words after the command.
        config: Value of --config.
        config_file: Value of --config_file; CONFIG overrides keys of this file.
        accept_model: CONFIG may also be a Hugging Face folder or its config.json.
        explaining: No run follows, so the model may be missing.
        default: Built-in job that is used if no file is named; None: that of `train`.

    Raises:
        ConfigError: A word, the file or one of its values is invalid.
    """
    from fullshard.config.load import load_config, overrides_from_args

    path, rest = split_config(words or (), config)
    overrides = overrides_from_args(rest)
    model = _model_override(path) if accept_model and path is not None else None
    if model is not None:
        files: list[Path | File] = [config_file] if config_file is not None else []
        overrides = [model, *overrides]
    else:
        files = [one for one in (config_file, path) if one is not None]
        files = files or ([] if default is None else [default])
    resolved = load_config(files or None, overrides, needs_model=not explaining)
    if not explaining:
        say_lost(resolved)
    return resolved


def say_lost(resolved: Resolved) -> None:
    """Print the keys of another tool's file that have no effect here, or that a file overrules."""
    from fullshard.config.environment import read_launch_environment, settings_of_accelerate

    launch = read_launch_environment()
    if launch is not None and launch.rank != 0:
        return  # under torchrun every rank reads the command line
    if "Accelerate" not in resolved.dialects and (asked := settings_of_accelerate()):
        what = "settings of `accelerate launch` have no effect here. Pass its file: --config_file"
        print(f"environment: {', '.join(asked)}: {what} FILE")
    for note in resolved.notes:
        if note.is_told:
            print(note)


def split_config(words: Sequence[str], config: Path | None) -> tuple[Path | None, list[str]]:
    """CONFIG and the words after it. The first word is CONFIG unless it is a flag or key=value.

    Raises:
        ConfigError: CONFIG was given twice.
    """
    first = words[0] if words else ""
    is_config = bool(first) and not first.startswith("--")
    is_config = is_config and ("=" not in first or os.path.isfile(first))  # noqa: PTH113  (Path raises where a value is too long)
    if not is_config:
        return config, list(words)
    if config is not None:
        raise ConfigError(
            f"--config: expected one configuration file, got '{config}' and '{first}'. Drop one."
        )
    return Path(first), list(words[1:])


def check_flags(words: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse a word such as `--dryrun`, which is not a key but resembles a flag.

    Raises:
        ConfigError: Names the flag that was probably meant.
    """
    from fullshard.config.keys import resolve

    for word in words:
        if not word.startswith("--"):
            continue
        name = word.partition("=")[0]
        close = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
        if not close:
            continue
        try:
            resolve(name.removeprefix("--"))
        except ConfigError:
            raise ConfigError(
                f"{name}: expected a flag or a key of the configuration, got neither. "
                f"Did you mean '{close[0]}'?"
            ) from None


def _model_override(path: Path) -> str | None:
    """An override that sets the model to a Hugging Face folder or its config.json."""
    if path.is_dir() and (path / "config.json").is_file():
        return f"model.name_or_path={path}"
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # load_config reports the error and its line
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return None
    return f"model.config={json.dumps(content)}"
