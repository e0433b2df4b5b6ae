"""Signals that ask a launcher to stop, noted instead of obeyed at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# SIGHUP: the terminal is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Caught:
    """The stop signals that came, oldest first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.numbers.append(number)


@contextlib.contextmanager
def caught_stop_signals() -> Iterator[Caught]:
    """Note stop signals inside the block; the handlers of before are restored after it.

    Off the main thread Python has no signal handlers: nothing is noted there.
    """
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, caught.note) for number in STOP_SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
