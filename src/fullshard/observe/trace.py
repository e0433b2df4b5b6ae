"""The event ring: the last events of a run, in memory that does not grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter

from fullshard.planner.events import Event


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event with the step that it belongs to and the time at which it was done.

    Attributes:
        time_s: Seconds of a monotonic clock.
    """

    event: Event
    step: int
    time_s: float


class EventRing:
    """Keeps the last `capacity` events.

    Args:
        capacity: Events kept; a step of a 126-layer model has about a thousand.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._kept: deque[tuple[Event, int, float]] = deque(maxlen=capacity)
        self.count = 0  # of all events so far
        self.open: tuple[Event, int, float] | None = None  # begun and not done

    def begin(self, event: Event, step: int) -> None:
        """Note that an action begins, which may wait for other ranks."""
        self.open = (event, step, perf_counter())

    def record(self, event: Event, step: int) -> None:
        """Note one event."""
        self._kept.append((event, step, perf_counter()))
        self.open = None
        self.count += 1

    def events(self, step: int | None = None) -> tuple[Event, ...]:
        """The events of one step, or all that are kept."""
        return tuple(event for event, at, _ in self._kept if step is None or at == step)

    def entries(self) -> tuple[Recorded, ...]:
        """Everything that is kept, oldest first."""
        return tuple(Recorded(*entry) for entry in self._kept)

    def copy(self) -> list[tuple[Event, int, float]]:
        """What is kept, oldest first; safe beside a thread that records (one C call)."""
        return list(self._kept)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
