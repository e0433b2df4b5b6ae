"""Failures of ranks as data, and the private folder in which ranks report them to the launcher.

failure_<k>.json    why rank k failed, written by the rank itself
hang.json           why all ranks were ended, written by the rank whose watchdog judged
ending              exists once a rank has failed: the others need not explain their end

The folder is removed when the launch ends.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from fullshard.config.environment import LaunchEnvironment, Launcher, rank_log
from fullshard.errors import ConfigError, FullshardError, PreemptedError
from fullshard.launch.exit_codes import ExitCode, as_ours, exit_code_of, public_name

# Errors of ranks that waited for a dead peer: consequences, never the cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited"
    r"|communicator was aborted|socket closed"
    r"|to take part; (it|one) has ended",  # raised by our transports
    re.IGNORECASE,
)

_OURS = str(Path(__file__).parents[1]) + "/"
_ENTRY_FILES = (str(Path(__file__).with_name("rank_entry.py")), "<frozen runpy>")


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """Why one rank ended.

    Attributes:
        rank: The rank.
        type: Name of the exception's class.
        message: Message of the exception.
        exit_code: Typed exit code (see exit_codes).
        traceback: Python's traceback; empty if the message is sufficient.
        time_s: Time of the failure, by the monotonic clock, which this machine's processes share.
    """

    rank: int
    type: str
    message: str
    exit_code: int
    traceback: str
    time_s: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankFailure:
        """The failure of this process, from its exception."""
        ours = as_ours(error)
        text = "" if _speaks_for_itself(error, ours) else _traceback_of(error)
        notes = getattr(error, "__notes__", [])
        message = "\n".join([str(ours), *notes])
        return cls(rank, public_name(ours), message, exit_code_of(ours), text, time.monotonic())

    @property
    def text(self) -> str:
        """The traceback if there is one, then type and message."""
        message = self.message.rstrip("\n")
        trace = self.traceback.rstrip("\n")
        if trace and trace.endswith(message):
            return trace
        said = f"{self.type}: {message}" if message else self.type
        return f"{trace}\n{said}".lstrip()

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because another one had ended."""
        return self.exit_code == ExitCode.UNEXPECTED and bool(_CONSEQUENCE.search(self.message))

    def write(self, file: Path) -> None:
        """Writes the failure for the launcher, atomically."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> RankFailure | None:
        """Reads a rank's failure; None if there is none."""
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # missing, or cut short by a full disk
            return None


def _speaks_for_itself(error: BaseException, ours: BaseException) -> bool:
    """Whether the message suffices, because no line of the user's program raised the error.

    In a user's script the line matters for every error except errors of the configuration.
    """
    if isinstance(ours, PreemptedError | KeyboardInterrupt | SystemExit):
        return True
    first = _program_frames(error)
    is_users = first is not None and not first.tb_frame.f_code.co_filename.startswith(_OURS)
    return isinstance(ours, FullshardError) and (isinstance(error, ConfigError) or not is_users)


def _program_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames that started the program."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _ENTRY_FILES:
        frames = frames.tb_next
    return frames


def _traceback_of(error: BaseException) -> str:
    """Python's traceback without the frames that started the program."""
    frames = _program_frames(error) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that caused the others: the earliest that is not a consequence."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_s))


@dataclasses.dataclass(frozen=True)
class LaunchFolder:
    """Paths of the files above, and of the ranks' logs, which are elsewhere."""

    path: Path
    log_dir: Path

    @classmethod
    def of(cls, launch: LaunchEnvironment | None) -> LaunchFolder | None:
        """The folder of a rank that our launcher started; None for any other process."""
        if launch is None or launch.launcher is not Launcher.FULLSHARD or not launch.launch_dir:
            return None
        return cls(launch.launch_dir, launch.log_dir or launch.launch_dir)

    @property
    def hang(self) -> Path:
        """Verdict of the watchdogs; takes precedence over the failures of single ranks."""
        return self.path / "hang.json"

    @property
    def ending(self) -> Path:
        """Exists once the launcher ends ranks because another one failed."""
        return self.path / "ending"

    def failure(self, rank: int) -> Path:
        """Why the rank failed."""
        return self.path / f"failure_{rank}.json"

    def open_log(self, rank: int) -> TextIO:
        """The rank's log, to append to."""
        log = rank_log(self.log_dir, rank)
        return log.open("a", encoding="utf-8", errors="backslashreplace")
