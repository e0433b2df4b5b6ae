"""Signals that ask a launcher to stop, noted instead of obeyed at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

# SIGHUP: the terminal is gone. SIGQUIT: Ctrl-\. SIGUSR1: what schedulers send as a warning.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # to a rank: save, then end


class Caught:
    """The stop signals that came, oldest first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


@contextlib.contextmanager
def caught_stop_signals(
    numbers: Sequence[signal.Signals] = STOP_SIGNALS, obey: Callable[[], bool] = lambda: False
) -> Iterator[Caught]:
    """Note signals inside the block; the handlers of before are restored after it.

    Off the main thread Python has no signal handlers: nothing is noted there.

    Args:
        numbers: Which.
        obey: Where it says so when a signal comes, the handler of before is called instead.
    """
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        handler = before.get(signal.Signals(number))
        if obey() and callable(handler):
            handler(number, frame)
        else:
            caught.numbers.append(number)

    before.update({number: signal.signal(number, note) for number in numbers})
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
