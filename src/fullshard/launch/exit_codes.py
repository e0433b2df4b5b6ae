"""Exit codes of all commands and ranks, the errors behind them, stop signals, failures of ranks.

The codes are part of the contract: scripts and schedulers decide by them whether to retry.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from fullshard import errors
from fullshard.config.environment import LaunchEnvironment, Launcher, rank_log
from fullshard.errors import (
    ConfigError,
    FullshardError,
    OutOfMemoryError,
    PreemptedError,
    WillNotFitError,
    ran_out_of_memory,
)

# SIGHUP: the terminal is gone. SIGQUIT: Ctrl-\. SIGUSR1: schedulers send it as a warning.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # a rank saves, then ends
PREEMPTIONS = STOP_SIGNALS[1:]  # while a run is prepared; Ctrl-C is Python's own error

_PR_SET_PDEATHSIG = 1

Handler = Callable[[Mapping[int, Any], int, FrameType | None], None]


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Installs a handler inside the block and restores the previous handlers after it.

    Does nothing outside the main thread, where Python cannot install handlers. A SIGHUP that is
    ignored stays ignored, so that `nohup` works. Forked children, such as the workers of a
    multiprocessing.Pool, which SIGTERM ends, have the previous handlers.

    Args:
        numbers: Signals.
        handler: Called with the previous handlers by signal, the signal and the frame.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(before, number, frame)
        else:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    for n in numbers:
        if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN:
            before[n] = signal.signal(n, handle)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Stopped(BaseException):
    """Our error on its way through code that catches every Exception, as imports of libraries do.

    Args:
        ours: The error.
    """

    def __init__(self, ours: PreemptedError) -> None:
        super().__init__(str(ours))
        self.ours = ours


RESUMES = "Start it again; it resumes from its last checkpoint, if it saved one."


def raise_stopped(
    number: int, *, plain: bool = False, what: str = "run", then: str = RESUMES
) -> NoReturn:
    """Raises the error of a signal in the main thread, so that `finally` blocks run.

    Args:
        number: The signal.
        plain: Raise a PreemptedError, which `except Exception` catches.
        what: Name of the stopped work.
        then: Advice in the error.
    """
    told = f"{what}: expected to reach its end, got {signal.Signals(number).name}. {then}"
    error = PreemptedError(told)
    raise error if plain else Stopped(error)


@contextlib.contextmanager
def caught_stop_signals(
    numbers: Sequence[signal.Signals] = STOP_SIGNALS, obey: Callable[[], bool] = lambda: False
) -> Iterator[list[int]]:
    """Yields a list to which signals are added as they arrive.

    Args:
        numbers: Signals.
        obey: If it returns True when a signal arrives, the previous handler is called instead.
    """
    caught: list[int] = []

    def note(before: Mapping[int, Any], number: int, frame: FrameType | None) -> None:
        previous = before.get(number)
        if obey() and callable(previous):
            previous(number, frame)
        else:
            caught.append(number)

    with handled(numbers, note):
        yield caught


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent process dies (Linux only).

    This also works for a rank that is stuck in a C call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def end_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads; output that was lost is no success."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:
            code = code or 120  # as when Python ends
    os._exit(code)


class ExitCode(IntEnum):
    """Exit code of a process."""

    OK = 0
    UNEXPECTED = 1
    CONFIG = 2
    WILL_NOT_FIT = 3
    OUT_OF_MEMORY = 4
    HANG = 5  # a rank is stuck or dead
    DATA = 6
    CHECKPOINT = 7
    VERIFY = 8
    DIVERGED = 9
    PREEMPTED = 75  # sysexits' EX_TEMPFAIL: try again, it resumes
    INTERRUPTED = 130  # the shell's 128 + SIGINT


# In errors of collectives whose peer did not arrive (gloo, c10d's stores, NCCL's watchdog).
TIME_OUT_WORDS = ("timed out waiting", "wait timeout", "timed out after", "watchdog caught")


STREAM = "the command's output"  # in the place of a file's name, in errors of standard streams

# In errors of the system, numpy and safetensors for a full disk.
_DISK_IS_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|\d+ requested and \d+ written",
    re.IGNORECASE,
)


# In errors of the system, and of torch's store, where a process may open no more files.
_NO_DESCRIPTOR = ("Too many open files", "Failed to init uv loop")

# Errors of a disk or a mount that fails; they may pass, so a run is restarted.
_FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO)
_CAUSES = {signal.SIGBUS: " (a file that it reads was cut short, or a disk or /dev/shm is full)"}

# Errors of the system about the place of a file, which no traceback explains.
_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_PLACE += (errno.EEXIST, errno.ENAMETOOLONG)


def as_ours(error: BaseException) -> BaseException:
    """Converts the errors of a full disk and of what a process was given; returns others as is."""
    if isinstance(error, FullshardError):
        return error
    ours = error.ours if isinstance(error, Stopped) else _of_surroundings(error)
    return error if ours is None else ours.with_traceback(error.__traceback__)


def _limit(number: int) -> int:
    return resource.getrlimit(number)[0]


def _of_surroundings(error: BaseException) -> FullshardError | None:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    limits = {"-v": _limit(resource.RLIMIT_AS), "-d": _limit(resource.RLIMIT_DATA)}
    limits = {flag: most for flag, most in limits.items() if most != resource.RLIM_INFINITY}
    starts = not isinstance(error, OSError) or any("fork" in (at.line or "") for at in last)
    if starts and str(error).endswith(("start new thread", "Resource temporarily unavailable")):
        return ConfigError(
            f"ulimit {' or '.join(['-u', *limits])}: expected to start another process or thread, "
            f"got none ({error}). Raise that limit, or pids.max of the container."
        )
    segment = [line for line in str(error).splitlines() if "failed to map segment" in line]
    is_devices = type(error).__name__ == "OutOfMemoryError"  # torch's
    if limits and (segment or (ran_out_of_memory(error) and not is_devices)):
        said = "".join(segment[:1]) or str(error) or type(error).__name__
        most = " or ".join(f"{most >> 20:,}" for most in limits.values())
        return OutOfMemoryError(
            f"ulimit {' or '.join(limits)}: expected to map more memory than the {most} MiB that a "
            f"process may, got none ({said}). Raise that limit."
        )
    if any(words in str(error) for words in _NO_DESCRIPTOR):
        most = _limit(resource.RLIMIT_NOFILE)
        return ConfigError(
            f"ulimit -n: expected to open more files than the {most} that a process may, got none "
            f"({error}). Raise that limit."
        )
    place = getattr(error, "filename", None)
    if getattr(error, "errno", None) in _FAILING and place not in (None, STREAM):
        return FullshardError(
            f"'{place}': expected a file system that works, got {error}. Check the disk or the "
            "mount, and start again; a run resumes from its last checkpoint."
        )
    if not _DISK_IS_FULL.search(str(error)):
        return None
    if "</torch_" in str(error) or any("/multiprocessing/" in at.filename for at in last):
        return WillNotFitError(
            "/dev/shm: expected room for what data loader workers share, got none ("
            f"{str(error).splitlines()[-1]}). Enlarge it (docker run --shm-size), or set "
            "num_workers to 0."
        )
    place = place or "files of the run"
    limited = "too large" in str(error)
    way_out = "Raise that limit" if limited else "Free space"
    return WillNotFitError(
        f"{'ulimit -f' if limited else 'disk'}: expected room to write {place}, got none "
        f"({error}). {way_out}, or choose another training.output_dir, TMPDIR, "
        "XDG_CACHE_HOME or target of the output."
    )


def left_by(error: SystemExit) -> FullshardError:
    """Our error if code of a model or a library ends one of our processes too early.

    Raises:
        SystemExit: The command line's own library ended it: after completing words, or because
            no one reads the output.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals.get("__name__", "").partition(".")[0] in ("typer", "click", "rich"):
        raise error
    at = traceback.extract_tb(error.__traceback__)[-1]
    return FullshardError(
        f"process: expected to reach its end, but {at.filename}:{at.lineno} ended it by "
        f"sys.exit({error.code!r}). Make that code return, or raise an error."
    )


def of_place(error: BaseException, *, may_pass: bool = False) -> BaseException:
    """Converts the errors of a path that cannot be used or written down, and those of `as_ours`.

    Args:
        error: Any error.
        may_pass: Whether permissions may return, as on a network disk.
    """
    error = as_ours(error)
    if isinstance(error, UnicodeEncodeError) and not may_pass:
        ends = re.compile(r'[\n"<>]')  # a name may be written within JSON, YAML or a page
        shown = ends.split(error.object[: error.start])[-1][-60:]
        shown += ends.split(error.object[error.start :])[0][:20]
        return ConfigError(
            f"{shown!a}: expected names in UTF-8, got one that is not, which no file of a run can "
            "record. Rename the file or folder; if it is in UTF-8, set LC_ALL=C.UTF-8."
        )
    codes = _PLACE[3:] if may_pass else _PLACE
    if isinstance(error, FileExistsError) and Path(str(error.filename)).is_dir():
        return error  # two processes made a folder at a time
    if isinstance(error, OSError) and error.errno in codes and error.filename is not None:
        return ConfigError(
            f"'{error.filename2 or error.filename}': expected a usable path, got "
            f"'{error.strerror}'. Correct the file or its permissions, or use another path."
        )
    return error


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error.

    torch's errors are recognized by name, so that the command line need not import torch.
    """
    match error:
        case FullshardError():
            return error.exit_code
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case SystemExit(code=None):
            return ExitCode.OK
        case SystemExit(code=int(number)):  # Python's rule: its lowest byte
            return number & 0xFF
        case _ if ran_out_of_memory(error):
            return ExitCode.OUT_OF_MEMORY
        case RuntimeError() if any(word in str(error).lower() for word in TIME_OUT_WORDS):
            return ExitCode.HANG
    return ExitCode.UNEXPECTED


def public_name(error: BaseException) -> str:
    """The public class of an error: for our errors, the class in fullshard.errors."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return next(kinds, type(error)).__name__


def exit_code_of_signal(number: int) -> int:
    """Exit code of a launcher that a signal stopped."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED


def describe_status(status: int) -> str:
    """A process's return code in words; negative means that a signal ended it."""
    if status >= 0:
        return f"ended with exit code {status}"
    with contextlib.suppress(ValueError):
        number = signal.Signals(-status)
        return f"was killed by {number.name}{_CAUSES.get(number, '')}"
    return f"was killed by signal {-status}"


# ---- failures of ranks ---------------------------------------------------------------------------
# Ranks report to the launcher in a private folder, which is removed when the launch ends:
#   failure_<k>.json    why rank k failed, written by the rank itself
#   hang.json           why all ranks were ended, written by the rank whose watchdog judged
#   ending              exists once a rank has failed: the others need not explain their end

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
