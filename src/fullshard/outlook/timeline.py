"""A plan's events played in time on one rank: what waits for what, and what is hidden.

    wire      [ gather 1 ][ gather 2 ]        [ gather 1 ]
    rank      [ 0 ]......[ 1 ]..[ 2 ][ 2 ]..........[ 1 ][ 0 ]      ... waits: exposed
    wire                                 [ reduce 2 ]   [ 1 ][ 0 ]

A gather begins when it is issued and the wire is free; a unit begins when it is there. A reduction
begins when the gradients are, and is waited for where the plan accumulates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from fullshard.planner.events import Event, EventKind


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
class Cost:
    """Seconds of an event.

    Attributes:
        own_s: That the rank is busy; before a message starts.
        wire_s: Time on the wire of its message.
        beside_s: That the message takes from the rank's work while it is under way.
    """

    own_s: float = 0.0
    wire_s: float = 0.0
    beside_s: float = 0.0


# What an event costs; whether it is one of a backward.
CostOf = Callable[[Event, bool], Cost]

_LANES = {EventKind.FORWARD: Lane.FORWARD, EventKind.BACKWARD: Lane.BACKWARD}


@dataclass(frozen=True, slots=True)
class Timeline:
    """A micro-batch.

    Attributes:
        bars: In the order of events.
        end_s: When all is done.
        exposed_s: The part of it in which the rank waited for messages.
    """

    bars: tuple[Bar, ...]
    end_s: float
    exposed_s: float


def play(events: Iterable[Event], cost_of: CostOf, *, issues_ahead: bool = False) -> Timeline:
    """Play events in their order.

    Args:
        events: Events of a micro-batch.
        cost_of: Their costs.
        issues_ahead: Whether the rank is a device that its host runs ahead of: what is gathered
            ahead is issued when the unit before begins, not when it ends, and what lands does so
            beside the work.
    """
    player = _Player(cost_of, issues_ahead=issues_ahead)
    for event in events:
        player.take(event)
    end = max(player.clock, *player.wires.values())
    return Timeline(tuple(player.bars), end, player.exposed + end - player.clock)


class _Player:
    """Clocks of a rank and its wires."""

    def __init__(self, cost_of: CostOf, *, issues_ahead: bool) -> None:
        self._cost_of, self._ahead = cost_of, issues_ahead
        self.clock = self.exposed = 0.0
        self._begun = 0.0  # when the last unit began
        self.wires = {Lane.GATHER: 0.0, Lane.REDUCE: 0.0}
        self._there: dict[int, float] = {}
        self._landed: dict[int, float] = {}
        self._is_backward = False
        self.bars: list[Bar] = []

    def take(self, event: Event) -> None:
        """Play one event."""
        cost = self._cost_of(event, self._is_backward or event.kind is EventKind.BACKWARD)
        match event.kind:
            case EventKind.GATHER:
                self._there[event.unit] = self._send(Lane.GATHER, event, cost)
            case EventKind.FORWARD | EventKind.BACKWARD:
                self._is_backward = event.kind is EventKind.BACKWARD
                self._wait(self._there.get(event.unit, 0.0))
                self._begun = self.clock
                self.clock += cost.own_s
                lane = _LANES[event.kind]
                self.bars.append(Bar(lane, event.unit, self._begun, self.clock))
            case EventKind.REDUCE:
                self._landed[event.unit] = self._send(Lane.REDUCE, event, cost)
            case EventKind.ACCUMULATE:
                if not self._ahead:
                    self._wait(self._landed.get(event.unit, 0.0))
                self.clock += cost.own_s
            case _:
                self.clock += cost.own_s

    def _send(self, lane: Lane, event: Event, cost: Cost) -> float:
        """A message begins; returns when it has arrived."""
        self.clock += cost.own_s
        issued = self._begun if self._ahead and lane is Lane.GATHER else self.clock
        start = max(self.wires[lane], issued)
        end = self.wires[lane] = start + cost.wire_s
        self.clock += cost.beside_s
        self.bars.append(Bar(lane, event.unit, start, end))
        return end

    def _wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.clock)
        self.clock = max(self.clock, until)
