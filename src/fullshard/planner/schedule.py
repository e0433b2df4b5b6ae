"""When units are gathered, released and reduced: a pure state machine over units and slots.

The engine's hooks tell the `Scheduler` what a model does ("layers.3 is entered"); it answers with
the events that follow. The planner drives the same machine with the nominal order, so the event
list of a plan and the engine's are one piece of code, and no collective depends on which rank's
hook fires first.

    forward   enter(i):  GATHER i if it is not held, GATHER i+1 .. i+depth, FORWARD i
              leave(i):  RELEASE i, unless it is used again before anything takes its slot
    backward  enter(i):  RELEASE what is over, GATHER i, GATHER i-1 .. i-depth, BACKWARD i
              complete(i):  REDUCE i in plan order, ACCUMULATE the one before it

[Note: catching up]
Gathers and reductions are issued in plan order: entering unit j first passes the units that this
rank skipped as other ranks run them (gather, look ahead, reduce), because another rank may not have
skipped them; the end of the root's forward, and of backward, passes those that are left. So all
ranks issue one sequence, and none waits for what a peer will issue only after it. A unit that the
order does not expect is gathered on demand, and the order is learned from the first step (see
`engine/step.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fullshard.planner.events import Event, EventKind, Sync, event_of
from fullshard.planner.slots import SlotTable
from fullshard.planner.units import UnitPlan, ancestors_of

ROOT = 0  # the root's index


@dataclass(frozen=True, slots=True)
class Depths:
    """How many units ahead are gathered."""

    forward: int = 1
    backward: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a step's work.

    Attributes:
        forward: Units as they are entered in forward, with repetitions.
        backward: Units as they are entered in backward, with repetitions.
        reduce: Trainable units in the order in which their gradients become complete.
        learned: Whether a real step showed it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduce: tuple[int, ...]
    learned: bool = False


def registration_order(units: Sequence[UnitPlan]) -> Order:
    """The order of registration: forward as modules are registered, backward its mirror.

    Gradients reach a unit that has trainable parameters or follows one that has; a unit's own
    parameters are taken to be used after those of the units in it.
    """
    forward = tuple(unit.index for unit in units)
    left = [index for what, index in nominal_trace(units, forward) if what == "leave"]
    first = next((at for at, index in enumerate(left) if units[index].trainable), len(left))
    return Order(forward, tuple(reversed(left[first:])), reduce_order(units, forward))


def reduce_order(units: Sequence[UnitPlan], forward: Sequence[int]) -> tuple[int, ...]:
    """Trainable units from the last first entered to the first; units never entered at the end."""
    entered = list(dict.fromkeys(forward))
    order = dict.fromkeys([*reversed(entered), *range(len(units))])
    return tuple(index for index in order if units[index].trainable)


def nominal_trace(units: Sequence[UnitPlan], entered: Sequence[int]) -> list[tuple[str, int]]:
    """("enter" | "leave", unit) of a forward or a backward in which units nest as modules do."""
    trace: list[tuple[str, int]] = []
    stack: list[int] = []
    for index in entered:
        while stack and stack[-1] not in ancestors_of(units, units[index]):
            trace.append(("leave", stack.pop()))
        trace.append(("enter", index))
        stack.append(index)
    trace.extend(("leave", index) for index in reversed(stack))
    return trace


class Scheduler:
    """What follows from what a model does, on one rank. Pure: it moves no bytes."""

    def __init__(self, units: Sequence[UnitPlan], order: Order, depths: Depths) -> None:
        self.units = tuple(units)
        self.order = order
        self._depths = depths
        self._reduce_bytes = {
            Sync.ALL: [sum(g.reduce_bytes(u.mesh.replicate) for g in u.groups) for u in units],
            Sync.INNER: [sum(g.reduce_bytes(1) for g in u.groups) for u in units],
        }
        self._ancestors = [ancestors_of(units, unit) for unit in units]
        self._reduces = set(order.reduce)
        self._last_forward = {unit: at for at, unit in enumerate(order.forward)}
        self._first_forward = {unit: order.forward.index(unit) for unit in set(order.forward)}
        self._last_backward = {unit: at for at, unit in enumerate(order.backward)}
        sharing = [u.index for u in units if any(group.shared for group in u.groups)]
        self._shares = {around for u in sharing for around in (u, *self._ancestors[u])}
        self.reset()
        needed = {i for i in order.backward if units[i].reads_weight_in_backward}
        self._keep = self._table.last_holders(order.forward) & needed

    def reset(self) -> None:
        """Nothing is held, open or under way."""
        self._table = SlotTable(self.units)
        # Whether a unit's weights are in place (gathered, or read from the master).
        self.holds: Callable[[int], bool] = self._table.holds
        self._outstanding: deque[int] = deque()
        self._issued = self._position = self._reduced = 0
        self._in_forward = 0, 0  # what is issued and the position, while a backward runs
        self._stepped = False
        self._sync = Sync.ALL

    # ---- forward

    def begin_forward(self, unit: int = ROOT, *, stale: bool = True) -> list[Event]:
        """A forward of the whole model begins, or of a unit alone.

        Args:
            unit: The outermost.
            stale: Whether weights may have changed, so that no slot holds them.
        """
        if stale or unit == ROOT:
            self._table.clear()
        self._issued = self._position = self._first_forward.get(unit, len(self.order.forward))
        if self._stepped:
            self._table.pending_uses.clear()
            self._stepped = False
        return self.publish(unit)

    def publish(self, unit: int = ROOT) -> list[Event]:
        """A forward begins, of the whole model or of a unit alone."""
        return [event_of(EventKind.PUBLISH, -1)] if unit in self._shares else []

    def enter_forward(self, unit: int) -> list[Event]:
        """The unit's forward begins."""
        events: list[Event] = []
        self._walk(unit, events)
        self._table.enter(unit)
        self._table.open[unit] += 1
        events.append(event_of(EventKind.FORWARD, unit))
        return events

    def leave_forward(self, unit: int, *, training: bool) -> list[Event]:
        """The unit's forward ends; `training` says that a backward may follow."""
        events: list[Event] = []
        self._table.open[unit] -= 1
        if training:
            self._table.pending_uses[unit] += 1
        if unit == ROOT:
            self._catch_up(events, backward=False)
        if unit == ROOT and not training:
            return events + self._table.release_all()
        kept = training and unit in self._keep
        again = self._last_forward.get(unit, -1) >= self._position
        if kept or again or self._table.open[unit]:
            return events
        return events + self._table.release(unit)

    # ---- recompute

    def enter_recompute(self, unit: int) -> list[Event]:
        """Forward code of the unit runs again inside backward."""
        events: list[Event] = []
        self._table.gather(unit, events, recompute=True)
        self._table.enter(unit)
        self._table.open[unit] += 1
        return events

    def leave_recompute(self, unit: int) -> None:
        """The recomputed forward ends, or stops early; the slot stays for the backward."""
        self._table.open[unit] -= 1

    # ---- backward

    def begin_backward(self, nothing_expected: Collection[int], *, sync: Sync = Sync.ALL) -> None:
        """A backward begins.

        Args:
            nothing_expected: Units that get no gradient from it on this rank.
            sync: What becomes of its gradients.
        """
        self._sync = sync
        self._in_forward = self._issued, self._position
        self._table.begun.clear()
        self._table.complete = set(nothing_expected)
        self._outstanding.clear()
        self._issued = self._position = self._reduced = 0
        if any(self._table.open):  # inside a forward: gather on demand
            self._issued = self._position = len(self.order.backward)

    def enter_backward(self, unit: int) -> list[Event]:
        """A gradient of one of the unit's outputs is there."""
        events: list[Event] = []
        self._table.pending_uses[unit] -= 1
        self._retire(unit, events)
        self._table.begun.add(unit)
        self._walk(unit, events, backward=True)
        self._table.enter(unit)
        events.append(event_of(EventKind.BACKWARD, unit))
        return events

    def enter_inner(self, unit: int) -> list[Event]:
        """A gradient of its outputs is there, in a backward that another one waits for."""
        events: list[Event] = []
        if self._reads(unit, backward=True):
            self._table.gather(unit, events, inner=True)
        return events

    def complete(self, unit: int) -> list[Event]:
        """The last expected gradient of the unit is in its gradient slot."""
        self._table.complete.add(unit)
        return self._drain(force=False)

    def end_backward(self, *, reduce: bool = True) -> list[Event]:
        """Autograd is done: reduce what is left in plan order, release everything.

        Args:
            reduce: False where the backward reached no parameter at all.
        """
        events: list[Event] = []
        self._table.begun.clear()
        if reduce:
            self._catch_up(events, backward=True)
            events += self._drain(force=True)
        while self._outstanding:
            self._land(events)
        events += self._table.release_all()
        self._issued, self._position = self._in_forward  # one may be under way
        self._stepped = True
        if reduce and self._sync is Sync.ALL:
            events.append(event_of(EventKind.SETTLE, -1))
        return events

    def abandon_backward(self, *, reduce: bool) -> list[Event]:
        """The backward raised: what other ranks may still wait for in it."""
        self._table.open = [0] * len(self.units)
        needed = (EventKind.GATHER, EventKind.REDUCE, EventKind.ACCUMULATE)
        return [event for event in self.end_backward(reduce=reduce) if event.kind in needed]

    # ---- inside

    def _walk(self, unit: int, events: list[Event], *, backward: bool = False) -> None:
        """Catch up in plan order, gather the unit, look ahead. See [Note: catching up]."""
        order = self.order.backward if backward else self.order.forward
        try:
            at = order.index(unit, self._position)
        except ValueError:  # not expected here: a repeated or a new call
            self._gather(unit, events, backward=backward)
            return
        while self._position < at:
            self._pass(order, events, backward=backward)
        self._pass(order, events, backward=backward, used=True)

    def _pass(
        self, order: Sequence[int], events: list[Event], *, backward: bool, used: bool = False
    ) -> None:
        """Do what the next unit asks of every rank, whether or not this one uses it."""
        depth = self._depths.backward if backward else self._depths.forward
        unit = order[self._position]
        self._position += 1
        self._gather(unit, events, backward=backward)
        self._issued = max(self._issued, self._position)
        for ahead in order[self._issued : self._position + depth]:
            reads = self._reads(ahead, backward=backward)
            if reads and not self._table.look_ahead(ahead, unit, events):
                break
            self._issued += 1
        if not used:
            self._table.enter(unit)  # its slot is free again, as where it was used
            events += self._drain(force=False) if backward else []

    def _catch_up(self, events: list[Event], *, backward: bool) -> None:
        """Do what is left of the order: other ranks may need it."""
        order = self.order.backward if backward else self.order.forward
        while self._position < len(order):
            self._pass(order, events, backward=backward)

    def _gather(self, unit: int, events: list[Event], *, backward: bool) -> None:
        if self._reads(unit, backward=backward):
            self._table.gather(unit, events)

    def _reads(self, unit: int, *, backward: bool) -> bool:
        """Whether the unit reads its weights on this way through the model."""
        return not backward or self.units[unit].reads_weight_in_backward

    def _retire(self, unit: int, events: list[Event]) -> None:
        """Release units whose backward is over now that another unit's begins."""
        for other in sorted(self._table.begun):
            over = other in self._table.complete or other not in self._reduces
            around = other == unit or other in self._ancestors[unit]
            is_coming = self._last_backward.get(other, -1) >= self._position
            if over and not around and not is_coming:
                self._table.begun.discard(other)
                events += self._table.release(other)

    def _drain(self, *, force: bool) -> list[Event]:
        events: list[Event] = []
        order = self.order.reduce
        while self._reduced < len(order):
            unit = order[self._reduced]
            is_coming = self._last_backward.get(unit, -1) >= self._position
            ready = unit in self._table.complete and not is_coming
            if not ready and not force:
                break
            self._reduced += 1
            if self._sync is Sync.NONE:
                events.append(event_of(EventKind.DEFER, unit))
                continue
            events.append(event_of(EventKind.REDUCE, unit, self._reduce_bytes[self._sync][unit]))
            self._outstanding.append(unit)
            if len(self._outstanding) > 1:
                self._land(events)
        return events

    def _land(self, events: list[Event]) -> None:
        events.append(event_of(EventKind.ACCUMULATE, self._outstanding.popleft()))


def simulate_step(scheduler: Scheduler) -> tuple[Event, ...]:
    """The events of one training step in which the model does what the order says."""
    scheduler.reset()
    units, order = scheduler.units, scheduler.order
    events = scheduler.begin_forward()
    for what, index in nominal_trace(units, order.forward):
        if what == "enter":
            events += scheduler.enter_forward(index)
        else:
            events += scheduler.leave_forward(index, training=True)
    uses = Counter(order.backward)
    scheduler.begin_backward([unit.index for unit in units if not uses[unit.index]])
    for what, index in nominal_trace(units, order.backward):
        if what == "enter":
            events += scheduler.enter_backward(index)
            continue
        uses[index] -= 1
        if not uses[index] and units[index].trainable:
            events += scheduler.complete(index)
    events += scheduler.end_backward(reduce=bool(order.reduce))
    scheduler.reset()
    return tuple(events)
