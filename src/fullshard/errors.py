"""Every exception that fullshard raises on purpose.

    FullshardError                    1   anything of ours
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
    |-- ShardedTensorError            1   an operation that needs the whole tensor met a shard
    |   `-- NotElementwiseError       1   an optimizer whose update of an element depends on others
    `-- EngineError (RuntimeError)    1   the engine was used in a way that it refuses
        `-- SlotError                 1   two units need one slot at once, or a slot is stale

The number is the exit code of every command (130 is reserved for an interrupt).
Messages follow one grammar: what was expected, what came, what to do.
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
    """A text that no terminal obeys: control, direction and surrogate characters are escaped."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    obeyed = unicodedata.category(char) in ("Cc", "Cs") or char in _BIDI
    return char.encode("unicode_escape").decode() if obeyed and char not in "\n\t" else char


class _Printable(logging.Formatter):
    """Messages may name a stranger's files and tensors."""

    def format(self, record: logging.LogRecord) -> str:
        """The message without what a terminal would obey."""
        return printable(super().format(record))


def show_log(prefix: str = "") -> None:
    """Shows what the library logs, which a program decides, never the library."""
    logger = logging.getLogger("fullshard")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Printable(f"{prefix}%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def write_anything() -> None:
    """Escapes characters that the locale's encoding lacks (LANG=C) in the output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its descriptor leads elsewhere since the stream was made
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


class FullshardError(Exception):
    """Base of all errors that fullshard raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        """The message; names and paths in it may come from a stranger's file."""
        return printable(super().__str__())


class ConfigError(FullshardError, ValueError):
    """A configuration key or value that cannot be used; names key, value and the nearest choice."""

    exit_code = 2


class WrapError(ConfigError):
    """The asked choice of units does not exist in this model."""


class UnsupportedModelError(ConfigError):
    """The model holds something that cannot be sharded; names it and the way out."""


class WillNotFitError(FullshardError):
    """The plan needs more memory than the device or host has, or more disk.

    Attributes:
        planned: What run.json says of the plan; None where no run was refused.
    """

    exit_code = 3
    planned: dict[str, Any] | None = None


class OutOfMemoryError(FullshardError):
    """Memory ran out during the run."""

    exit_code = 4


class HangError(FullshardError):
    """A rank is stuck or dead."""

    exit_code = 5


class DataError(FullshardError):
    """Training data is missing, empty or malformed."""

    exit_code = 6


class CheckpointError(FullshardError):
    """A checkpoint cannot be written or read."""

    exit_code = 7


class VerifyError(FullshardError):
    """A sharded run does not compute what the unsharded one computes."""

    exit_code = 8


class DivergedError(FullshardError):
    """The loss or the gradient norm is no longer finite."""

    exit_code = 9


class PreemptedError(FullshardError):
    """The run was stopped from outside and can be resumed."""

    exit_code = 75


class ShardedTensorError(FullshardError):
    """An operation that needs the whole tensor met a rank's shard of it.

    No TypeError: torch turns one that an operator raises into "unsupported operand type(s)".
    """


class NotElementwiseError(ShardedTensorError):
    """An optimizer whose update of one element depends on others met shards."""


class EngineError(FullshardError, RuntimeError):
    """The engine was used in a way that would compute something wrong."""


class SlotError(EngineError):
    """A slot is wanted by two units at once, or holds another unit's data."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Only Python and torch's devices have a type for it; the system, torch on CPUs and safetensors
    say it in words.
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
    """Whatever malformed input raises inside the block becomes one typed error.

    Parsers of other people's bytes fail in more ways than a list of exceptions can name
    (RecursionError, OverflowError, UnicodeError, AttributeError, ...).

    Args:
        origin: File, or file and key, that is read.
        expected: What it should be.
        error: Type to raise.
        advice: What the user can do.

    Raises:
        FullshardError: Errors that are typed already, and running out of memory, pass unchanged.
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
    """What to do about an error of the system: raise the limit that caused it, or `otherwise`."""
    if "can't start new thread" in str(error):
        return "Raise the limits that `ulimit -u` and `ulimit -v` show"
    flag = {errno.EMFILE: "n", errno.EFBIG: "f"}.get(getattr(error, "errno", None) or 0)
    return f"Raise the limit that `ulimit -{flag}` shows" if flag else otherwise


def raise_together(tell: Callable[[Any], list[Any]], rank: int, do: Callable[[], Any]) -> Any:
    """Returns what `do` returns; if it fails on one rank, it raises on all. A collective.

    Args:
        tell: Collective that returns the values of all ranks, in rank order.
        rank: This rank.
        do: Not a collective.

    Raises:
        FullshardError: This rank's error, or the one of the first rank that failed.
    """
    result = error = None
    try:
        result = do()
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must raise too
        error = caught
        if isinstance(caught, OSError) and not ran_out_of_memory(caught):
            place, why = caught.filename or "files of the run", caught.strerror or caught
            advice = cure_of(caught, "Make room, or correct the path or its permissions")
            error = CheckpointError(
                f"{place}: expected to read or write, got {why}. {advice}, and start again."
            )
            error.__cause__ = caught
    found = tell(None if error is None else _for_other_ranks(error, rank))
    if error is not None:
        raise error
    for failure in filter(None, found):
        raise failure[0](failure[1])
    return result


def _for_other_ranks(error: Exception, rank: int) -> tuple[type[FullshardError], str]:
    """Type and message that the other ranks raise."""
    if isinstance(error, FullshardError):
        return type(error), str(error)
    kind = OutOfMemoryError if ran_out_of_memory(error) else EngineError
    return kind, f"rank {rank}: {type(error).__name__}: {error}"
