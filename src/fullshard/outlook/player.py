"""Plays a plan's events in time on one rank: the schedule, and the communication not hidden.

    wire      [ gather 1 ][ gather 2 ]        [ gather 1 ]
    rank      [ 0 ]......[ 1 ]..[ 2 ][ 2 ]..........[ 1 ][ 0 ]      ... waits: exposed
    wire                                 [ reduce 2 ]   [ 1 ][ 0 ]

A gather begins when it is issued and the wire is free. A unit begins when its gather has arrived. A
reduction begins when the gradients are complete, and the rank waits for it at its ACCUMULATE event.
The sum over replicas begins there, on its own wire, and the rank waits for it at SETTLE.

The cost of an event comes from one of two tables:

    measured    a unit's traced operations and messages, at the speed that was measured for their
                sizes on a calibrated machine
    divided     the seconds of a step by formula (outlook/speed.py), divided over units by size

A step is its micro-batches, clipping, the update, and the overhead of the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fullshard.config.values import GradSync, TransportKind
from fullshard.outlook.devices import Calibration, Ceilings
from fullshard.outlook.speed import Times, traffic
from fullshard.outlook.workload import Workload
from fullshard.planner.memory import MemoryRow
from fullshard.planner.plan import Plan
from fullshard.planner.schedule import Event, EventKind
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.tracing import Operation, TensorKind, Work
from fullshard.planner.units import GroupPlan, UnitPlan


class Lane(StrEnum):
    """A row of the schedule: the rank's passes and its wires."""

    GATHER = "gather"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OUTER = "replicas"


@dataclass(frozen=True, slots=True)
class Bar:
    """One unit's bar in a lane, in seconds from the beginning of the micro-batch."""

    lane: Lane
    unit: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an event.

    Attributes:
        own_s: Time that the rank works, before its message starts.
        wire_s: Time of the message on the wire.
        beside_s: Processor time of the message's thread, which delays the rank's work.
    """

    own_s: float = 0.0
    wire_s: float = 0.0
    beside_s: float = 0.0


# The cost of an event; the flag says whether it belongs to a backward.
CostOf = Callable[[Event, bool], Cost]


def play(events: Iterable[Event], cost_of: CostOf, *, issues_ahead: bool = False) -> Timeline:
    """Plays events in their order.

    Args:
        events: Events of a micro-batch.
        cost_of: Returns the cost of an event.
        issues_ahead: Whether the host issues work ahead of the device. A prefetch is then issued
            when the unit before begins, not when it ends, and the rank never waits to accumulate.
    """
    found = Timeline(cost_of, issues_ahead=issues_ahead)
    for event in events:
        found.take(event)
    found.wait(max(found.wires.values()))
    return found


class Timeline:
    """The schedule of a micro-batch: the clocks of a rank and its wires.

    Attributes:
        bars: Bars in the order of events.
        end_s: Time at which the rank finishes its last event.
        exposed_s: Time that the rank waited for messages.
        wires: Time from which each wire is free.
    """

    def __init__(self, cost_of: CostOf, *, issues_ahead: bool) -> None:
        self._cost_of, self._ahead = cost_of, issues_ahead
        self.end_s = self.exposed_s = 0.0
        self._begun = 0.0  # when the last unit began
        self.wires = {Lane.GATHER: 0.0, Lane.REDUCE: 0.0, Lane.OUTER: 0.0}
        self._there: dict[int, float] = {}
        self._landed: dict[int, float] = {}
        self._is_backward = False
        self.bars: list[Bar] = []

    def take(self, event: Event) -> None:
        """Plays one event."""
        cost = self._cost_of(event, self._is_backward or event.kind is EventKind.BACKWARD)
        match event.kind:
            case EventKind.GATHER:
                self._there[event.unit] = self._send(Lane.GATHER, event, cost)
            case EventKind.FORWARD | EventKind.BACKWARD:
                self._is_backward = event.kind is EventKind.BACKWARD
                self.wait(self._there.get(event.unit, 0.0))
                self._begun = self.end_s
                self.end_s += cost.own_s
                self.bars.append(Bar(Lane(event.kind), event.unit, self._begun, self.end_s))
            case EventKind.REDUCE:
                self._landed[event.unit] = self._send(Lane.REDUCE, event, cost)
            case EventKind.ACCUMULATE:
                if not self._ahead:
                    self.wait(self._landed.get(event.unit, 0.0))
                if cost.wire_s:
                    self._send(Lane.OUTER, event, cost)
                else:
                    self.end_s += cost.own_s
            case EventKind.SETTLE:
                self.wait(self.wires[Lane.OUTER])
                self.end_s += cost.own_s
            case _:
                self.end_s += cost.own_s

    def _send(self, lane: Lane, event: Event, cost: Cost) -> float:
        """Starts a message and returns its arrival time."""
        self.end_s += cost.own_s
        issued = self._begun if self._ahead and lane is Lane.GATHER else self.end_s
        start = max(self.wires[lane], issued)
        end = self.wires[lane] = start + cost.wire_s
        self.end_s += cost.beside_s
        self.bars.append(Bar(lane, event.unit, start, end))
        return end

    def wait(self, until: float) -> None:
        """Waits for a message."""
        self.exposed_s += max(0.0, until - self.end_s)
        self.end_s = max(self.end_s, until)


# ---- measured costs ------------------------------------------------------------------------------

LEAST_BYTES = 64  # size of a message that only synchronizes
_SYNC = frozenset((EventKind.REDUCE, EventKind.ACCUMULATE, EventKind.SETTLE))


def step_time(
    plan: Plan, work: Work, calibration: Calibration, accumulation: int = 1
) -> tuple[Times, tuple[Bar, ...]] | None:
    """Returns seconds of a step by cause, and bars of its last micro-batch.

    None if the calibration lacks this number of ranks.

    Args:
        plan: Plan of the run, with its transport resolved.
        work: Operations of one micro-batch.
        calibration: Calibration of the machine.
        accumulation: Micro-batches per step.
    """
    ceilings = calibration.of(plan.mesh.world_size)
    if ceilings is None:
        return None
    costs = _Measured(plan, work, ceilings, calibration.cores)
    last = costs.play(plan.events)
    waits = plan.grad_sync is not GradSync.EVERY_MICRO_BATCH
    early = costs.play([e for e in plan.events if e.kind not in _SYNC]) if waits else last
    update = costs.update_s()
    exposed = last.exposed_s + (accumulation - 1) * early.exposed_s
    step = last.end_s + (accumulation - 1) * early.end_s + update + ceilings.host.step_s
    launch = accumulation * costs.launch_s() + ceilings.host.step_s
    kernels = step - exposed - launch - update
    return Times(step, kernels, exposed, launch, update, bubble=0.0), tuple(last.bars)


class _Measured:
    """Costs of events on one rank of a calibrated machine.

    If the host has no idle core, the threads of messages use processor time of the ranks.
    """

    def __init__(self, plan: Plan, work: Work, ceilings: Ceilings, cores: int) -> None:
        self._plan, self._ceilings = plan, ceilings
        self._work = {unit.index: work[unit.name] for unit in plan.units if unit.name in work}
        ranks = ceilings.num_ranks
        # Share of messages' processor time without an idle core: each rank has a message thread.
        self._contended = min(1.0, max(0.0, (2 * ranks - cores) / ranks))
        self._transport = plan.transport.value
        if plan.transport is TransportKind.AUTO:
            self._transport = TransportKind.DIRECT.value

    def play(self, events: Sequence[Event]) -> Timeline:
        """Plays a micro-batch; units without events compute at its end."""
        found = play(events, self.of)
        seen = {(event.kind, event.unit) for event in events}
        rest = 0.0
        for index, work in self._work.items():
            if (EventKind.FORWARD, index) not in seen:
                rest += self._compute_s(work.forward, is_backward=False)
            if (EventKind.BACKWARD, index) not in seen:
                rest += self._compute_s(work.backward, is_backward=True)
        found.end_s += rest
        return found

    def of(self, event: Event, is_backward: bool) -> Cost:  # noqa: FBT001
        """Returns the cost of one event."""
        unit = self._plan.units[event.unit] if event.unit >= 0 else None
        match event.kind:
            case EventKind.FORWARD | EventKind.BACKWARD:
                work = self._work.get(event.unit)
                done = work and (work.backward if is_backward else work.forward)
                seconds = self._compute_s(done or {}, is_backward=is_backward)
                return Cost(own_s=seconds + self._ceilings.host.unit_s)
            case EventKind.GATHER if unit is not None:
                return self._gather(unit)
            case EventKind.REDUCE if unit is not None and self._is_sent(unit):
                return self._message(f"{self._transport} reduce", _reduced_bytes(unit))
            case EventKind.ACCUMULATE if unit is not None:
                return self._land(unit)
            case EventKind.PUBLISH:
                return Cost(own_s=self._publish_s())
            case EventKind.SETTLE:  # norms of gradients, and the small all-reduce
                norms = self._passes_s("norm", self._all_trained(), "accumulate")
                settle = self._ceilings.transfer_s(f"{self._transport} settle", LEAST_BYTES)
                return Cost(own_s=norms + settle)
            case _:
                return Cost()

    # ---- compute

    def _compute_s(self, done: Mapping[Operation, int], *, is_backward: bool) -> float:
        host = self._ceilings.host
        extra = host.backward_s if is_backward else host.forward_s
        return sum(count * (self._ceilings.seconds(one) + extra) for one, count in done.items())

    def launch_s(self) -> float:
        """Returns the seconds of the host's overhead in a micro-batch."""
        host, found = self._ceilings.host, 0.0
        for work in self._work.values():
            found += 2 * host.unit_s
            found += host.forward_s * sum(work.forward.values())
            found += host.backward_s * sum(work.backward.values())
        return found

    def _passes_s(self, kind: str, groups: Iterable[GroupPlan], *dtypes: str) -> float:
        """Seconds of elementwise passes over this rank's shards.

        Args:
            kind: TensorKind of the operation.
            groups: Flat buffers of units.
            dtypes: Dtypes of the tensors that are read or written, as fields of the contract; the
                last one is the dtype of the computation.
        """
        found = 0.0
        for group in groups:
            each = [getattr(group.dtypes, name) for name in dtypes]
            num_bytes = group.layout.part_numel * sum(ITEMSIZE[dtype] for dtype in each)
            if num_bytes:
                found += self._ceilings.seconds(Operation(kind, each[-1].value, (num_bytes,)))
        return found

    # ---- messages

    def _message(self, name: str, num_bytes: int, *, own_s: float = 0.0) -> Cost:
        wire_s = self._ceilings.transfer_s(name, num_bytes)
        processor_s = self._ceilings.transfer_s(f"{name} cpu", num_bytes)
        return Cost(own_s, wire_s, min(wire_s, self._contended * processor_s))

    def _is_sent(self, unit: UnitPlan) -> bool:
        """Whether a reduction overlaps the rank's work; in a shared home it does not."""
        return unit.mesh.shard > 1 and self._plan.transport is not TransportKind.SHARED

    def _gather(self, unit: UnitPlan) -> Cost:
        gathered = [group for group in unit.groups if group.slot is not None]
        own_s = self._passes_s("copy", gathered, "master", "compute")
        if not gathered or not self._is_sent(unit):  # other ranks' parts are copied, too
            return Cost(own_s * unit.mesh.shard)
        size = sum(g.layout.numel * ITEMSIZE[g.dtypes.compute] for g in gathered)
        return self._message(f"{self._transport} fetch", size, own_s=own_s)

    def _publish_s(self) -> float:
        """Seconds of a barrier, and of the cast to the compute dtype."""
        cast = [
            group
            for group in self._plan.groups
            if group.shared and group.dtypes.compute is not group.dtypes.master
        ]
        meeting_s = self._ceilings.transfer_s("shared fetch", LEAST_BYTES)
        return meeting_s + self._passes_s("copy", cast, "master", "compute")

    def _land(self, unit: UnitPlan) -> Cost:
        """The accumulation of this rank's part, and the message of the sum over replicas."""
        found, outer_bytes = 0.0, 0
        if unit.mesh.shard > 1 and not self._is_sent(unit):
            found += self._ceilings.transfer_s("shared reduce", _reduced_bytes(unit))
        for group in _trained(unit):
            if unit.mesh.shard == 1:  # copied out of the slot
                found += self._passes_s("copy", [group], "accumulate", "accumulate")
            outer_bytes += group.layout.part_numel * ITEMSIZE[group.dtypes.accumulate]
            found += self._passes_s("add", [group], "accumulate", "accumulate")
        if unit.mesh.replicate == 1:
            return Cost(found)
        return self._message("direct replicas", outer_bytes, own_s=found)

    # ---- the end of a step

    def update_s(self) -> float:
        """Returns the seconds of clipping, the optimizer, and averages of the weights.

        AdamW's update was measured. An optimizer without states costs one sum.
        """
        groups, kept = self._all_trained(), self._plan.optimizer
        clip = self._passes_s("add", groups, "accumulate", "accumulate")
        sums_s = self._passes_s("add", groups, "master", "master", "master")
        found = clip + kept.num_averages * sums_s
        if not kept.element_bytes(1):
            return found + sums_s
        numel = max(1, sum(group.layout.part_numel for group in groups))
        return found + self._ceilings.seconds(Operation("update", "float32", (numel,)))

    def _all_trained(self) -> list[GroupPlan]:
        return [group for group in self._plan.groups if group.trainable]


def _trained(unit: UnitPlan) -> list[GroupPlan]:
    return [group for group in unit.groups if group.trainable]


def _reduced_bytes(unit: UnitPlan) -> int:
    return sum(g.layout.numel * ITEMSIZE[g.dtypes.reduce] for g in _trained(unit))


# ---- divided costs -------------------------------------------------------------------------------

BACKWARD_SHARE = 2 / 3  # of a unit's work, without recompute
NOTICED = 0.01  # of a micro-batch's time: shorter bars are invisible in a figure


def divided_bars(plan: Plan, run: Workload, times: Times) -> tuple[Bar, ...]:
    """Returns the bars of one micro-batch whose times come from formulas."""
    gather_s, regather_s, reduce_s, once_s = traffic(run)
    total = sum(unit.numel for unit in plan.units) or 1
    share = [unit.numel / total for unit in plan.units]
    again = run.kernels.recompute / 3
    work = (times.work + times.launch) / (run.batch.accumulation * (1 + again))
    forward_s, backward_s = work * (1 - BACKWARD_SHARE), work * (BACKWARD_SHARE + again)

    def cost_of(event: Event, is_backward: bool) -> Cost:  # noqa: FBT001
        part = share[event.unit] if event.unit >= 0 else 0.0
        match event.kind:
            case EventKind.GATHER:
                return Cost(wire_s=part * (regather_s if is_backward else gather_s))
            case EventKind.FORWARD | EventKind.BACKWARD:
                return Cost(own_s=part * (backward_s if is_backward else forward_s))
            case EventKind.REDUCE:
                return Cost(wire_s=part * (reduce_s + once_s))
            case _:
                return Cost()

    return tuple(play(plan.events, cost_of, issues_ahead=True).bars)


class HeldAt(NamedTuple):
    """Memory besides state at a time: bytes by kind."""

    time_s: float
    held: Mapping[TensorKind, float]


def held_over_time(rows: Iterable[MemoryRow], bars: Sequence[Bar]) -> list[HeldAt]:
    """Return the memory besides state over the time of a micro-batch.

    Activations grow during forward and shrink during backward. Logits and temporary gradients exist
    from the end of forward until the backward of the loss ends.
    """
    sizes = {row.name: float(row.num_bytes) for row in rows}
    forward = [bar for bar in bars if bar.lane is Lane.FORWARD and bar.end_s > bar.start_s]
    backward = [bar for bar in bars if bar.lane is Lane.BACKWARD and bar.end_s > bar.start_s]
    if not forward or not backward:
        return []
    turn, end = forward[-1].end_s, backward[-1].end_s
    # The root's backward may have no duration: logits are freed after the first visible bar.
    gone = next((bar.end_s for bar in backward if bar.end_s - turn > NOTICED * end), end)
    left = max(end - gone, 1e-12)

    def at(time_s: float, share: float, *, at_loss: bool = False) -> HeldAt:
        held = {kind: at_loss * sizes.get(kind, 0.0) for kind in TensorKind}
        return HeldAt(
            time_s, held | {TensorKind.ACTIVATIONS: share * sizes.get(TensorKind.ACTIVATIONS, 0.0)}
        )

    return [
        at(0.0, 0.0),
        *(at(bar.end_s, bar.end_s / turn) for bar in forward),
        at(turn, 1.0, at_loss=True),
        at(gone, 1.0, at_loss=True),
        *(at(bar.end_s, (end - bar.end_s) / left) for bar in backward if bar.end_s >= gone),
    ]
