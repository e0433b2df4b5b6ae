"""Runs a script's `main` as a typer command, with fullshard's `--json`, errors and exit codes.

    if __name__ == "__main__":
        run_script("benchmarks.host")

The script is imported again under its own name, so that ranks can unpickle its classes.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from typing import Annotated, NoReturn

import typer

from fullshard.cli.outcome import JSON_HELP, Outcome, error_outcome, quiet_stdout, write_json

JsonFlag = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


def run_script(name: str) -> NoReturn:
    """Runs the `main` of a module with this process's arguments and exits with its code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(importlib.import_module(name).main)
    words = sys.argv[1:]
    with quiet_stdout("--json" in words) as stdout:
        try:
            command = typer.main.get_command(app)
            outcome = command.main(words, prog_name=f"python -m {name}", standalone_mode=False)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the outermost frame
            outcome = error_outcome(error)
        if not isinstance(outcome, Outcome):  # --help
            sys.exit(0)
        if "--json" in words and outcome.result is not None:
            write_json(outcome.result, stdout)
    sys.exit(outcome.exit_code)


def command_line(name: str) -> str:
    """Returns the command line for a results page."""
    return shlex.join(["python", "-m", name, *sys.argv[1:]])
