"""What happens in a step, as data; and who may be told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol


class EventKind(StrEnum):
    """One action of the engine on one unit.

    PUBLISH: a forward of the whole model begins; every rank's part of a shared home is written.
    GATHER: the unit's all-gather into its slot is issued (where nothing travels: it is filled).
    FORWARD: the unit's forward begins, its slot holds the weights.
    RELEASE: the slot no longer holds the unit; under poison it is filled with NaN.
    BACKWARD: the unit's backward begins, its slot holds the weights.
    REDUCE: all gradients of the unit are in its gradient slot; the reduction is issued.
    ACCUMULATE: the reduction has landed in the gradient shard; the gradient slot is free.
    DEFER: the unit's gradients stay on this rank, unreduced (`no_sync`).
    SPILL: gradients came out of order and got a buffer that the plan does not list.
    SETTLE: end of backward: touched bits and squared norms are summed over ranks.
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
    """What a backward does with its gradients.

    ALL: they are summed over both axes of the mesh.
    INNER: over the shard axis; the sum over the replicate axis waits for a later backward.
    NONE: they stay on this rank.
    """

    ALL = "all"
    INNER = "inner"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Event:
    """One action.

    Attributes:
        kind: What.
        unit: Index of the unit in the plan; -1 where the whole model is meant.
        num_bytes: Bytes that this rank receives over the wire for it (0 for local actions).
    """

    kind: EventKind
    unit: int
    num_bytes: int = 0


class Recorder(Protocol):
    """Told of every action that an engine takes; `observe` implements it."""

    def begin(self, event: Event, step: int) -> None:
        """The action begins, and may wait for other ranks."""
        ...

    def record(self, event: Event, step: int) -> None:
        """The action is done."""
        ...


@lru_cache(maxsize=65536)
def event_of(kind: EventKind, unit: int, num_bytes: int = 0) -> Event:
    """The one event of these values: a step makes thousands, and the same ones every time."""
    return Event(kind, unit, num_bytes)
