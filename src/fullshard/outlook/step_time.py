"""How long a step takes on a calibrated machine: the plan's events, each at its measured cost.

    micro-batch   every unit's traced operations at the rates of their shapes, its messages at those
                  of their sizes; what is exposed comes out of playing the events
    step          all micro-batches, clipping, the update, what the host's loop takes

Ranks of a host that has no core to spare pay for what their messages' threads compute, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fullshard.config.values import DType, GradSync, Transport
from fullshard.outlook.calibration import Calibration, Ceilings
from fullshard.outlook.speed import Times
from fullshard.outlook.timeline import Bar, Cost, Timeline, play
from fullshard.planner.events import Event, EventKind
from fullshard.planner.operations import ATTENTION, MATMUL, Operation, Work
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.units import GroupPlan, UnitPlan

LEAST_BYTES = 64  # of a message that only says that a rank is there


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of the calibrated machine.

    Attributes:
        times: Its parts; they add up.
        bars: Timeline of its last micro-batch.
    """

    times: Times
    bars: tuple[Bar, ...]


def step_time(
    plan: Plan, work: Work, calibration: Calibration, accumulation: int = 1
) -> StepTime | None:
    """Seconds of a step; None where so many ranks were not measured, or are of several hosts.

    Args:
        plan: Plan of the run, with the transport that it will have.
        work: Operations of one micro-batch.
        calibration: Calibration of the machine.
        accumulation: Micro-batches.
    """
    ceilings = calibration.of(plan.mesh.world_size)
    if ceilings is None:
        return None
    costs = _Costs(plan, work, ceilings, calibration.cores)
    last = costs.play(plan.events)
    waits = plan.grad_sync is not GradSync.EVERY_MICRO_BATCH
    early = costs.play([e for e in plan.events if e.kind not in _SYNC]) if waits else last
    update = costs.update_s()
    exposed = last.exposed_s + (accumulation - 1) * early.exposed_s
    step = last.end_s + (accumulation - 1) * early.end_s + update + ceilings.host.step_s
    parts = {name: accumulation * seconds for name, seconds in costs.parts().items()}
    found = Times(
        step=step,
        matmul=parts["matmul"],
        attention=parts["attention"],
        passes=step - sum(parts.values()) - exposed - update - ceilings.host.step_s,
        logits=0.0,
        exposed=exposed,
        launch=parts["launch"] + ceilings.host.step_s,
        update=update,
        bubble=0.0,
    )
    return StepTime(found, last.bars)


_SYNC = frozenset((EventKind.REDUCE, EventKind.ACCUMULATE, EventKind.SETTLE))


class _Costs:
    """What events cost on one rank."""

    def __init__(self, plan: Plan, work: Work, ceilings: Ceilings, cores: int) -> None:
        self._plan, self._ceilings = plan, ceilings
        self._work = {unit.index: work[unit.name] for unit in plan.units if unit.name in work}
        ranks = ceilings.num_ranks
        # Of a message's computing, what finds no idle core: every rank has a thread for messages.
        self._contended = min(1.0, max(0.0, (2 * ranks - cores) / ranks))
        self._transport = plan.transport.value
        if plan.transport is Transport.AUTO:
            self._transport = Transport.DIRECT.value

    def play(self, events: tuple[Event, ...] | list[Event]) -> Timeline:
        """A micro-batch; units that no event names compute at its end."""
        found = play(events, self.of)
        seen = {(event.kind, event.unit) for event in events}
        rest = 0.0
        for index, work in self._work.items():
            if (EventKind.FORWARD, index) not in seen:
                rest += self._compute_s(work.forward, is_backward=False)
            if (EventKind.BACKWARD, index) not in seen:
                rest += self._compute_s(work.backward, is_backward=True)
        return replace(found, end_s=found.end_s + rest)

    def of(self, event: Event, is_backward: bool) -> Cost:  # noqa: FBT001
        """Of one event."""
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
                return self._message("reduce", _reduced_bytes(unit))
            case EventKind.ACCUMULATE if unit is not None:
                return Cost(own_s=self._land_s(unit))
            case EventKind.PUBLISH:
                return Cost(own_s=self._publish_s())
            case EventKind.SETTLE:
                return Cost(own_s=self._settle_s())
            case _:
                return Cost()

    # ---- compute

    def _compute_s(self, done: Mapping[Operation, int], *, is_backward: bool) -> float:
        host = self._ceilings.host
        extra = host.backward_s if is_backward else host.forward_s
        return sum(count * (self._ceilings.seconds(one) + extra) for one, count in done.items())

    def parts(self) -> dict[str, float]:
        """Of a micro-batch, what its kernels and the host take, by what it is spent on."""
        host = self._ceilings.host
        found = {"matmul": 0.0, "attention": 0.0, "launch": 2 * len(self._work) * host.unit_s}
        for work in self._work.values():
            for done, extra in ((work.forward, host.forward_s), (work.backward, host.backward_s)):
                for one, count in done.items():
                    kind = one.kind.partition(" ")[0]
                    if kind in (MATMUL, ATTENTION):
                        found[kind] += count * self._ceilings.seconds(one)
                    found["launch"] += count * extra
        return found

    def _pass_s(self, kind: str, dtype: DType, num_bytes: float) -> float:
        if num_bytes <= 0:
            return 0.0
        return self._ceilings.seconds(Operation(kind, dtype.value, (round(num_bytes),)))

    # ---- messages

    def _message(self, what: str, num_bytes: int, *, own_s: float = 0.0) -> Cost:
        name = f"{self._transport} {what}"
        wire_s = self._ceilings.transfer_s(name, num_bytes)
        processor_s = self._ceilings.transfer_s(f"{name} cpu", num_bytes)
        return Cost(own_s, wire_s, min(wire_s, self._contended * processor_s))

    def _is_sent(self, unit: UnitPlan) -> bool:
        """Whether gradients travel while the rank computes; a shared home's are pulled."""
        return unit.mesh.shard > 1 and self._plan.transport is not Transport.SHARED

    def _gather(self, unit: UnitPlan) -> Cost:
        gathered = [group for group in unit.groups if group.slot is not None]
        own_s = sum(
            self._pass_s("copy", g.dtypes.compute, g.layout.part_numel * _cast_bytes(g))
            for g in gathered
        )
        if unit.mesh.shard == 1 or not gathered:
            return Cost(own_s)
        size = sum(g.layout.numel * ITEMSIZE[g.dtypes.compute] for g in gathered)
        return self._message("fetch", size, own_s=own_s)

    def _publish_s(self) -> float:
        """All ranks meet; each has cast its part where compute is in another dtype."""
        shared = [g for unit in self._plan.units for g in unit.groups if g.shared]
        return self._ceilings.transfer_s("shared fetch", LEAST_BYTES) + sum(
            self._pass_s("copy", g.dtypes.compute, g.layout.part_numel * _cast_bytes(g))
            for g in shared
            if g.dtypes.compute is not g.dtypes.master
        )

    def _land_s(self, unit: UnitPlan) -> float:
        """The sum of this rank's part, over replicas too, and its mean."""
        found = 0.0
        if unit.mesh.shard > 1 and not self._is_sent(unit):
            found += self._ceilings.transfer_s("shared reduce", _reduced_bytes(unit))
        for group in _trained(unit):
            numel = group.layout.part_numel
            accumulate = ITEMSIZE[group.dtypes.accumulate]
            if unit.mesh.shard == 1:  # out of the slot
                found += self._pass_s("copy", group.dtypes.accumulate, 2 * numel * accumulate)
            if unit.mesh.replicate > 1:
                found += self._ceilings.transfer_s("direct replicas", numel * accumulate)
            found += self._pass_s("add", group.dtypes.accumulate, 2 * numel * accumulate)
        return found

    # ---- the end of a step

    def _settle_s(self) -> float:
        """Norms of the gradients, and what the ranks tell each other."""
        norms = sum(
            self._pass_s("norm", g.dtypes.accumulate, g.layout.part_numel * _sum_bytes(g))
            for unit in self._plan.units
            for g in _trained(unit)
        )
        return norms + self._ceilings.transfer_s(f"{self._transport} settle", LEAST_BYTES)

    def update_s(self) -> float:
        """Clipping, which scales all gradients, the optimizer, and averages of the weights.

        AdamW's update was measured; what keeps no state adds the gradient, as averages are added.
        """
        groups = [group for unit in self._plan.units for group in _trained(unit)]
        clip = sum(
            self._pass_s("add", g.dtypes.accumulate, 2 * g.layout.part_numel * _sum_bytes(g))
            for g in groups
        )
        numel, kept = sum(group.layout.part_numel for group in groups), self._plan.optimizer
        sums_s = sum(
            self._pass_s(
                "add", g.dtypes.master, 3 * g.layout.part_numel * ITEMSIZE[g.dtypes.master]
            )
            for g in groups
        )
        found = clip + kept.num_averages * sums_s
        if not kept.element_bytes(1):
            return found + sums_s
        return found + self._ceilings.seconds(Operation("update", "float32", (max(1, numel),)))


def _trained(unit: UnitPlan) -> list[GroupPlan]:
    return [group for group in unit.groups if group.trainable]


def _sum_bytes(group: GroupPlan) -> int:
    return ITEMSIZE[group.dtypes.accumulate]


def _cast_bytes(group: GroupPlan) -> int:
    """Of an element that is read from the master and written to compute with."""
    return ITEMSIZE[group.dtypes.master] + ITEMSIZE[group.dtypes.compute]


def _reduced_bytes(unit: UnitPlan) -> int:
    return sum(g.layout.numel * ITEMSIZE[g.dtypes.reduce] for g in _trained(unit))
