"""Why a rank failed, as data that crosses processes, and which rank failed first."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from fullshard.errors import FullshardError
from fullshard.launch.exit_codes import ExitCode, exit_code_of, public_name

# How the ranks that wait for a dead peer fail: consequences, whatever the clock says.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited"
    r"|communicator was aborted|socket closed"
    r"|to take part; it has ended",  # engine/collectives/shared_home says it
    re.IGNORECASE,
)

_ENTRY_FILES = (str(Path(__file__).with_name("rank_entry.py")), "<frozen runpy>")


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """Why one rank ended.

    Args:
        rank: which one.
        type: name of the exception's class.
        message: what it said.
        exit_code: the typed code (see exit_codes).
        traceback: as Python prints it; empty where the error speaks to the user.
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
        expected = isinstance(error, FullshardError | KeyboardInterrupt | SystemExit)
        text = "" if expected else _traceback_of(error)
        notes = getattr(error, "__notes__", [])
        message = "\n".join([str(error), *notes])
        code = exit_code_of(error)
        return cls(rank, public_name(error), message, code, text, time.time())

    @property
    def text(self) -> str:
        """The whole of it: the traceback where there is one, else type and message."""
        return (self.traceback or f"{self.type}: {self.message}").rstrip("\n")

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        return self.exit_code == ExitCode.UNEXPECTED and bool(_CONSEQUENCE.search(self.message))

    def write(self, file: Path) -> None:
        """Leave it for the launcher, whole or not at all."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> RankFailure | None:
        """What a rank left, or None where it left nothing."""
        try:
            return cls(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None


def _traceback_of(error: BaseException) -> str:
    """As Python prints it, without the frames that only started the program."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _ENTRY_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that brought the others about: the earliest that is no consequence itself."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_s))
