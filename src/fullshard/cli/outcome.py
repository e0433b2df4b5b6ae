"""The return value of a command, and the printing of errors and --json.

    def plan(...) -> Outcome:
        print(table)                                # with --json on standard error
        return Outcome({"fits": "fits", ...})       # with --json the only output on standard output

With --json, standard output is redirected to standard error while the command runs, also for
libraries and child processes. The JSON object is written to the real standard output at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

import typer

from fullshard.errors import ConfigError, FullshardError, WillNotFitError, printable
from fullshard.launch.exit_codes import STREAM, ExitCode, RankFailure, of_place

if TYPE_CHECKING:
    from fullshard.launch.spawn import LocalLaunch
    from fullshard.launch.supervise import LaunchResult


class _Stream(io.FileIO):
    """A standard stream. Its first error names it; later output is dropped."""

    is_deaf = False

    def write(self, data: Any) -> int:
        try:
            while (done := super().write(data)) is None:  # another program made it non-blocking
                select.select([], [self], [])
            return done
        except OSError as error:
            if self.is_deaf:
                return len(data)
            self.is_deaf, error.filename = True, STREAM
            raise


def sink(number: int, encoding: str | None = "utf-8", *, by_line: bool = False) -> TextIO:
    """A stream for a descriptor that stays open; standard error raises no errors."""
    out = io.BufferedWriter(raw := _Stream(number, "w", closefd=False))
    raw.is_deaf = number == 2
    return io.TextIOWrapper(out, encoding, line_buffering=by_line)


_real_stdout: list[TextIO] = []  # set while --json redirects standard output
JSON_HELP = "Print one JSON object to standard output and everything else to standard error."


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The return value of a command.

    Args:
        result: Object that --json prints; None prints nothing.
        exit_code: See fullshard.launch.exit_codes.
    """

    result: dict[str, Any] | None = None
    exit_code: int = 0


def error_outcome(error: BaseException) -> Outcome:
    """Print an error to standard error and turn it into the outcome of the command.

    A FullshardError and a command line that cannot be parsed are printed without a traceback, all
    other errors with one.
    """
    error = of_place(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("Interrupted.")
        return _error("KeyboardInterrupt", "interrupted", ExitCode.INTERRUPTED)
    if hasattr(error, "format_message"):  # typer's own; its base class differs between versions
        return _usage_outcome(error)
    if isinstance(error, FullshardError):
        error = error.with_traceback(None)  # its message suffices
    failure = RankFailure.of(error, 0)
    _say(failure.text)
    more = {"traceback": failure.traceback} if failure.traceback else {}
    outcome = _error(failure.type, failure.message, failure.exit_code, **more)
    if isinstance(error, WillNotFitError) and error.planned and outcome.result:
        outcome.result["planned"] = error.planned
    return outcome


def launch_outcome(
    launch: LocalLaunch, result: LaunchResult, *, after_stop: str = "", **facts: Any
) -> Outcome:
    """Print the failure of a rank, if there is one, and return the command's outcome.

    Args:
        launch: The launch that was run.
        result: Its result.
        after_stop: Text to print if a signal ended the launch, such as how to resume.
        **facts: Values that --json prints if nothing failed.
    """
    from fullshard.launch.spawn import print_failure

    print_failure(launch, result)
    if result.failure is None and result.exit_code == 0:
        return Outcome(facts)
    if result.failure is None:
        said = "Interrupted." if result.exit_code == ExitCode.INTERRUPTED else "Stopped."
        _say(f"{said} {after_stop}".rstrip())
        message = f"stopped by a signal. {after_stop}".rstrip()
        return _error("Interrupted", message, result.exit_code)
    failure = dataclasses.asdict(result.failure)
    kind, message, code = (failure.pop(name) for name in ("type", "message", "exit_code"))
    return _error(kind, message, code, **failure, log=str(launch.log(failure["rank"])))


@contextlib.contextmanager
def quiet_stdout(active: bool) -> Iterator[TextIO]:
    """Redirect standard output to standard error inside the block; yields the real one."""
    if not active:
        yield sys.stdout
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with sink(real) as stdout:
            _real_stdout.append(stdout)
            yield stdout
    finally:
        _real_stdout.clear()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def rank_failed(failure: RankFailure) -> None:
    """Write the JSON object for a failure of rank 0, whose process ends right afterwards."""
    for stdout in _real_stdout if failure.rank == 0 else ():
        reported = _error(failure.type, failure.message, failure.exit_code)
        write_json(reported.result or {}, stdout)
        stdout.flush()


def write_json(result: dict[str, Any], stdout: TextIO) -> None:
    """Write the one JSON object of a command."""
    json.dump(result, stdout, indent=2, default=_plain, allow_nan=False)
    stdout.write("\n")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"--json: expected JSON values, got {type(value).__name__}")


def _usage_outcome(error: Any) -> Outcome:
    """An error for a command line that typer could not parse, in the form of all other errors."""
    from fullshard.config.values import did_you_mean

    message = error.format_message().rstrip(".")
    option = getattr(error, "option_name", "")
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help
        return _error("ConfigError", "expected a command, got none.", ExitCode.CONFIG)
    path = context.command_path if context is not None else "fullshard"
    group: Any = getattr(context, "command", None)
    commands = group.list_commands(context) if hasattr(group, "list_commands") else []
    if commands and option == "--json":  # without the command that it belongs to
        message = f"{path}: expected one of {', '.join(commands)}; got none."
    elif type(error).__name__ == "NoSuchOption" and context is not None:
        known = [name for param in context.command.params for name in param.opts] + ["--help"]
        known = sorted({name for name in known if name.startswith("--")})
        hint = did_you_mean(option, known)
        message = f"{option}: expected one of {', '.join(known)}; got an unknown option. {hint}"
    elif hasattr(error.__context__, "errors"):  # typer reads values with pydantic
        wrong = error.__context__.errors()[0]
        expected = re.sub(r"^Input should be (?=greater|less)", "a number ", wrong["msg"])
        expected = expected.removeprefix("Input should be ").partition(", unable")[0]
        got = f"got {wrong['input']!r}. See `{path} --help`"
        message = f"{error.param.opts[0]}: expected {expected}, {got}."
    elif commands and (got := re.match(r"No such command '(.*?)'", message)):
        hint = did_you_mean(got[1], commands) or f"See `{path} --help`."
        message = f"{path}: expected one of {', '.join(commands)}; got '{got[1]}'. {hint}"
    else:
        message = f"{message}. See `{path} --help`."
    _say(f"ConfigError: {message.rstrip()}")
    return _error("ConfigError", message.rstrip(), ExitCode.CONFIG)


def _error(kind: str, message: str, exit_code: int, **more: Any) -> Outcome:
    error = {"type": kind, "message": message, "exit_code": int(exit_code), **more}
    return Outcome({"error": error}, int(exit_code))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str | None = None,
    *,
    numbers: Collection[str] = (),
    line_after: int = 0,
) -> None:
    """Print a table; it has borders on a terminal only.

    Args:
        columns: Names of the columns.
        rows: Cells of each row, which may contain names from an untrusted file.
        title: Line above the table.
        numbers: Columns that are aligned to the right.
        line_after: Number of rows above a separating line; 0: no line.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    lines = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(title=title, title_justify="left", box=lines)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for number, row in enumerate(rows, start=1):
        table.add_row(*map(printable, row), end_section=number == line_after)
    console.print(table, markup=False)


def show(text: str = "") -> None:
    """Print text that may contain names from an untrusted file."""
    print(printable(text))


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def check_out(out: Path | None, *, is_folder: bool = False, is_page: bool = False) -> None:
    """Raise an error before any work starts if `--out` cannot be written.

    A page replaces an older page only: a run's own files have no copy.
    """
    if out is None:
        return
    try:
        if is_folder:
            out.mkdir(parents=True, exist_ok=True)
        file = out / "page" if is_folder else out
        with file.open("r+b") if file.exists() else TemporaryFile(dir=file.parent) as there:
            head = there.read(6) if is_page and file.is_file() else b""
    except OSError as error:
        raise ConfigError(
            f"--out: expected a file in a writable folder, got '{out}' "
            f"({error.strerror}). Create the folder, or choose another file."
        ) from None
    if head and head.lower() != b"<!doct":
        raise ConfigError(
            f"--out: expected a new file, or an HTML page to replace; got '{out}' with other "
            "content. Choose another file."
        )
