"""The actions of a step as data, and the interface of recorders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol


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
