"""A plan's events laid out in time, and what is held meanwhile: what figures are drawn of.

    gather    [ 0 ][ 1 ][ 2 ]   [ 1 ][ 0 ]
    compute        [ 0 ][ 1 ][ 2 ][ 2 ][ 1 ][ 0 ]
    reduce                            [ 2 ][ 1 ][ 0 ]

Durations are those of a calibration; else the forecast's, shared out over units by their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullshard.outlook.predict import Machine, Outlook, workload
from fullshard.outlook.speed import traffic
from fullshard.outlook.timeline import Bar, Cost, Lane, play
from fullshard.planner.activations import Kind
from fullshard.planner.events import Event, EventKind

BACKWARD_SHARE = 2 / 3  # of a unit's work, without recompute
NOTICED = 0.01  # of a micro-batch's time: shorter is not seen in a figure


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at a time beside state: bytes by the row's name."""

    time_s: float
    held: Mapping[Kind, float]


def lay_out(outlook: Outlook, machine: Machine) -> tuple[Bar, ...]:
    """The bars of one micro-batch; none where nothing is known of the device."""
    times = outlook.times
    if times is None:
        return ()
    if outlook.bars:
        return outlook.bars
    run = workload(outlook.plan, outlook.config, outlook.job, machine)
    gather_s, regather_s, reduce_s, once_s = traffic(run)
    units = outlook.plan.units
    total = sum(unit.numel for unit in units) or 1
    share = [unit.numel / total for unit in units]
    again = run.kernels.recompute / 3
    work = times.matmul + times.attention + times.passes + times.logits + times.launch
    work /= run.batch.accumulation * (1 + again)
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

    return play(outlook.plan.events, cost_of, issues_ahead=True).bars


def held_over_time(outlook: Outlook, bars: Sequence[Bar]) -> list[Moment]:
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
