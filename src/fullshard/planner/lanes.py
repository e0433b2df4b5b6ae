"""A plan's events laid out in time, and what is held meanwhile: what figures are drawn of.

    gather    [ 0 ][ 1 ][ 2 ]   [ 1 ][ 0 ]
    compute        [ 0 ][ 1 ][ 2 ][ 2 ][ 1 ][ 0 ]
    reduce                            [ 2 ][ 1 ][ 0 ]

Durations are the forecast's, shared out over units by their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fullshard.planner.activations import Kind
from fullshard.planner.events import EventKind
from fullshard.planner.forecast.speed import traffic
from fullshard.planner.outlook import Machine, Outlook, workload

BACKWARD_SHARE = 2 / 3  # of a unit's work, without recompute
NOTICED = 0.01  # of a micro-batch's time: shorter is not seen in a figure


class Lane(StrEnum):
    """What works at a time."""

    GATHER = "gather"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Bar:
    """One unit's turn, in seconds from the step's begin."""

    lane: Lane
    unit: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at a time beside state: bytes by the row's name."""

    time_s: float
    held: Mapping[Kind, float]


def lay_out(outlook: Outlook, machine: Machine) -> list[Bar]:
    """The bars of one micro-batch; empty where nothing is known of the device."""
    times = outlook.times
    if times is None:
        return []
    run = workload(outlook.plan, outlook.config, outlook.job, machine)
    gather_s, regather_s, reduce_s, once_s = traffic(run)
    units = outlook.plan.units
    total = sum(unit.numel for unit in units) or 1
    share = [unit.numel / total for unit in units]
    again = run.kernels.recompute / 3
    work = times.matmul + times.attention + times.passes + times.logits + times.launch
    work /= run.batch.accumulation * (1 + again)
    cost = {
        EventKind.FORWARD: work * (1 - BACKWARD_SHARE),
        EventKind.BACKWARD: work * (BACKWARD_SHARE + again),
        EventKind.REDUCE: reduce_s + once_s,
    }
    free = {"wire": 0.0, "compute": 0.0, "reduce": 0.0}
    there = dict.fromkeys(range(len(units)), 0.0)
    is_backward = False
    bars: list[Bar] = []
    for event in outlook.plan.events:
        unit = event.unit
        match event.kind:
            case EventKind.GATHER:
                start = max(free["wire"], _begun(bars))
                end = start + share[unit] * (regather_s if is_backward else gather_s)
                free["wire"] = there[unit] = end
                lane = Lane.GATHER
            case EventKind.FORWARD | EventKind.BACKWARD:
                is_backward = event.kind is EventKind.BACKWARD
                start = max(free["compute"], there[unit])
                end = free["compute"] = start + share[unit] * cost[event.kind]
                lane = Lane.BACKWARD if is_backward else Lane.FORWARD
            case EventKind.REDUCE:
                start = max(free["reduce"], free["compute"])
                end = free["reduce"] = start + share[unit] * cost[event.kind]
                lane = Lane.REDUCE
            case _:
                continue
        bars.append(Bar(lane, unit, start, end))
    return bars


def _begun(bars: list[Bar]) -> float:
    """When the unit began that is computed now: what it looks ahead to is asked for then."""
    for bar in reversed(bars):
        if bar.lane in (Lane.FORWARD, Lane.BACKWARD):
            return bar.start_s
    return 0.0


def held_over_time(outlook: Outlook, bars: list[Bar]) -> list[Moment]:
    """Activations grow through forward, logits stand at its end, backward gives all back.

    Gradients on their way are there from the logits' own on.
    """
    sizes = {row.name: float(row.num_bytes) for row in outlook.rows}
    forward = [bar for bar in bars if bar.lane is Lane.FORWARD and bar.end_s > bar.start_s]
    backward = [bar for bar in bars if bar.lane is Lane.BACKWARD and bar.end_s > bar.start_s]
    if not forward or not backward:
        return []
    turn, end = forward[-1].end_s, backward[-1].end_s
    # The root's own backward may be nothing: what stands at the loss goes with the head's.
    gone = next((bar.end_s for bar in backward if bar.end_s - turn > NOTICED * end), end)
    left = max(end - gone, 1e-12)

    def at(time_s: float, share: float, *, at_loss: bool = False) -> Moment:
        held = {kind: at_loss * sizes.get(kind, 0.0) for kind in Kind}
        return Moment(time_s, held | {Kind.ACTIVATIONS: share * sizes.get(Kind.ACTIVATIONS, 0.0)})

    return [
        at(0.0, 0.0),
        *(at(bar.end_s, bar.end_s / turn) for bar in forward),
        at(turn, 1.0, at_loss=True),
        at(gone, 1.0, at_loss=True),
        *(at(bar.end_s, (end - bar.end_s) / left) for bar in backward if bar.end_s >= gone),
    ]
