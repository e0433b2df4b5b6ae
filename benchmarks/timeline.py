"""Timeline of a step: compute, gathers and reductions, as a trace for Chrome and Perfetto.

    compute   | blocks.0 |w| blocks.1 | blocks.2 |        w: waits for blocks.1
    gather    |- blocks.1 -|- blocks.2 -|
    reduce
              --> time

A message is hidden while its rank does not wait for it; above, all but `w` of two messages is. The
hidden share is 1 - time waited / time on the wire. If the arrival time is unknown, as on real
networks, a message counts as in flight until the rank has waited for it. Times are host times, so
lanes are accurate only where the host computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

from fullshard.planner.schedule import Event, EventKind, Recorder

LANES = ("compute", "gather", "reduce")
COMPUTES = (EventKind.FORWARD, EventKind.BACKWARD)
# Messages, and the event of the same unit in which this rank waits for each.
WAITED_IN = {
    EventKind.GATHER: (*COMPUTES, EventKind.RELEASE),
    EventKind.REDUCE: (EventKind.ACCUMULATE,),
    EventKind.SETTLE: (EventKind.SETTLE,),
}


class Entry(NamedTuple):
    """An event with its start and end time, of `perf_counter_ns`."""

    kind: str
    unit: int
    num_bytes: int
    start_ns: int
    stop_ns: int


class OnWire(NamedTuple):
    """Times at which a message was issued, started (after earlier ones) and arrived."""

    issued_ns: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a lane.

    Attributes:
        what: forward, backward, gather, reduce, settle, wait, or
            publish (in a shared home: ranks wait for each other, and weights are cast).
        during: The pass that needs it, "forward" or "backward".
        waited_ns: How much of a message this rank waited for.
    """

    lane: str
    unit: int
    what: str
    during: str
    start_ns: int
    stop_ns: int
    num_bytes: int = 0
    waited_ns: int = 0


class Timeline:
    """A recorder that notes when every event begins and ends.

    Args:
        inner: A recorder that gets the same events.
    """

    def __init__(self, inner: Recorder | None = None) -> None:
        self.entries: list[Entry] = []
        self._inner = inner
        self._open: tuple[Event | None, int] = (None, 0)

    def begin(self, event: Event, step: int) -> None:
        """Records that an action begins."""
        if self._inner is not None:
            self._inner.begin(event, step)
        self._open = (event, perf_counter_ns())

    def record(self, event: Event, step: int) -> None:
        """Records that an action ends; a spill, inside another action, has no separate begin."""
        stop = perf_counter_ns()
        start = self._open[1] if self._open[0] is event else stop
        self.entries.append(Entry(event.kind, event.unit, event.num_bytes, start, stop))
        if self._inner is not None:
            self._inner.record(event, step)


def slices_of(entries: Sequence[Entry], messages: Sequence[OnWire] | None = None) -> list[Slice]:
    """Returns the lanes of one rank's steps.

    Args:
        entries: Entries in the order in which they were recorded.
        messages: Times of the messages on the wires; None if unknown.
    """
    return [*_compute(entries), *_travels(entries, messages)]


def hidden_share(slices: Sequence[Slice]) -> float | None:
    """Returns the share of wire time that this rank did not wait for; None without messages.

    Args:
        slices: Slices of one or several ranks, of any lanes.
    """
    travels = [piece for piece in slices if piece.lane != "compute"]
    on_wire = sum(piece.stop_ns - piece.start_ns for piece in travels)
    return 1 - sum(piece.waited_ns for piece in travels) / on_wire if on_wire else None


def _compute(entries: Sequence[Entry]) -> Iterator[Slice]:
    """Assigns the time between two events to the unit that was entered last.

    After the last unit's forward, this time is the rest of the model and its loss.
    """
    what, unit, free_ns = "", -1, 0
    for entry in entries:
        if what and entry.start_ns > free_ns:
            yield Slice("compute", unit, what, what, free_ns, entry.start_ns)
        if entry.kind in COMPUTES:
            what, unit = str(entry.kind), entry.unit
            yield Slice("compute", unit, "wait", what, entry.start_ns, entry.stop_ns)
        elif entry.kind == EventKind.ACCUMULATE:
            yield Slice("compute", entry.unit, "wait", what, entry.start_ns, entry.stop_ns)
        elif entry.kind == EventKind.PUBLISH:  # all ranks are in forward
            yield Slice("compute", -1, "publish", "forward", entry.start_ns, entry.stop_ns)
        elif entry.kind == EventKind.SETTLE:
            what = ""  # the time after it belongs to neither forward nor backward
        free_ns = entry.stop_ns


def _travels(entries: Sequence[Entry], messages: Sequence[OnWire] | None) -> Iterator[Slice]:
    free_ns = dict.fromkeys(LANES, 0)
    for at, entry in enumerate(entries):
        if entry.kind not in WAITED_IN:
            continue
        wait = next((later for later in entries[at:] if _waits(later, entry)), None)
        if wait is None:
            continue
        lane = "gather" if entry.kind == EventKind.GATHER else "reduce"
        if messages is not None:
            found = [m for m in messages if entry.start_ns <= m.issued_ns <= entry.stop_ns]
        elif entry.num_bytes:  # boxes of a lane must not overlap
            start_ns = max(entry.stop_ns, free_ns[lane])
            found = [OnWire(entry.stop_ns, start_ns, max(start_ns, wait.stop_ns))]
        else:
            found = []
        during = "forward" if wait.kind == EventKind.FORWARD else "backward"
        for message in found:
            waited = min(wait.stop_ns, message.stop_ns) - max(wait.start_ns, message.issued_ns)
            free_ns[lane] = message.stop_ns
            times = message.start_ns, message.stop_ns, entry.num_bytes, max(0, waited)
            yield Slice(lane, entry.unit, str(entry.kind), during, *times)


def _waits(later: Entry, entry: Entry) -> bool:
    return later.unit == entry.unit and later.kind in WAITED_IN[EventKind(entry.kind)]


def chrome_trace(
    ranks: Sequence[Sequence[Slice]], titles: Sequence[str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the trace for Chrome and Perfetto: one process per rank, one thread per lane.

    Args:
        ranks: Every rank's slices; ranks on one host share a clock.
        titles: Titles of the units, in plan order.
        about: Metadata stored beside the events.
    """
    origin_ns = min((piece.start_ns for slices in ranks for piece in slices), default=0)
    events: list[dict[str, Any]] = []
    for rank, slices in enumerate(ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += [_name("thread_name", rank, at, lane) for at, lane in enumerate(LANES)]
        for piece in slices:
            title = titles[piece.unit] if piece.unit >= 0 else "the model"
            details = {"bytes": piece.num_bytes, "waited_us": piece.waited_ns / 1e3}
            event = {"ph": "X", "pid": rank, "tid": LANES.index(piece.lane), "cat": piece.what}
            waits = piece.what in ("wait", "publish")
            event |= {"name": f"{piece.what} {title}" if waits else title}
            event |= {"ts": (piece.start_ns - origin_ns) / 1e3}
            event |= {"dur": (piece.stop_ns - piece.start_ns) / 1e3}
            events.append(event if piece.lane == "compute" else event | {"args": details})
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def _name(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}
