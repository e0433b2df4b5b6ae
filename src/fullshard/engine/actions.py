"""What each event of the plan does to units, slots and gradients on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from fullshard.engine._torch_compat import has_modes, is_profiling, outside_modes
from fullshard.engine.gradients import Gradients
from fullshard.engine.unit import Unit
from fullshard.planner.events import Event, EventKind, Recorder

WORKS = {EventKind.RELEASE, EventKind.DEFER, EventKind.SPILL}
WAITS = frozenset(EventKind) - WORKS


class Actions:
    """Carries events out, and tells the recorder.

    Args:
        units: In plan order, bound to their slots.
        gradients: Collects, reduces and shows gradients.
        recorder: Told of every event.
        poison: Fill released slots with NaN.

    Attributes:
        communication_s: Seconds spent in events that may wait for other ranks.
    """

    def __init__(
        self, units: Sequence[Unit], gradients: Gradients, recorder: Recorder, *, poison: bool
    ) -> None:
        self.recorder = recorder
        self.communication_s = 0.0
        self._units, self._poison = units, poison
        self._filling: dict[Any, Unit] = {}  # whose gather was last issued into a slot
        self._of: dict[EventKind, Callable[[Event], None]] = {
            EventKind.PUBLISH: lambda _: gradients.transport.home.publish(),
            EventKind.GATHER: self._gather,
            EventKind.FORWARD: self._use,
            EventKind.BACKWARD: self._use,
            EventKind.RELEASE: self._release,
            EventKind.REDUCE: lambda event: gradients.reduce(units[event.unit]),
            EventKind.ACCUMULATE: lambda event: gradients.accumulate(units[event.unit]),
            EventKind.DEFER: lambda event: gradients.defer(units[event.unit]),
            EventKind.SETTLE: lambda _: gradients.settle(units),
        }

    def run(self, events: Sequence[Event], step: int) -> None:
        """Carry out events in their order, outside of autograd and of the user's modes."""
        if has_modes():
            with outside_modes(), torch.no_grad():
                self._run(events, step)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                self._run(events, step)
        else:
            self._run(events, step)

    def _run(self, events: Sequence[Event], step: int) -> None:
        recorder, act = self.recorder, self._act_named if is_profiling() else self._act
        for event in events:
            recorder.begin(event, step)
            act(event)
            recorder.record(event, step)

    def _act(self, event: Event) -> None:
        kind = event.kind
        if kind in WAITS:
            start = perf_counter()
            self._of[kind](event)
            self.communication_s += perf_counter() - start
        else:
            self._of[kind](event)

    def _act_named(self, event: Event) -> None:
        """The same, with a name in the profiler's tables."""
        unit = f" {self._units[event.unit].plan.title}" if event.unit >= 0 else ""
        with torch.profiler.record_function(f"fullshard {event.kind}{unit}"):
            self._act(event)

    def _gather(self, event: Event) -> None:
        unit = self._units[event.unit]
        for group in unit.groups:
            if group.plan.slot is not None:
                key = (group.plan.slot.ring, group.plan.slot.index)
                previous = self._filling.get(key)
                if previous is not None:
                    previous.wait()  # gathered ahead and never entered
                    previous.versions.mark(is_open=False)
                self._filling[key] = unit
        unit.gather()

    def _use(self, event: Event) -> None:
        unit = self._units[event.unit]
        unit.wait()
        if event.kind is EventKind.FORWARD or unit.plan.reads_weight_in_backward:
            unit.versions.mark(is_open=True)

    def _release(self, event: Event) -> None:
        unit = self._units[event.unit]
        unit.wait()
        unit.versions.mark(is_open=False)
        if self._poison:
            unit.poison()
