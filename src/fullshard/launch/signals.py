"""Stop signals: recorded for a launcher, turned into errors by a rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from fullshard.errors import PreemptedError

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
    ignored stays ignored, so that `nohup` works.

    Args:
        numbers: Signals.
        handler: Called with the previous handlers by signal, the signal and the frame.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for n in numbers:
        if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN:
            before[n] = signal.signal(n, partial(handler, before))
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


def raise_stopped(number: int, *, plain: bool = False) -> NoReturn:
    """Raises the error of a signal in the main thread, so that `finally` blocks run.

    Args:
        number: The signal.
        plain: Raise a PreemptedError, which `except Exception` catches.
    """
    error = PreemptedError(
        f"run: expected to reach its end, got {signal.Signals(number).name}. Start it again; "
        "it resumes from its last checkpoint, if it has saved one."
    )
    raise error if plain else Stopped(error)


@contextlib.contextmanager
def ended_by(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Ends the block with a PreemptedError when one of these signals arrives."""
    try:
        with handled(numbers, lambda _, number, _frame: raise_stopped(number)):
            yield
    except Stopped as stopped:
        raise stopped.ours from None


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
