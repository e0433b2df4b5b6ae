"""Why a rank failed, as data that crosses processes, and which rank failed first."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from fullshard.errors import ConfigError, FullshardError, PreemptedError
from fullshard.launch.exit_codes import ExitCode, as_ours, exit_code_of, public_name

# How the ranks that wait for a dead peer fail: consequences, whatever the clock says.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited"
    r"|communicator was aborted|socket closed"
    r"|to take part; (it|one) has ended",  # transport say it
    re.IGNORECASE,
)

_OURS = str(Path(__file__).parents[1]) + "/"
_ENTRY_FILES = (str(Path(__file__).with_name("rank_entry.py")), "<frozen runpy>")


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """Why one rank ended.

    Args:
        rank: which one.
        type: name of the exception's class.
        message: what it said.
        exit_code: the typed code (see exit_codes).
        traceback: as Python prints it; empty where the error alone says what to change.
        time_s: seconds since the epoch at which it happened; the ranks share this machine's clock.
    """

    rank: int
    type: str
    message: str
    exit_code: int
    traceback: str
    time_s: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankFailure:
        """The failure that an exception of this process means."""
        ours = as_ours(error)
        text = "" if _speaks_for_itself(ours) else _traceback_of(error)
        notes = getattr(error, "__notes__", [])
        message = "\n".join([str(ours), *notes])
        return cls(rank, public_name(ours), message, exit_code_of(ours), text, time.time())

    @property
    def text(self) -> str:
        """The whole of it: the traceback where there is one, then type and message."""
        message = self.message.rstrip("\n")
        trace = self.traceback.rstrip("\n")
        if trace and trace.endswith(message):
            return trace
        said = f"{self.type}: {message}" if message else self.type
        return f"{trace}\n{said}".lstrip()

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        return self.exit_code == ExitCode.UNEXPECTED and bool(_CONSEQUENCE.search(self.message))

    def write(self, file: Path) -> None:
        """Leave it for the launcher, whole or not at all; a full disk takes nothing."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> RankFailure | None:
        """What a rank left, or None where it left nothing."""
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # nothing, or half of it on a full disk
            return None


def _speaks_for_itself(error: BaseException) -> bool:
    """Whether its message is all that helps: no line of the user's program has led to it.

    In a script of the user's the line matters for every error but one of configuration.
    """
    if isinstance(error, ConfigError | PreemptedError | KeyboardInterrupt | SystemExit):
        return True
    first = _program_frames(error)
    is_users = first is not None and not first.tb_frame.f_code.co_filename.startswith(_OURS)
    return isinstance(error, FullshardError) and not is_users


def _program_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames that only started the program."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _ENTRY_FILES:
        frames = frames.tb_next
    return frames


def _traceback_of(error: BaseException) -> str:
    """As Python prints it, without the frames that only started the program."""
    frames = _program_frames(error) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that brought the others about: the earliest that is no consequence itself."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_s))
