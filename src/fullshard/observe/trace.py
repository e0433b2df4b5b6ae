"""The event ring: the last events of a run, in memory that does not grow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from fullshard.planner.events import Event


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

    def begin(self, event: Event, step: int) -> None:
        """Note that an action begins, which may wait for other ranks."""
        self.open = (event, step, perf_counter())

    def record(self, event: Event, step: int) -> None:
        """Note one event."""
        at = self.count % self._capacity
        self._events[at], self._steps[at], self._times[at] = event, step, perf_counter()
        self.open = None
        self.count += 1

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


def in_words(event: Event, step: int, titles: Sequence[str]) -> str:
    """`step 3: gather layers.17`; steps count from 1."""
    title = titles[event.unit] if event.unit >= 0 else "the model"
    return f"step {step + 1}: {event.kind.value} {title}"
