"""The actions of a step as data, and the state machine that gathers, releases and reduces units.

It is pure: it moves no bytes. Whatever records an engine's actions implements `Recorder`.

The engine's hooks call the `Scheduler` ("layers.3 is entered"), which returns the events that
follow. The planner drives the same machine with the nominal order. A plan's event list and the
engine's therefore come from the same code, and no collective depends on which rank's hook fires
first.

    forward   enter(i):  GATHER i unless it is gathered, GATHER i+1 .. i+depth, FORWARD i
              leave(i):  RELEASE i, unless it is used again before its slot is needed
    backward  enter(i):  RELEASE finished units, GATHER i, GATHER i-1 .. i-depth, BACKWARD i
              complete(i):  REDUCE i in plan order, ACCUMULATE the reduction before it

[Note: catching up]
Gathers and reductions are issued in plan order. If this rank skipped units before unit j, entering
j first issues their gathers, prefetches and reductions, because other ranks may use these units.
The end of the root's forward, and of backward, does the same for the remaining units. So all ranks
issue one sequence, and no rank waits for a collective that a peer issues later. A unit that the
order does not expect is gathered on demand, and the order is learned from the first step (see
`engine/step.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from fullshard.errors import SlotError
from fullshard.planner.units import UnitPlan, ancestors_of

# ---- events


class EventKind(StrEnum):
    """One action of the engine on one unit.

    PUBLISH: Every rank's part of a shared home is written; before a forward, and before a backward
        or a unit inside a forward if weights were written.
    GATHER: The all-gather of the unit into its slot is issued; on one rank the slot is filled.
    FORWARD: The unit's forward begins; its slot contains the weights.
    RELEASE: The slot may be used by another unit; under poison it is filled with NaN.
    BACKWARD: The unit's backward begins; its slot contains the weights.
    REDUCE: All gradients of the unit are in its gradient slot; the reduction is issued.
    ACCUMULATE: The reduction is complete and the gradient slot free; its part replaces the gradient
        shard or is added to it, later if replicas or a copy to the host are awaited.
    DEFER: The unit's gradients stay on this rank, unreduced (`no_sync`).
    SPILL: Gradients arrived out of order and use a buffer; never in a plan.
    SETTLE: Backward ends; touched bits and squared norms are summed over ranks.
    """

    PUBLISH = "publish"
    GATHER = "gather"
    FORWARD = "forward"
    RELEASE = "release"
    BACKWARD = "backward"
    REDUCE = "reduce"
    ACCUMULATE = "accumulate"
    DEFER = "defer"
    SPILL = "spill"
    SETTLE = "settle"


class Sync(StrEnum):
    """How a backward reduces its gradients.

    ALL: They are summed over both axes of the mesh.
    INNER: They are summed over the shard axis; the sum over replicas waits for a later backward.
    NONE: They stay on this rank.
    """

    ALL = "all"
    INNER = "inner"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Event:
    """One action.

    Attributes:
        kind: Kind of the action.
        unit: Index of the unit in the plan; -1 for the whole model.
        num_bytes: Bytes that this rank receives; 0 for local actions.
    """

    kind: EventKind
    unit: int
    num_bytes: int = 0


class Recorder(Protocol):
    """Receives every action of an engine; `observe` implements it."""

    def begin(self, event: Event, step: int) -> None:
        """Called when the action begins; it may wait for other ranks."""
        ...

    def record(self, event: Event, step: int) -> None:
        """Called when the action is done."""
        ...


@lru_cache(maxsize=65536)
def event_of(kind: EventKind, unit: int, num_bytes: int = 0) -> Event:
    """Returns a cached event, since every step has the same thousands of events."""
    return Event(kind, unit, num_bytes)


# ---- the order of units

ROOT = 0  # the root's index


@dataclass(frozen=True, slots=True)
class Depths:
    """Numbers of units that are gathered ahead."""

    forward: int = 1
    backward: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which units compute and reduce.

    Attributes:
        forward: Units in the order of forward, with repetitions.
        backward: Units in the order of backward, with repetitions.
        reduce: Trainable units in the order in which their gradients become complete.
        learned: Whether the order was recorded in a real step.
        unused: Units that did not compute in it; every rank gathers them, as others may use them.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduce: tuple[int, ...]
    learned: bool = False
    unused: tuple[int, ...] = field(default=(), metadata={"omitted": ()})


def registration_order(units: Sequence[UnitPlan]) -> Order:
    """Returns the order of registration for forward, and its reverse for backward.

    Backward enters the units from the last to the first trainable one. A unit's own parameters are
    assumed to be used after those of the units inside it.
    """
    forward = tuple(unit.index for unit in units)
    left = [index for what, index in nominal_trace(units, forward) if what == "leave"]
    first = next((at for at, index in enumerate(left) if units[index].trainable), len(left))
    return Order(forward, tuple(reversed(left[first:])), reduce_order(units, forward))


def reduce_order(units: Sequence[UnitPlan], forward: Sequence[int]) -> tuple[int, ...]:
    """Returns trainable units in reverse order of their first use; unused units are last."""
    entered = list(dict.fromkeys(forward))
    order = dict.fromkeys([*reversed(entered), *range(len(units))])
    return tuple(index for index in order if units[index].trainable)


def nominal_trace(units: Sequence[UnitPlan], entered: Sequence[int]) -> list[tuple[str, int]]:
    """Returns ("enter" | "leave", unit) for a pass in which units nest as modules do."""
    trace: list[tuple[str, int]] = []
    stack: list[int] = []
    for index in entered:
        while stack and stack[-1] not in ancestors_of(units, units[index]):
            trace.append(("leave", stack.pop()))
        trace.append(("enter", index))
        stack.append(index)
    trace.extend(("leave", index) for index in reversed(stack))
    return trace


# ---- the state machine


class Scheduler:
    """Returns the events that follow from the actions of a model, on one rank."""

    def __init__(self, units: Sequence[UnitPlan], order: Order, depths: Depths) -> None:
        self.units = tuple(units)
        self._depths = depths
        self._reduce_bytes = {
            Sync.ALL: [sum(g.reduce_bytes(u.mesh.replicate) for g in u.groups) for u in units],
            Sync.INNER: [sum(g.reduce_bytes(1) for g in u.groups) for u in units],
        }
        self._ancestors = [ancestors_of(units, unit) for unit in units]
        self._reduces = set(order.reduce)
        self._last_forward = {unit: at for at, unit in enumerate(order.forward)}
        self._first_forward = {unit: order.forward.index(unit) for unit in set(order.forward)}
        self.follow(order)
        sharing = [u.index for u in units if any(group.shared for group in u.groups)]
        self._shares = {around for u in sharing for around in (u, *self._ancestors[u])}
        self.reset()
        needed = {i for i in order.backward if units[i].reads_weight_in_backward}
        # Units that are still in their slots when backward needs them.
        self._keep = self._table.last_holders(order.forward) & needed

    def reset(self) -> None:
        """Forgets all gathered units and passes in progress."""
        self._table = SlotTable(self.units)
        # `SlotTable.is_gathered` of this table, without a second call in the hot path.
        self.is_gathered: Callable[[int], bool] = self._table.is_gathered
        self._outstanding: deque[int] = deque()
        # Of the pass: units gathered or prefetched so far, units passed, units reduced.
        self._issued = self._position = self._reduced = 0
        self._in_forward = 0, 0  # the forward's issued and position while a backward runs
        self._retains, self._sync, self._reduces_any = False, Sync.ALL, True

    def follow(self, order: Order) -> None:
        """Use another order, with the same forwards."""
        self.order = order
        self._last_backward = {unit: at for at, unit in enumerate(order.backward)}

    def unplanned(self) -> dict[int, bool]:
        """Units without a planned backward, in the order of one; whether a graph contains each."""
        trace = nominal_trace(self.units, self.order.forward)
        left = dict.fromkeys(unit for what, unit in reversed(trace) if what == "leave")
        reads = (unit for unit in left if self._reads(unit, backward=True))
        uses = self._table.pending_uses
        return {unit: uses[unit] > 0 for unit in reads if unit not in self._last_backward}

    # ---- forward

    def begin_forward(self, unit: int = ROOT, *, stale: bool = True) -> list[Event]:
        """Begins a forward of the whole model, or of a single unit.

        Args:
            unit: The outermost unit.
            stale: Whether shards may have been written since units were gathered.
        """
        if stale or unit == ROOT:
            self._table.clear()
        self._issued = self._position = self._first_forward.get(unit, len(self.order.forward))
        return self.publish(unit)

    def publish(self, unit: int = ROOT) -> list[Event]:
        """Returns PUBLISH if the unit, or a unit inside it, is in a shared home."""
        return [event_of(EventKind.PUBLISH, -1)] if unit in self._shares else []

    def see_writes(self) -> list[Event]:
        """Apply writes made inside a forward: to open units now, to others when they are used.

        The plan has no such events: FORWARD is repeated for open units. Gathers of a recompute and
        of a unit that the order does not expect are not in the plan either.
        """
        self._table.clear()
        events = self.publish()
        for unit in [unit for unit, count in enumerate(self._table.open) if count]:
            self._table.gather(unit, events)
            events.append(event_of(EventKind.FORWARD, unit))
        return events

    def enter_forward(self, unit: int) -> list[Event]:
        """Begins the unit's forward."""
        events: list[Event] = []
        self._walk(unit, events)
        self._table.enter(unit)
        self._table.open[unit] += 1
        events.append(event_of(EventKind.FORWARD, unit))
        return events

    def leave_forward(self, unit: int, *, training: bool, keeps: bool = True) -> list[Event]:
        """Ends the unit's forward.

        Args:
            unit: The unit.
            training: Whether a backward may enter it.
            keeps: Whether units may stay in their slots for a backward, which other ranks may make
                through units that are frozen on this rank's way. Equal on all ranks.
        """
        events: list[Event] = []
        self._table.open[unit] -= 1
        if training:
            self._table.pending_uses[unit] += 1
        if unit == ROOT:
            self._catch_up(events, backward=False)
        if unit == ROOT and not keeps:
            return events + self._table.release_all()
        kept = keeps and unit in self._keep
        again = self._last_forward.get(unit, -1) >= self._position
        if kept or again or self._table.open[unit]:
            return events
        return events + self._table.release(unit)

    # ---- recompute

    def enter_recompute(self, unit: int) -> list[Event]:
        """Begins a recomputed forward of the unit inside backward."""
        events: list[Event] = []
        self._table.gather(unit, events, recompute=True)
        self._table.enter(unit)
        self._table.open[unit] += 1
        return events

    def leave_recompute(self, unit: int) -> None:
        """Ends a recomputed forward; the unit stays gathered for its backward."""
        self._table.open[unit] -= 1

    # ---- backward

    def begin_backward(
        self,
        nothing_expected: Collection[int],
        *,
        sync: Sync = Sync.ALL,
        retains: bool = False,
        stale: bool = False,
        reduce: bool = True,
    ) -> None:
        """Begin a backward.

        Args:
            nothing_expected: Units that get no gradient from it on this rank.
            sync: How its gradients are reduced.
            retains: Whether its graph stays for another backward.
            stale: Whether shards have been written since units were gathered.
            reduce: False if it reaches no parameter.
        """
        if stale:
            self._table.clear()
        self._sync, self._retains = sync, retains
        self._in_forward = self._issued, self._position
        self._table.begun.clear()
        self._table.complete = set(nothing_expected)
        self._outstanding.clear()
        self._issued = self._position = 0
        self._reduces_any, self._reduced = reduce, 0 if reduce else len(self.order.reduce)
        if any(self._table.open):  # inside a forward: gather on demand
            self._issued = self._position = len(self.order.backward)

    def enter_backward(self, unit: int) -> list[Event]:
        """Begins the unit's backward: a gradient of one of its outputs has arrived."""
        events: list[Event] = []
        left = self._table.pending_uses[unit] - (not self._retains)
        self._table.pending_uses[unit] = max(0, left)  # two backwards may enter one use
        self._retire(unit, events)
        self._table.begun.add(unit)
        self._walk(unit, events, backward=True)
        self._table.enter(unit)
        events.append(event_of(EventKind.BACKWARD, unit))
        return events

    def enter_nested(self, unit: int) -> list[Event]:
        """Begins the unit's backward inside of another backward, which waits for it."""
        events: list[Event] = []
        if self._reads(unit, backward=True):
            self._table.gather(unit, events, inner=True)
        return events

    def complete(self, unit: int) -> list[Event]:
        """The last expected gradient of the unit is in its gradient slot."""
        self._table.complete.add(unit)
        return self._drain(force=False)

    def end_backward(self) -> list[Event]:
        """Ends a backward: reduces the remaining units in plan order and releases all units."""
        events: list[Event] = []
        self._table.begun.clear()
        if self._reduces_any:
            self._catch_up(events, backward=True)
            events += self._drain(force=True)
        while self._outstanding:
            self._accumulate(events)
        events += self._table.release_all()
        self._issued, self._position = self._in_forward  # a forward may be in progress
        if self._reduces_any and self._sync is Sync.ALL:  # sums of INNER wait for such a backward
            events.append(event_of(EventKind.SETTLE, -1))
        return events

    def abandon_backward(self) -> list[Event]:
        """End a backward that raised; return the events for which other ranks wait."""
        self._table.open = [0] * len(self.units)
        needed = (EventKind.GATHER, EventKind.RELEASE, EventKind.REDUCE, EventKind.ACCUMULATE)
        return [event for event in self.end_backward() if event.kind in needed]

    # ---- inside

    def _walk(self, unit: int, events: list[Event], *, backward: bool = False) -> None:
        """Catches up, gathers the unit and prefetches. See [Note: catching up]."""
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
        """Issues the collectives of the next unit, which every rank issues, used or not."""
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
            self._table.enter(unit)  # its slot may be taken, as after a use
            events += self._drain(force=False) if backward else []

    def _catch_up(self, events: list[Event], *, backward: bool) -> None:
        """Issues the collectives of the remaining units, which other ranks may need."""
        order = self.order.backward if backward else self.order.forward
        while self._position < len(order):
            self._pass(order, events, backward=backward)

    def _gather(self, unit: int, events: list[Event], *, backward: bool) -> None:
        if self._reads(unit, backward=backward):
            self._table.gather(unit, events)

    def _reads(self, unit: int, *, backward: bool) -> bool:
        """Whether the unit reads its weights in this pass."""
        return not backward or self.units[unit].reads_weight_in_backward

    def _retire(self, unit: int, events: list[Event]) -> None:
        """Releases the units whose backward is over when another unit's begins."""
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
                self._accumulate(events)
        return events

    def _accumulate(self, events: list[Event]) -> None:
        events.append(event_of(EventKind.ACCUMULATE, self._outstanding.popleft()))


def simulate_step(scheduler: Scheduler) -> tuple[Event, ...]:
    """Returns the events of one training step in the planned order."""
    scheduler.reset()
    units, order = scheduler.units, scheduler.order
    events = scheduler.begin_forward()
    forward, backward = (
        [i for i in x if i not in order.unused] for x in (order.forward, order.backward)
    )
    for what, index in nominal_trace(units, forward):
        if what == "enter":
            events += scheduler.enter_forward(index)
        else:
            events += scheduler.leave_forward(index, training=True)
    uses = Counter(backward)
    unused = [unit.index for unit in units if not uses[unit.index]]
    scheduler.begin_backward(unused, reduce=bool(order.reduce))
    for what, index in nominal_trace(units, backward):
        if what == "enter":
            events += scheduler.enter_backward(index)
            continue
        uses[index] -= 1
        if not uses[index] and units[index].trainable:
            events += scheduler.complete(index)
    events += scheduler.end_backward()
    scheduler.reset()
    return tuple(events)


# ---- the units in the slots ----------------------------------------------------------------------

Slot = tuple[str, int]


def slot_of(unit: UnitPlan) -> Slot | None:
    """Returns the unit's slot; None if it reads its master."""
    for group in unit.groups:
        if group.slot is not None:
            return group.slot.ring.rpartition(".")[0], group.slot.index
    return None


class SlotTable:
    """The unit in each slot.

    Attributes:
        open: Number of forwards in progress, by unit; forwards nest.
        begun: Units whose backward is in progress.
        complete: Units whose expected gradients have all arrived.
        pending_uses: Number of forwards without a backward yet, by unit.
    """

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self._units = units
        self._slots = [slot_of(unit) for unit in units]
        self._gather_bytes = [sum(g.gather_bytes() for g in u.groups) for u in units]
        self._holder: dict[Slot, int] = {}
        self._waiting: set[int] = set()  # prefetched, not yet entered
        self.open = [0] * len(units)
        self.begun: set[int] = set()
        self.complete: set[int] = set()
        self.pending_uses: Counter[int] = Counter()

    def clear(self) -> None:
        """Empties every slot, because the weights may have changed."""
        self._holder.clear()
        self._waiting.clear()

    def is_gathered(self, unit: int) -> bool:
        """Whether the unit's weights are available: gathered, or read from the master."""
        slot = self._slots[unit]
        return slot is None or self._holder.get(slot) == unit

    def enter(self, unit: int) -> None:
        """Notes that the unit is used now and no longer waits."""
        self._waiting.discard(unit)

    def gather(
        self, unit: int, events: list[Event], *, recompute: bool = False, inner: bool = False
    ) -> None:
        """Puts the unit into its slot.

        Args:
            unit: The unit that is needed now.
            events: Receives a GATHER unless the slot already contains the unit.
            recompute: Whether a recompute needs it; an evicted unit's own recompute gathers again.
            inner: Whether an inner backward needs it; backwards in progress continue after it.

        Raises:
            SlotError: The unit in the slot is computing (law 5).
        """
        slot = self._slots[unit]
        if slot is None or self._holder.get(slot) == unit:
            return
        holder = self._holder.get(slot, -1)
        if holder >= 0:
            under_way = holder in self.begun and holder not in self.complete
            last_use = under_way and self.pending_uses[holder] <= 0
            continues = inner and holder in self.begun
            if self.open[holder] or continues or (last_use and not recompute):
                raise SlotError(
                    f"{self._units[unit].title}: expected its slot to be free; it contains "
                    f"{self._units[holder].title}, which is computing. Put both into one unit "
                    "(wrap), use shard_grad_op, enter torch.autocast for each forward, compute "
                    "units in one thread, or call the model outside of its own backward."
                )
        self._take(slot, unit, events)

    def look_ahead(self, unit: int, current: int, events: list[Event]) -> bool:
        """Prefetches a unit into its slot; returns False if the slot is in use."""
        slot = self._slots[unit]
        if slot is None:
            return True
        if self._holder.get(slot) == unit:
            self._waiting.add(unit)  # not to be evicted before its use
            return True
        holder = self._holder.get(slot, -1)
        in_use = holder in self._waiting or holder in self.begun or holder == current
        if holder >= 0 and (in_use or self.open[holder]):
            return False
        self._take(slot, unit, events)
        self._waiting.add(unit)
        return True

    def release(self, unit: int) -> list[Event]:
        """Empties the unit's slot if the unit is in it and its forward is over."""
        slot = self._slots[unit]
        if slot is None or self._holder.get(slot) != unit or self.open[unit]:
            return []
        del self._holder[slot]
        return [event_of(EventKind.RELEASE, unit)]

    def release_all(self) -> list[Event]:
        """Empties every slot except those of forwards in progress."""
        over = [unit for unit in sorted(self._holder.values()) if not self.open[unit]]
        self._waiting.clear()
        return [event for unit in over for event in self.release(unit)]

    def last_holders(self, order: Sequence[int]) -> set[int]:
        """Returns the units that are in slots after all units of `order` were gathered."""
        last = {self._slots[unit]: unit for unit in order}
        return {unit for slot, unit in last.items() if slot is not None}

    def _take(self, slot: Slot, unit: int, events: list[Event]) -> None:
        self._waiting.discard(self._holder.get(slot, -1))
        self._holder[slot] = unit
        events.append(event_of(EventKind.GATHER, unit, self._gather_bytes[unit]))
