"""`fullshard`: the table of commands, and the only place that turns an outcome into an exit code.

A command is a module `fullshard.cli.<name>` with an `app: typer.Typer`; its function returns an
Outcome (see outcome.py). recipe.py makes the commands of all recipes. Modules of commands import
slow packages (torch, pydantic) inside the function, because `fullshard --help` loads all modules.
The function's docstring is the command's help; its `Args:` are the help of the options.
"""

from __future__ import annotations

import atexit
import copy
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fullshard.cli.outcome import JSON_HELP, Outcome, error_outcome, quiet_stdout, sink, write_json
from fullshard.cli.recipe import app_of
from fullshard.config.environment import drop_unusable_widths, unknown_variables
from fullshard.errors import ConfigError, show_log, write_anything
from fullshard.launch.exit_codes import (
    PREEMPTIONS,
    RESUMES,
    STOP_SIGNALS,
    ExitCode,
    Stopped,
    end_now,
    handled,
    left_by,
    raise_stopped,
)
from fullshard.recipes.registry import Command

logger = logging.getLogger(__name__)

RECIPES = tuple(str(recipe) for recipe in Command if "-" not in recipe)
COMMANDS = (
    *RECIPES,
    *("generate", "plan", "verify", "bench", "launch", "ckpt", "config", "doctor", "report"),
)
# Options that typer adds to every program; they belong to `fullshard` itself, not to a command.
_COMPLETION = ("install_completion", "show_completion")


# Example calls of the commands that take a configuration, shown at the end of their help.
EXAMPLES = {
    **{name: Command(name).help[1] for name in RECIPES},
    "plan": "CONFIG.yaml --gpus 8xH100-80GB --nodes 2",
    "verify": "CONFIG.yaml",
}
KEYS = (
    "`fullshard config schema` lists all keys; `fullshard config explain CONFIG` shows values and "
    "their origins. The repository has example files in examples/."
)


def _describe(command: Any) -> None:
    """Take the help of a command and of its parameters from the docstring of its function.

    Each paragraph becomes one line, because rich keeps line breaks and wraps again.
    """
    text, _, described = (command.help or "").partition("\nArgs:\n")
    command.help = "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
    entries = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE))
    for param in command.params:
        if param.name in entries and not param.help:
            param.help = " ".join(entries[param.name].split())
    command.format_help = partial(_print_help, command)


def _print_help(command: Any, ctx: Any, formatter: Any) -> None:
    """Print help without `--max_restarts` next to `--max-restarts`; at 80 columns both are cut."""
    shown = copy.copy(command)
    shown.params = [copy.copy(param) for param in command.params]
    for one in shown.params:
        one.opts = [n for n in one.opts if "_" not in n or n == one.opts[0]]
    type(shown).format_help(shown, ctx, formatter)


class _LazyGroup(TyperGroup):
    """A group whose commands are modules, imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  typer's interface
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import a command; None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None  # see `_usage_outcome`
        module = f"fullshard.cli.{cmd_name}"
        made = app_of(Command(cmd_name)) if cmd_name in RECIPES else import_module(module).app
        command = typer.main.get_command(made)
        command.name = cmd_name
        command.params = [p for p in command.params if p.name not in _COMPLETION]
        if cmd_name in EXAMPLES:
            command.epilog = f"Example: fullshard {cmd_name} {EXAMPLES[cmd_name]}\n\n{KEYS}"
        for one in (command, *getattr(command, "commands", {}).values()):
            _describe(one)
            if not hasattr(one, "commands") and "--json" not in one.params[-1].opts:
                shown: Any = copy.copy(next(one for one in self.params if "--json" in one.opts))
                shown.hidden = shown.expose_value = False  # `run` handles it
                one.params.append(shown)
        return command


app = typer.Typer(
    name="fullshard",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"fullshard {version('fullshard')}")
        except PackageNotFoundError:
            print("fullshard (not installed: run from its source folder)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help=JSON_HELP)] = False,
) -> None:
    """Train models that do not fit on one device, sharded over all ranks."""


def main() -> None:
    """Run the command line of this process and end it with the command's exit code."""
    open_streams()
    drop_unusable_widths()
    atexit.register(gc.freeze)  # saves a second: no search for garbage when the process ends
    atexit.register(_on_stop_signals, signal.SIG_IGN)  # Python drops other handlers soon
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # a second one, while the first was told
        code = ExitCode.INTERRUPTED
    # A further signal would end the process with another code; threads may still run.
    _on_stop_signals(lambda *_: end_now(code))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # only a warning
    sys.exit(code)


def _on_stop_signals(handler: Any) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def open_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`), for this process and its ranks.

    Otherwise the first files that are opened, such as logs, would get their descriptor numbers.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        by_line = number == 2 or (before and (before.line_buffering or before.write_through))
        setattr(sys, name, sink(number, before and before.encoding, by_line=bool(by_line)))
    write_anything()


def run(words: Sequence[str]) -> int:
    """Run one command.

    Args:
        words: Command line without the program's name.

    Returns:
        The exit code (see fullshard.launch.exit_codes).
    """
    own = _own_words(words)
    as_json = "--json" in own
    words = [*map(_expanded, own), *words[len(own) :]]
    show_log()
    for warning in unknown_variables():
        logger.warning(warning)
    outcome = None
    try:
        with quiet_stdout(as_json) as stdout:
            outcome = invoke(words)
            if as_json and outcome.result is not None:
                write_json(outcome.result, stdout)
    except BrokenPipeError:  # the reader closed the pipe
        return (outcome and outcome.exit_code) or ExitCode.UNEXPECTED
    except OSError as error:  # standard output cannot be written
        return error_outcome(error).exit_code
    return outcome.exit_code


def _own_words(words: Sequence[str]) -> Sequence[str]:
    """The words of the command; words after the script of `launch` belong to the script."""
    if words[:1] != ["launch"]:
        return words
    ends = (i for i, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module"))
    return words[: next(ends, len(words))]


def _expanded(word: str) -> str:
    """Expand `--out=~/x`: shells do not expand `~` after `=`."""
    option, equals, value = word.partition("=")
    return option + equals + os.path.expanduser(value) if option.startswith("--") else word  # noqa: PTH111  `~` without a home stays


def invoke(words: Sequence[str]) -> Outcome:
    """Run one command in this process. An error is printed and turned into the outcome.

    Args:
        words: Command line without the program's name.
    """
    command = typer.main.get_command(app)
    if words and words[0] in RECIPES:  # a launcher's flags follow --
        words = [word for word in words if word != "--"]
    try:
        _check_working_directory()
        with handled(PREEMPTIONS, partial(_on_preemption, " ".join(words[:1]))):
            value = command.main(list(words), prog_name="fullshard", standalone_mode=False)
    except (Exception, KeyboardInterrupt, Stopped) as error:  # noqa: BLE001  the outermost frame
        return error_outcome(error)
    except SystemExit as error:
        return error_outcome(left_by(error))
    if value == ExitCode.INTERRUPTED:  # typer's, in place of KeyboardInterrupt
        return error_outcome(KeyboardInterrupt())
    if isinstance(value, Outcome):
        return value
    return Outcome(exit_code=value if isinstance(value, int) else 0)


def _on_preemption(word: str, before: Mapping[int, Any], number: int, frame: Any) -> None:
    """Turns a signal into an error, so that temporary folders and processes are removed."""
    if callable(previous := before.get(number)):  # this command is the program of a rank
        previous(number, frame)
    what, then = ("run", RESUMES) if word in RECIPES else (word, "Run the command again.")
    raise_stopped(number, what=what, then=then)


def _check_working_directory() -> None:
    """Check that it exists: otherwise torch's libraries end the process and name a wrong cause."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "working directory: expected a folder that exists; it was removed. Change to another."
        ) from None
