"""The event ring: the last events of a run, in memory that does not grow."""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from fullshard.planner.events import Event, EventKind

KEPT_ON_DEATH = 16
_KINDS = tuple(EventKind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_COUNT, _OPEN, _WORDS = KEPT_ON_DEATH, KEPT_ON_DEATH + 1, KEPT_ON_DEATH + 2
_BYTES = 8 * _WORDS


class EventRing:
    """Keeps the last `capacity` events.

    Args:
        capacity: Events kept; a step of a 126-layer model has about a thousand.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        # Arrays: with 65,536 tuples a full garbage collection takes a tenth of a second longer.
        self._capacity = capacity
        self._events: list[Any] = [None] * capacity
        self._steps, self._times = array("q", bytes(8 * capacity)), array("d", bytes(8 * capacity))
        self._first = 0
        self.count = 0  # of all events so far
        self.open: tuple[Event, int, float] | None = None  # begun and not done
        self._page: Any = [0] * _WORDS

    def keep_in(self, file: Path, titles: Sequence[str]) -> None:
        """Also keep the last events in a mapped file, which outlives a killed process.

        On a full disk they stay in memory alone.

        Args:
            file: Made here: a page of numbers, then the titles.
            titles: Titles of the units, in plan order.
        """
        try:
            file.write_bytes(bytes(_BYTES) + json.dumps(list(titles)).encode())
        except OSError:
            file.unlink(missing_ok=True)
            return
        with file.open("r+b") as opened:
            self._page = memoryview(mmap.mmap(opened.fileno(), _BYTES)).cast("Q")

    def begin(self, event: Event, step: int) -> None:
        """Note that an action begins, which may wait for other ranks."""
        self.open = (event, step, perf_counter())
        self._page[_OPEN] = step << 32 | event.unit + 1 << 8 | _CODES[event.kind]

    def record(self, event: Event, step: int) -> None:
        """Note one event."""
        at = self.count % self._capacity
        self._events[at], self._steps[at], self._times[at] = event, step, perf_counter()
        self.open = None
        page, self.count = self._page, self.count + 1
        page[self.count % KEPT_ON_DEATH] = step << 32 | event.unit + 1 << 8 | _CODES[event.kind]
        page[_COUNT] = self.count

    def events(self, step: int | None = None) -> tuple[Event, ...]:
        """The events of one step, or all that are kept."""
        return tuple(event for event, at, _ in self.copy() if step is None or at == step)

    def copy(self) -> list[tuple[Event, int, float]]:
        """What is kept, oldest first.

        If another thread records meanwhile, newer events may have replaced the oldest. The watchdog
        asks twice a second during training; slices take a tenth of the time of a loop.
        """
        count, capacity = self.count, self._capacity
        begin, end = max(self._first, count - capacity), count
        parts = [slice(begin % capacity, begin % capacity + end - begin)]
        if parts[0].stop > capacity:
            parts = [slice(begin % capacity, capacity), slice(0, parts[0].stop - capacity)]
        kept: list[tuple[Event, int, float]] = []
        for part in parts:
            kept += zip(self._events[part], self._steps[part], self._times[part], strict=True)
        return kept

    def clear(self) -> None:
        """Forget everything."""
        self._first = self.count


def read_kept(file: Path) -> list[str]:
    """The last events that a process kept in a file, oldest first; the last may not have ended.

    Empty if the file is missing or incomplete.
    """
    try:
        data = file.read_bytes()
        page, titles = memoryview(data[:_BYTES]).cast("Q"), json.loads(data[_BYTES:])
    except (OSError, ValueError, TypeError):
        return []
    count = page[_COUNT]
    numbers = [page[at % KEPT_ON_DEATH] for at in range(max(1, count - 15), count + 1)]
    words = [in_words(*_decoded(number), titles) for number in numbers]
    if page[_OPEN] and (not numbers or page[_OPEN] != numbers[-1]):
        words.append(in_words(*_decoded(page[_OPEN]), titles) + " (begun)")
    return words


def _decoded(number: int) -> tuple[Event, int]:
    """The event and the step of a number in the page."""
    return Event(_KINDS[number & 0xFF], (number >> 8 & 0xFFFFFF) - 1), number >> 32


def in_words(event: Event, step: int, titles: Sequence[str]) -> str:
    """`step 3: gather layers.17`; steps count from 1."""
    title = titles[event.unit] if event.unit >= 0 else "the model"
    return f"step {step + 1}: {event.kind.value} {title}"
