"""The last events of a rank, the positions of all, and the cause of a hang. Pure.

    rank 0   step 412   waits in reduce of layers.17        61 s
    rank 3   step 412   data loading (corpus.py:57 in read) 61 s   <- named

[Note: who waits for whom]
A stream is the sequence of collectives of one kind (gathers, reductions) that a rank issued in one
step of one model. The n-th gather of one rank runs with the n-th gather of the other, so one of two
streams must be a prefix of the other. Ranks that do not move disagree if their streams differ, or
if each waits for a collective that the other has not issued; waiting longer cannot help. In any
other wait the peer may only be slow, and a rank counts as stuck after the timeout.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fullshard.errors import HangError
from fullshard.planner.schedule import Event, EventKind

Entry = tuple[Event, int]  # an event and its step


# ---- the last events of a rank


class EventRing:
    """Keeps the last `capacity` events.

    Args:
        capacity: Events kept; a step of a 126-layer model has about a thousand.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        # Event, step, event, step ...: as many pairs would slow a full garbage collection by a
        # tenth of a second.
        self._kept = deque[Any](maxlen=2 * capacity)
        self.count = 0  # of all events so far
        self.open: Entry | None = None  # begun and not done

    def begin(self, event: Event, step: int) -> None:
        """Note that an action begins, which may wait for other ranks."""
        self.open = (event, step)

    def record(self, event: Event, step: int) -> None:
        """Note one event."""
        self._kept.extend((event, step))
        self.open = None
        self.count += 1

    def events(self, step: int | None = None) -> tuple[Event, ...]:
        """The events of one step, or all that are kept."""
        return tuple(event for event, at in self.copy() if step is None or at == step)

    def copy(self) -> list[Entry]:
        """The kept events, oldest first, also while another thread records."""
        kept = list(self._kept)
        return list(zip(kept[::2], kept[1::2], strict=True))

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


def in_words(event: Event, step: int, titles: Sequence[str]) -> str:
    """`step 3: gather layers.17`; steps count from 1."""
    title = titles[event.unit] if event.unit >= 0 else "the model"
    return f"step {step + 1}: {event.kind.value} {title}"


# ---- the position of a rank

MAX_STREAM = 256  # only the last names of a stream are published

GATHER, REDUCE, EXCHANGE = "gather", "reduce", "exchange"

# The event for which a rank waits: kind and text.
_WAITS = {
    EventKind.PUBLISH: (EXCHANGE, "beginning of a forward"),
    EventKind.GATHER: (GATHER, "gather of {}"),
    EventKind.FORWARD: (GATHER, "gather of {}"),
    EventKind.BACKWARD: (GATHER, "gather of {}"),
    EventKind.RELEASE: (GATHER, "gather of {}"),
    EventKind.REDUCE: (REDUCE, "reduce of {}"),
    EventKind.ACCUMULATE: (REDUCE, "reduce of {}"),
    EventKind.SETTLE: (EXCHANGE, "end of backward"),
}

_STREAMS = {EventKind.GATHER: GATHER, EventKind.REDUCE: REDUCE}


@dataclass(frozen=True)
class Position:
    """Position of a rank, as it publishes it for the judge.

    Attributes:
        beat: Number of the message; a rank whose number does not grow is silent.
        step: Step, counted from 1.
        doing: Current activity: "data loading", or the awaited collective: "reduce of layers.17".
        where: Line of the user's code, or the innermost line.
        since_s: Seconds since the position changed.
        kind: Kind of the awaited collective; "" if the rank does not wait.
        stream: Stream of the awaited collective: "model/step/kind"; "" if unknown.
        number: Index of the awaited collective in its stream.
        limited: Whether the timeout applies; user code between steps may take long.
        failed: Whether the collective raised an error, so that the rank waits for the verdict only.
        ended: Whether the rank ended without a failure.
        streams: Issued names by stream: [number of names left out before, names ...].
        events: Descriptions of the last events.
        silent_s: Seconds since the last message, by the judge's clock.
        gone: Whether the judge knows that the process no longer exists.
    """

    rank: int
    pid: int = 0
    host: str = ""
    beat: int = 0
    step: int = 0
    doing: str = "start"
    where: str = ""
    since_s: float = 0.0
    kind: str = ""
    stream: str = ""
    number: int = -1
    limited: bool = False
    failed: bool = False
    ended: bool = False
    streams: dict[str, list[str | int]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    silent_s: float = 0.0
    gone: bool = False

    def to_json(self) -> str:
        """Serializes the position for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position | None:
        """Parse the text that another rank published; None if it is anything else."""
        try:
            return _READER.validate_json(text, strict=True)
        except ValidationError:
            return None

    @property
    def place(self) -> str:
        """`reduce of layers.17, step 3`, `data loading, step 3 (corpus.py:57 in read)`."""
        step = f", step {self.step}" if self.step else ""
        return self.doing + step + (f" ({self.where})" if self.where and not self.kind else "")

    @property
    def phrase(self) -> str:
        """The place as one phrase."""
        return f"{'waits' if self.kind else 'is'} in {self.place}"

    @property
    def stands_s(self) -> float:
        """Seconds since the place changed."""
        return self.since_s + self.silent_s

    @property
    def words(self) -> str:
        """The place, since when, and whether the rank answers."""
        last = f"(last seen in {self.place})"
        if self.gone:
            return f"is gone: its process died {last}"
        if self.silent_s > SETTLED_S:
            return f"is silent for {self.silent_s:.0f} s, stopped or in C code {last}"
        return f"{self.phrase}, {self.stands_s:.0f} s"


_READER = TypeAdapter(Position)


# ---- what a rank publishes of its events


def awaited(open_: Entry, entries: Sequence[Entry], titles: Sequence[str], model: int) -> dict:
    """Returns the fields of a Position for an event that has begun and not ended."""
    event, step = open_
    kind, words = _WAITS.get(event.kind, ("", event.kind.value + " of {}"))
    title = titles[event.unit] if event.unit >= 0 else "the model"
    fields = {"doing": words.format(title), "kind": kind, "step": step + 1}
    if kind in (GATHER, REDUCE):
        issued = streams(entries, titles, model, step)[_stream(model, step, kind)]
        names, before = issued[1:], int(issued[0])
        last = max((i for i, name in enumerate(names) if name == title), default=len(names))
        issuing = event.kind in (EventKind.GATHER, EventKind.REDUCE)
        number = before + (len(names) if issuing else last)
        fields |= {"stream": _stream(model, step, kind), "number": number}
    return fields


def streams(
    entries: Iterable[Entry], titles: Sequence[str], model: int, step: int
) -> dict[str, list[str | int]]:
    """Returns the collectives of a step that move bytes between ranks, by stream."""
    found: dict[str, list[str | int]] = {}
    for of, kind in _STREAMS.items():
        names = [
            titles[event.unit]
            for event, at in entries
            if at == step and event.kind is of and event.num_bytes
        ]
        kept = names[-MAX_STREAM:]
        found[_stream(model, step, kind)] = [len(names) - len(kept), *kept]
    return found


def _stream(model: int, step: int, kind: str) -> str:
    return f"{model}/{step}/{kind}"


# ---- verdicts

SETTLED_S = 3.0  # ranks that have not moved for so long are compared
LOST_S = 1.5  # silence of a rank that died, or is elsewhere while a collective failed


def blamed(rank: int, message: str) -> HangError:
    """The verdict that a rank causes a hang."""
    error = HangError(message)
    error.rank = rank
    return error


def judge(
    seen: Mapping[int, Position], timeout_s: float, world_size: int = 0, lost_s: float = LOST_S
) -> HangError | None:
    """Returns the first problem that it finds, or None.

    If a rank waits for longer than `timeout_s`, ranks that never reported are named: they stopped
    before their first message. A rank that died has `lost_s` to be told by an error of its own.
    """
    here = [seen[rank] for rank in sorted(seen)]
    for one in here:
        is_sure = one.silent_s >= lost_s or any(other.failed for other in here)
        if one.gone and not one.ended and is_sure:
            return _verdict("every rank to be alive", [one], here)
    found = _different_streams(here) or _left_early(here) or _deadlock(here) or _lost(here)
    if found is not None:
        return found
    alive = [one for one in here if not one.ended]
    silent = [one for one in alive if one.silent_s > timeout_s]
    over = [one for one in alive if one.limited and one.stands_s > timeout_s]
    if not silent and not over:
        return None
    silent += [Position(rank, silent_s=timeout_s) for rank in range(world_size) if rank not in seen]
    busy = [one for one in alive if not one.kind]
    expected = f"every rank to make progress within {timeout_s:g} s"
    return _verdict(expected, silent or busy or over, here)


def _verdict(expected: str, named: Sequence[Position], all_: Sequence[Position]) -> HangError:
    culprits = "; ".join(f"rank {one.rank} {one.words}" for one in named)
    rest = [one for one in all_ if one not in named and not one.ended]
    groups = Counter(one.phrase for one in rest)
    others = "".join(f"; {_others_at(rest, phrase, alone=len(groups) == 1)}" for phrase in groups)
    return blamed(named[0].rank, f"run: expected {expected}, but {culprits}{others}.")


def _others_at(rest: Sequence[Position], phrase: str, *, alone: bool) -> str:
    """`rank 2 waits in ...`, or `the others wait in ...`."""
    ranks = [one.rank for one in rest if one.phrase == phrase]
    if len(ranks) == 1:
        return f"rank {ranks[0]} {phrase}"
    verb, _, place = phrase.partition(" ")
    text = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    who = "the others" if alone else f"ranks {text}"
    return f"{who} {'wait' if verb == 'waits' else 'are'} {place}"


def _different_streams(here: Sequence[Position]) -> HangError | None:
    for key in sorted({key for one in here for key in one.streams}):
        lists = {one.rank: one.streams[key] for one in here if key in one.streams}
        place = _first_difference(list(lists.values()))
        if place is None:
            continue
        at = {rank: _name_at(stream, place) for rank, stream in lists.items()}
        usual = Counter(at.values()).most_common(1)[0][0]
        rank = next((rank for rank in reversed(at) if at[rank] != usual), max(at))
        _, step, kind = key.split("/")
        fellows = [other for other in at if at[other] == usual and other != rank]
        who = "the others" if len(fellows) > 1 else f"rank {fellows[0]}"
        return blamed(
            rank,
            f"run: expected all ranks to issue the same collectives, but in backward "
            f"{int(step) + 1} or its forward rank {rank} issues {kind} of {at[rank]} as its "
            f"{kind} number {place + 1}, {who} {kind} of {usual}. {_ADVICE}",
        )
    return None


_ADVICE = (
    "Every rank must run the same units in the same order, and the same number of forwards and "
    "backwards. Look for a condition on the rank, or for ranks with different numbers of batches."
)


def _first_difference(lists: Sequence[Sequence[str | int]]) -> int | None:
    ends = [int(stream[0]) + len(stream) - 1 for stream in lists]
    for place in range(max(int(stream[0]) for stream in lists), min(ends)):
        if len({_name_at(stream, place) for stream in lists}) > 1:
            return place
    return None


def _name_at(stream: Sequence[str | int], place: int) -> str:
    return str(stream[place - int(stream[0]) + 1])


def _left_early(here: Sequence[Position]) -> HangError | None:
    """A rank has ended while all others wait, or one whose collective failed."""
    left, alive = ([one for one in here if one.ended == ended] for ended in (True, False))
    if not left or not alive:
        return None
    waiting = next((one for one in alive if one.failed), alive[0])
    if not waiting.failed and not all(one.kind and one.stands_s > SETTLED_S for one in alive):
        return None
    return blamed(
        left[0].rank,
        f"run: expected all ranks to end together, but rank {left[0].rank} has ended "
        f"(step {left[0].step}) while rank {waiting.rank} waits in {waiting.doing}, "
        f"step {waiting.step}. {_ADVICE}",
    )


def _lost(here: Sequence[Position]) -> HangError | None:
    """A collective failed, and a rank of another machine no longer responds."""
    machines = {one.host for one in here if one.failed}
    for one in here:
        if machines - {one.host} and one.silent_s >= LOST_S and not one.ended:
            return blamed(
                one.rank,
                f"run: expected every rank to be alive, but rank {one.rank} no longer responds "
                f"(last seen in {one.place}). Its log contains the reason.",
            )
    return None


def _deadlock(here: Sequence[Position]) -> HangError | None:
    still = [
        one for one in here if one.kind and one.stands_s > SETTLED_S and one.silent_s <= SETTLED_S
    ]
    for first, second in combinations(still, 2):
        if _lacks(first, second) and _lacks(second, first):
            return blamed(
                second.rank,
                f"run: expected all ranks to issue the same collectives, but rank {second.rank} "
                f"waits in {second.doing}, step {second.step}, which rank {first.rank} has not "
                f"issued; that rank waits in {first.doing}, step {first.step}. {_ADVICE}",
            )
    return None


def _lacks(one: Position, other: Position) -> bool:
    """Whether `other` has not issued the collective in which `one` waits (see the note)."""
    if one.kind == EXCHANGE or not one.stream:
        return (one.kind, one.doing) != (other.kind, other.doing)
    model, step, _ = one.stream.split("/")
    issued = other.streams.get(one.stream)
    if issued is not None:
        return one.number >= int(issued[0]) + len(issued) - 1
    last = max(
        (int(key.split("/")[1]) for key in other.streams if key.startswith(model)), default=0
    )
    return last < int(step)
