"""Every exception that fullshard raises on purpose.

    FullshardError                    1   base of all errors below
    |-- ConfigError (ValueError)      2   a key, a value, a mesh, a file that cannot be used
    |   |-- WrapError                 2   the choice of units is impossible for this model
    |   `-- UnsupportedModelError     2   the model cannot be sharded, with the reason
    |-- WillNotFitError               3   the plan needs more memory than there is
    |-- OutOfMemoryError              4   memory ran out during the run
    |-- HangError                     5   a rank is stuck or dead
    |-- DataError                     6   data is missing, empty or malformed
    |-- CheckpointError               7   a checkpoint cannot be written or read
    |-- VerifyError                   8   a sharded run does not equal the unsharded one
    |-- DivergedError                 9   the loss is no longer finite
    |-- PreemptedError               75   stopped by the scheduler, resumable
    |-- ShardedTensorError            1   an operation that needs the whole tensor got a shard
    |   `-- NotElementwiseError       1   an optimizer whose update of an element depends on others
    `-- EngineError (RuntimeError)    1   the engine was used in an unsupported way
        `-- SlotError                 1   two units need one slot at once, or a slot is stale

The number is the exit code of every command (130 is reserved for an interrupt).
Messages have one form: what was expected, what was given, what to do.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
import unicodedata
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

_NO_MEMORY = re.compile(
    r"(can't|cannot) allocate memory|not enough memory|failed to map segment", re.IGNORECASE
)
_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def printable(text: str) -> str:
    """Escape control, direction and surrogate characters, which a terminal would interpret."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    obeyed = unicodedata.category(char) in ("Cc", "Cs") or char in _BIDI
    return char.encode("unicode_escape").decode() if obeyed and char not in "\n\t" else char


class _Printable(logging.Formatter):
    """Messages may contain names from untrusted files."""

    def format(self, record: logging.LogRecord) -> str:
        """The message with control characters escaped."""
        return printable(super().format(record))


def show_log(prefix: str = "") -> None:
    """Print the library's log. Programs call this, never the library."""
    logger = logging.getLogger("fullshard")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Printable(f"{prefix}%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def write_anything() -> None:
    """Escape characters in the output that the locale's encoding (LANG=C) cannot represent."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its descriptor was redirected since the stream was opened
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


class FullshardError(Exception):
    """Base of all errors that fullshard raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        """The message; names and paths in it may come from an untrusted file."""
        return printable(super().__str__())


class ConfigError(FullshardError, ValueError):
    """A configuration key or value is invalid; names key, value and the nearest choice."""

    exit_code = 2


class WrapError(ConfigError):
    """The configured choice of units does not exist in this model."""


class UnsupportedModelError(ConfigError):
    """The model contains something that cannot be sharded; names it and the remedy."""


class WillNotFitError(FullshardError):
    """The plan needs more memory than the device or host has, or more disk.

    Attributes:
        planned: The plan's entry in run.json; None if no run was refused.
    """

    exit_code = 3
    planned: dict[str, Any] | None = None


class OutOfMemoryError(FullshardError):
    """Memory ran out during the run."""

    exit_code = 4


class HangError(FullshardError):
    """A rank is stuck or dead.

    Attributes:
        rank: That rank, where the watchdog names one.
    """

    exit_code = 5
    rank = 0


class DataError(FullshardError):
    """Training data is missing, empty or malformed."""

    exit_code = 6


class CheckpointError(FullshardError):
    """A checkpoint cannot be written or read."""

    exit_code = 7


class VerifyError(FullshardError):
    """A sharded run computes other numbers than the unsharded one."""

    exit_code = 8


class DivergedError(FullshardError):
    """The loss or the gradient norm is no longer finite."""

    exit_code = 9


class PreemptedError(FullshardError):
    """The run was stopped from outside and can be resumed."""

    exit_code = 75


class ShardedTensorError(FullshardError):
    """An operation that needs the whole tensor got a rank's shard of it.

    Not a TypeError, because torch turns one that an operator raises into "unsupported operand
    type(s)".
    """


class NotElementwiseError(ShardedTensorError):
    """An optimizer whose update of one element depends on others got shards."""


class EngineError(FullshardError, RuntimeError):
    """The engine was used in a way that would compute something wrong."""


class SlotError(EngineError):
    """Two units need one slot at once, or a slot contains another unit's data."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated.

    Only Python and torch's devices have a type for it. For the system, torch on CPUs and
    safetensors the message is searched.
    """
    kinds = MemoryError, OutOfMemoryError
    named = isinstance(error, kinds) or type(error).__name__ == OutOfMemoryError.__name__
    return named or bool(_NO_MEMORY.search(str(error)))


@contextmanager
def untrusted(
    origin: object,
    expected: str,
    error: type[FullshardError] = CheckpointError,
    advice: str = "Copy it again, or take another one.",
) -> Generator[None]:
    """Turn any error that malformed input raises inside the block into one typed error.

    Parsers of other people's bytes fail in more ways than a list of exceptions can name
    (RecursionError, OverflowError, UnicodeError, AttributeError, ...).

    Args:
        origin: File, or file and key, that is read.
        expected: Description of valid input.
        error: Type to raise.
        advice: Remedy for the user.

    Raises:
        FullshardError: Typed errors, and running out of memory, pass unchanged.
    """
    try:
        yield
    except FullshardError:
        raise
    except Exception as caught:
        if ran_out_of_memory(caught):
            raise
        why = (str(getattr(caught, "strerror", None) or caught).strip().splitlines() or [""])[0]
        got = f"{type(caught).__name__}: {why}"[:300]
        raise error(f"{origin}: expected {expected}; got {got}. {advice}") from caught


def cure_of(error: BaseException, otherwise: str) -> str:
    """The remedy for a system error: raise the limit that caused it, or `otherwise`."""
    if "can't start new thread" in str(error):
        return "Raise the limits that `ulimit -u`, `ulimit -v` and `ulimit -d` show"
    flag = {errno.EMFILE: "n", errno.EFBIG: "f"}.get(getattr(error, "errno", None) or 0)
    return f"Raise the limit that `ulimit -{flag}` shows" if flag else otherwise


def raise_together(all_values: Callable[[Any], list[Any]], rank: int, do: Callable[[], Any]) -> Any:
    """Return the result of `do`; if it fails on one rank, raise on all ranks. A collective.

    Args:
        all_values: Collective that returns the values of all ranks, in rank order.
        rank: This rank.
        do: Function that is not a collective.

    Raises:
        FullshardError: This rank's error, or the one of the first rank that failed.
    """
    result = error = None
    try:
        result = do()
    except Exception as caught:  # noqa: BLE001  the other ranks must raise any error too
        error = caught
        if isinstance(caught, OSError) and not ran_out_of_memory(caught):
            place, why = caught.filename or "files of the run", caught.strerror or caught
            advice = cure_of(caught, "Make room, or correct the path or its permissions")
            error = CheckpointError(
                f"{place}: expected to read or write, got {why}. {advice}, and start again."
            )
            error.__cause__ = caught
    found = all_values(None if error is None else _for_other_ranks(error, rank))
    if error is not None:
        raise error
    for failure in filter(None, found):
        raise failure[0](*failure[1])
    return result


def _for_other_ranks(error: Exception, rank: int) -> tuple[Any, ...]:
    """Type and arguments of the error that the other ranks raise."""
    if isinstance(error, FullshardError):
        return error.__reduce__()[:2]  # type: ignore[return-value]  a tuple
    kind = OutOfMemoryError if ran_out_of_memory(error) else EngineError
    return kind, (f"rank {rank}: {type(error).__name__}: {error}",)
