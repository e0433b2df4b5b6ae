"""A step on a device with streams. See [Note: streams] in transport/streams.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fullshard.engine._torch_compat import GRAD, graph_task_id
from fullshard.engine.gradients import Gradients
from fullshard.engine.step import WAITS, Actions, Runtime, Use
from fullshard.engine.unit import Member
from fullshard.planner.schedule import Event
from fullshard.planner.units import Homes
from fullshard.transport.base import Works
from fullshard.transport.streams import Streams

MOST_TIMED = 1024  # pairs of events that are kept, unless the device is further behind


class StreamedRuntime(Runtime):
    """A runtime whose hooks may be called on any stream.

    Args:
        streams: Streams of the device.
        homes: Places of the shards.
        parts: Arguments of `Runtime`.
        poison: Fill released slots with NaN.
    """

    def __init__(self, streams: Streams, homes: Homes, *parts: Any, poison: bool) -> None:
        self._streams = streams
        self.stream = streams.current()  # the step's stream
        kind = OffloadedActions if homes.offloads else TimedActions
        super().__init__(*parts, poison=poison, actions=partial(kind, streams))

    def _on_the_steps(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` on the step's stream."""
        here, streams = self._streams.current(), self._streams
        if here == self.stream:
            return work(*args)
        streams.join(self.stream, here)
        try:
            with streams.on(self.stream):
                return work(*args)
        finally:
            streams.join(here, self.stream)

    def enter(self, index: int, *, is_outermost: bool) -> None:
        enter = super().enter
        if graph_task_id() == -1:
            enter(index, is_outermost=is_outermost)
        else:  # a recomputation
            self._on_the_steps(lambda: enter(index, is_outermost=is_outermost))

    def _begin_step(self, index: int, *, stale: bool) -> None:
        before, self.stream = self.stream, self._streams.current()
        if before != self.stream:
            self._streams.join(self.stream, before)
            for kept in (t for unit in self.units for g in unit.groups for t in g.deferred):
                self._streams.keep(kept, self.stream)
        super()._begin_step(index, stale=stale)

    def _run(self, events: Sequence[Event]) -> None:
        if events:  # a forward may call units on several streams
            self._on_the_steps(super()._run, events)

    def _enter_backward(self, use: Use) -> None:
        self._on_the_steps(super()._enter_backward, use)

    def on_gradient(self, member: Member) -> None:
        gradient = GRAD.__get__(member.compute)
        if gradient is not None and self._streams.current() != self.stream:
            self._streams.keep(gradient, self.stream)
        self._on_the_steps(super().on_gradient, member)


class TimedActions(Actions):
    """Measures waits for other ranks on the device, and names events for Nsight Systems.

    Args:
        streams: Streams of the device.
        parts: Arguments of `Actions`.
        poison: Fill released slots with NaN.
    """

    def __init__(self, streams: Streams, *parts: Any, poison: bool) -> None:
        super().__init__(*parts, poison=poison)
        self._streams = streams
        self._times: deque[tuple[Any, Any]] = deque()  # the device may not have reached yet

    def act(self, event: Event) -> None:
        streams = self._streams
        streams.begin_range(self._name_of(event))
        try:
            start = streams.event(timed=True) if event.kind in WAITS else None
            self._of[event.kind](event)
            if start is not None:
                self._times.append((start, streams.event(timed=True)))
                if len(self._times) > MOST_TIMED:
                    self.seconds()
        finally:
            streams.end_range()

    def seconds(self) -> float:
        while self._times and (took_s := self._streams.seconds(*self._times[0])) is not None:
            self.communication_s += took_s
            self._times.popleft()
        return self.communication_s


class OffloadedActions(TimedActions):
    """Copies shards from the host, and gradients to it, on two separate streams.

    The host waits for copies before it writes shards, and before it reads a backward's gradients.
    """

    def __init__(
        self, streams: Streams, units: Any, gradients: Gradients, *parts: Any, poison: bool
    ) -> None:
        super().__init__(streams, units, gradients, *parts, poison=poison)
        self._copies, self._returns = streams.make("copy"), streams.make("to host")
        self._done: dict[Any, Any] = {}  # by stream: recorded after its last copy
        gradients.to_host, gradients.await_host = self._to_host, self._await_copies
        for unit in self._units:
            unit.transport.home.await_reads = self._await_copies

    def _aside(self, stream: Any, copy: Callable[[], None]) -> Any:
        """Queue a copy on another stream; returns the event of its end."""
        streams = self._streams
        streams.join(stream, streams.current())
        with streams.on(stream):
            copy()
            done = self._done[stream] = streams.event()
        return done

    def _gather(self, event: Event) -> None:
        unit = self._units[event.unit]
        done = self._aside(self._copies, partial(super()._gather, event))
        fetch = unit.fetch

        def wait() -> None:
            self._streams.wait(done)
            if fetch is not None:
                fetch.wait()

        unit.fetch = Works((), first=wait)

    def _to_host(self, copy: Callable[[], None]) -> Iterator[None]:
        done = self._aside(self._returns, copy)
        yield
        self._streams.wait(done)

    def _await_copies(self) -> None:
        for done in self._done.values():
            self._streams.finish(done)
        self._done.clear()
