"""Where this process is, seen from beside it: the event ring, the phase, the stacks of its threads.

Nothing is added to the training. A wait in a collective is an event that has begun and not ended,
or an innermost frame in our transports or in torch.distributed.
"""

from __future__ import annotations

import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from fullshard.observe import position as judging
from fullshard.observe.position import EXCHANGE, Position
from fullshard.observe.trace import EventRing
from fullshard.planner.events import EventKind

STANDS_S = 1.0  # a rank that stood for so long says what it has issued
MOVED_S = 0.002  # of processor time: a thread that used less between two looks stood still

_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = f"{_PACKAGE}/transport/"
_RUNTIME = f"{_PACKAGE}/engine/step.py"
_LIBRARIES = (_PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Whereabouts:
    """Of this process; looked at by the watchdog's thread, told by the others."""

    def __init__(self, rank: int, pid: int) -> None:
        self.last = Position(rank, pid, _host())
        self._phase = ("", 0)
        self._models: list[_Model] = []
        self._key: Any = None
        self._since = time.perf_counter()
        self._cpu_s = 0.0
        self._failed_at: str | None = None
        self._main = threading.main_thread().ident or 0

    def phase(self, name: str, step: int = 0) -> None:
        """What the training loop does now; "" for nothing that the timeout should hold for."""
        self._phase = (name, step)

    def watch(self, ring: EventRing, titles: Sequence[str]) -> None:
        """Tell positions from a model's events.

        Args:
            ring: Told by the model's engine.
            titles: Its units, in plan order.
        """
        self._models.append(_Model(len(self._models), weakref.ref(ring), tuple(titles)))

    def fail(self, frame: FrameType) -> None:
        """The main thread has left the engine by an error: it stays where it was."""
        self._failed_at = _place(frame)

    def look(self, asked: Sequence[int] | None = None) -> Position:
        """Take a new look.

        Args:
            asked: Tell what was issued in these steps and the last ones; None: in the last one, and
                only where this rank stands still.
        """
        threads = sys._current_frames()
        threads.pop(threading.get_ident(), None)
        blocked = any(map(is_collective, threads.values()))
        in_engine = self._failed_at is not None or any(
            _passes(frame, _RUNTIME) for frame in threads.values()
        )
        rings = [model.ring() for model in self._models]
        opens = [ring.open if ring and in_engine else None for ring in rings]
        where = self._failed_at or _place(threads.get(self._main))
        del threads
        counts = tuple(ring.count if ring else 0 for ring in rings)
        name, step = self._phase
        now, cpu_s = time.perf_counter(), _cpu_seconds(self._main)
        key = (counts, opens, name, step, blocked)
        moved = blocked and not any(opens) and cpu_s - self._cpu_s > MOVED_S
        if key != self._key or moved:
            self._key, self._since = key, now
        self._cpu_s = cpu_s
        beat, since_s = self.last.beat + 1, now - self._since
        place = Position(
            rank=self.last.rank,
            pid=self.last.pid,
            host=self.last.host,
            beat=beat,
            step=step,
            doing=name or "the user's code",
            where=where,
            since_s=since_s,
            limited=bool(name),
        )
        if blocked:
            place = replace(
                place, kind=EXCHANGE, doing=f"a collective of {name or where}", limited=True
            )
        tells = asked is not None or since_s > STANDS_S
        for model, open_ in zip(self._models, opens, strict=True):
            place = model.place(place, open_, (*(asked or ()), -1, 0) if tells else ())
        self.last = place
        return place


class _Model:
    """What a model's event ring adds to a position."""

    def __init__(self, index: int, ring: weakref.ref[EventRing], titles: tuple[str, ...]) -> None:
        self.ring = ring
        self._index = index
        self._titles = titles
        self._digests = judging.Digests()

    def place(self, place: Position, open_: judging.Entry | None, told: Sequence[int]) -> Position:
        """With what is awaited, what was issued in some steps, and what came last.

        Args:
            told: Steps; 0 and -1 are the current and the one before it.
        """
        ring = self.ring()
        entries = ring.copy() if ring is not None else []
        if not entries and open_ is None:
            return place
        self._digests.feed(entries)
        step = open_[1] if open_ is not None else entries[-1][1]
        settled = open_ is None and entries[-1][0].kind is EventKind.SETTLE
        changes: dict[str, Any] = {"step": place.step or step + 1 + settled}
        if open_ is not None:
            awaited = judging.awaited(open_, entries, self._titles, self._index)
            changes = awaited | changes | {"limited": True}
        streams = dict(place.streams)
        for at in told:
            at = at if at > 0 else step + at
            streams |= judging.streams(entries, self._titles, self._index, at)
        return replace(
            place,
            **changes,
            streams=streams,
            digests=place.digests | self._digests.tell(self._index),
            events=judging.last_words(entries, self._titles),
        )


def is_collective(frame: FrameType) -> bool:
    """Whether the innermost frame waits for other ranks."""
    file = frame.f_code.co_filename
    return file.startswith(_COLLECTIVES) or "/torch/distributed/" in file


def _passes(frame: FrameType | None, file: str) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    """`corpus.py:57 in read`: the innermost line of the user's code, else the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith("<"):
            break
        frame = frame.f_back
    at = frame or innermost
    if at is None:
        return ""
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name}"


def stacks() -> str:
    """The Python stacks of all threads but the watchdog's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def _cpu_seconds(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _host() -> str:
    """Equal where process ids mean the same processes; says nothing that identifies a machine."""
    name = f"{socket.gethostname()}{Path('/proc/self/ns/pid').readlink()}"
    return f"{zlib.crc32(name.encode()):08x}"
