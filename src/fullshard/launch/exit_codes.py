"""Exit codes of every command and rank, and which error means which code.

The codes are part of the contract: scripts and schedulers decide by them whether to retry.
"""

from __future__ import annotations

import errno
import re
import resource
import signal
import traceback
from contextlib import suppress
from enum import IntEnum

from fullshard import errors
from fullshard.errors import ConfigError, FullshardError, WillNotFitError, ran_out_of_memory
from fullshard.launch.signals import Stopped


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


# Errors of the system about the place of a file, which no traceback explains.
_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


def as_ours(error: BaseException) -> BaseException:
    """Converts the errors of a full disk and of too many files; returns others unchanged."""
    if isinstance(error, FullshardError):
        return error
    ours = error.ours if isinstance(error, Stopped) else _of_limits(error)
    return error if ours is None else ours.with_traceback(error.__traceback__)


def _of_limits(error: BaseException) -> FullshardError | None:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    starts = not isinstance(error, OSError) or any("fork" in (at.line or "") for at in last)
    if starts and str(error).endswith(("start new thread", "Resource temporarily unavailable")):
        return ConfigError(
            f"ulimit -u: expected to start one more process or thread, got none ({error}). Raise "
            "that limit, or pids.max of the container."
        )
    if "Too many open files" in str(error):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ConfigError(
            f"ulimit -n: expected to open more files than the {most} that a process may, got none "
            f"({error}). Raise that limit."
        )
    if not _DISK_IS_FULL.search(str(error)):
        return None
    place = getattr(error, "filename", None) or "files of the run"
    limited = "too large" in str(error)
    way_out = "Raise that limit" if limited else "Free space"
    return WillNotFitError(
        f"{'ulimit -f' if limited else 'disk'}: expected room to write {place}, got none "
        f"({error}). {way_out}, or choose another training.output_dir, TMPDIR, "
        "XDG_CACHE_HOME or target of the output."
    )


def of_place(error: BaseException, *, may_pass: bool = False) -> BaseException:
    """Converts the errors of a path that cannot be used or written down, and those of `as_ours`.

    Args:
        error: Any error.
        may_pass: Whether rights may come back, as on a disk of a network.
    """
    error = as_ours(error)
    if isinstance(error, UnicodeEncodeError) and not may_pass:
        shown = error.object[max(0, error.start - 40) : error.end + 20]
        return ConfigError(
            f"{shown!a}: expected names in UTF-8, got one that is not, which no file of a run can "
            "record. Rename the file or folder."
        )
    codes = _PLACE[3:] if may_pass else _PLACE
    if isinstance(error, OSError) and error.errno in codes and error.filename is not None:
        return ConfigError(
            f"'{error.filename2 or error.filename}': expected a place that can be used, got "
            f"'{error.strerror}'. Correct what is there or its permissions, or name another."
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
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
