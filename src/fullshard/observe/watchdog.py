"""A hang names itself: every rank says where it is on a side channel, and one of them judges.

    rank k   thread, twice a second:  position --> TCPStore (not the training's process group)
    judge    the lowest rank that answers: reads all positions, judges (see position.py)
    verdict  --> every rank leaves its Python stacks there --> the judge writes them into a file
             --> every rank ends with code 5

Nothing is added to the training: the thread looks at the event ring, at the phase that the loop
told, and at the stacks of the other threads, which also tell a wait in any collective of torch.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from fullshard.config.environment import LaunchEnvironment, read_launch_environment
from fullshard.errors import HangError, PreemptedError
from fullshard.observe import position as judging
from fullshard.observe.position import SETTLED_S, Position, Seen, Verdict
from fullshard.observe.trace import EventRing
from fullshard.observe.whereabouts import Whereabouts, is_collective, stacks

DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.5
STACKS_S = 3.0  # for all ranks to leave their stacks
EXPLAIN_S = 2.0  # for all ranks to say what they have issued, after an error in a collective
# Where nothing can be done about a store that is gone, or was never there.
_STORE_GONE = (RuntimeError, AttributeError)
_VERDICT = 1_000_000  # what a verdict adds to the alarm; a question adds 1


@dataclass(frozen=True)
class Seat:
    """This rank's place, and where a report goes.

    Attributes:
        address: Host of the store that the ranks met by.
        port: Its port.
        attempt: Tells the launches apart that share a store.
        timeout_s: A rank that waits longer is stuck.
        hang_file: Where the report is written.
        stacks_file: Where a rank's faulthandler writes when asked by SIGUSR2; None: nowhere.
        kept_file: Where this rank's last events are kept, for the launcher; None: nowhere.
        supervised: A launcher of ours sees which rank dies, and shows the report.
    """

    rank: int
    world_size: int
    address: str
    port: int
    attempt: str
    timeout_s: float
    hang_file: Path
    stacks_file: Callable[[int], Path] | None = None
    kept_file: Path | None = None
    supervised: bool = False

    @classmethod
    def of(cls, launch: LaunchEnvironment, timeout_s: float, run_dir: Path | None) -> Seat | None:
        """The seat of a launched rank; None where there is no store that one could meet at."""
        if launch.master_addr is None or launch.master_port is None:
            return None
        folder = run_dir or launch.run_dir
        file = Path("hang.txt") if folder is None else folder / "logs" / "hang.txt"
        attempt = f"{launch.run_id}.{launch.attempt}"
        return cls(
            launch.rank,
            launch.world_size,
            launch.master_addr,
            launch.master_port,
            attempt,
            timeout_s,
            file,
        )


class Watchdog:
    """The watchdog of this process. It begins to speak when the process group exists."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.on_hang: list[Callable[[Verdict], None]] = []
        self._channel: Any = None
        self.here = Whereabouts(seat.rank, os.getpid())
        self._heard: dict[int, tuple[int, float]] = {}
        self._asked: list[int] | None = None  # steps of which all ranks shall tell what they issued
        self._shown = sys.excepthook
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Watch from a thread of its own until the process ends."""
        self._thread.start()
        sys.excepthook = self._on_exception
        atexit.register(self.stop)

    def stop(self) -> None:
        """Say that this rank has left in order."""
        if os.getpid() != self.here.last.pid:
            return  # a forked child, whose end is not the rank's
        self._stop.set()
        self._thread.join(2.0)
        if self._channel is not None:
            with suppress(*_STORE_GONE):
                self._publish(replace(self.here.last, beat=self.here.last.beat + 1, ended=True))

    def explain(self, error: BaseException) -> Verdict | None:
        """Whether another rank is to blame for an error: of a collective, or a launcher's SIGTERM.

        Call it in the main thread, with nothing to do any more but to end.
        """
        frame = self._frame_of(error)
        if frame is None:
            return None
        preempted = isinstance(error, PreemptedError)
        self.here.fail(frame)
        with suppress(*_STORE_GONE):
            self._publish(self.here.look(()))
            self._ask(())
            deadline = time.monotonic() + (0.0 if preempted else EXPLAIN_S)
            while True:
                seen = self._look()
                verdict = judging.judge(seen, float("inf"))
                late = time.monotonic() >= deadline
                if verdict is None and not preempted:
                    verdict = judging.left_early(seen, self.here.last)
                if verdict is None and late:  # the supervisor knows those of this machine
                    others = filter(self._is_unknown, seen.values())
                    verdict = judging.fallen_silent(others, EXPLAIN_S - POLL_S)
                if verdict is not None:
                    self._write(verdict, {}, seen)
                if verdict is not None or late:
                    return verdict
                time.sleep(POLL_S / 2)
        return Verdict(0, "run: expected rank 0 to live, but the store that it serves is gone.")

    def _frame_of(self, error: BaseException) -> FrameType | None:
        """Where it was raised, if another rank may be to blame; SIGTERM is ignored from then on."""
        frame = _last_frame(error.__traceback__) if os.getpid() == self.here.last.pid else None
        preempted = isinstance(error, PreemptedError)
        if frame is None or self._channel is None or (self.seat.supervised and preempted):
            return None
        if not preempted and not (isinstance(error, RuntimeError) and is_collective(frame)):
            return None
        if not self.seat.supervised:
            # torchrun ends all ranks when one has died: the word is worth its patience.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return frame

    def _is_unknown(self, one: Seen) -> bool:
        """Whether nobody here would see the rank's process die."""
        return one.position.host != self.here.last.host

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """What Python calls for an error that nobody caught, where no launcher of ours would."""
        self._frame_of(error)  # torchrun's SIGTERM comes soon, a traceback takes its time
        self._shown(kind, error, trace)
        verdict = self.explain(error)
        if verdict is not None:
            sys.stderr.write(f"HangError: {verdict.message}\nMore: {self.seat.hang_file}\n")
            _exit()

    # ---- the thread

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            if self._channel is None and not self._connect():
                continue
            self.here.look(self._asked)
            try:
                self._beat()
            except RuntimeError:  # whoever served the store is gone, and cannot judge
                alone = {self.seat.rank: Seen(self.here.last)}
                verdict = judging.judge(alone, self.seat.timeout_s)
                if verdict is not None:
                    self._end(verdict, {self.seat.rank: stacks()}, alone)

    def _connect(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        ready = getattr(dist, "is_initialized", None)
        if ready is None or not ready():
            return False
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        seat = self.seat
        try:
            store = TCPStore(
                seat.address, seat.port, is_master=False, timeout=timedelta(seconds=30)
            )
        except RuntimeError:
            self._stop.set()  # the ranks met in another way; nobody could be heard
            return False
        self._channel = PrefixStore(f"fullshard/watchdog/{seat.attempt}", store)
        return True

    def _beat(self) -> None:
        self._publish(self.here.last)
        alarm = self._channel.add("alarm", 0)
        if alarm > 0:
            self._asked = _steps_of(self._channel.get("asked"))
        if alarm >= _VERDICT:
            self._obey()
        if not self._is_judge():
            return
        seen = self._look()
        unequal = judging.unequal_digests(seen.values())
        if unequal and not self._asked:
            self._ask(unequal)  # judged when all have said what they issued
            return
        verdict = judging.judge(seen, self.seat.timeout_s)
        if verdict is not None:
            self._condemn(verdict, seen)

    def _ask(self, streams: Iterable[str]) -> None:
        """Have all ranks tell what they issued in the steps of these streams, and lately."""
        steps = sorted({int(stream.split("/")[1]) for stream in streams})
        self._channel.set("asked", json.dumps(steps[-3:]))
        self._channel.add("alarm", 1)

    def _publish(self, position: Position) -> None:
        self._channel.set(str(self.seat.rank), position.to_json())

    def _is_judge(self) -> bool:
        """Whether no lower rank answers. Usually one question: rank 0 does."""
        for rank in range(self.seat.rank):
            seen = self._look(only=rank).get(rank)
            if seen is None or (seen.silent_s <= SETTLED_S and not seen.position.ended):
                return False
        return True

    def _look(self, only: int | None = None) -> dict[int, Seen]:
        """The ranks that have spoken, as they are seen from here."""
        ranks = range(self.seat.world_size) if only is None else (only,)
        keys = [str(r) for r in ranks if r in self._heard or self._channel.check([str(r)])]
        texts = self._channel.multi_get(keys) if keys else []
        positions = filter(None, map(Position.from_json, texts))
        return {position.rank: self._see(position) for position in positions}

    def _see(self, position: Position) -> Seen:
        now = time.monotonic()
        beat, heard = self._heard.get(position.rank, (-1, now))
        if beat != position.beat:
            heard = now
        self._heard[position.rank] = position.beat, heard
        local = position.host == self.here.last.host and not self.seat.supervised
        gone = local and not position.ended and not _lives(position.pid)
        return Seen(position, now - heard, gone)

    # ---- the end

    def _condemn(self, verdict: Verdict, seen: dict[int, Seen]) -> None:
        """Ask all ranks for their stacks, write the report, end."""
        self._channel.set("asked", "[]")
        self._channel.add("alarm", _VERDICT)
        told = {self.seat.rank: stacks()}
        deadline = time.monotonic() + STACKS_S
        answer = {rank for rank, one in seen.items() if one.silent_s <= SETTLED_S}
        while answer - told.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in answer - told.keys():
                if self._channel.check([f"stacks/{rank}"]):
                    told[rank] = self._channel.get(f"stacks/{rank}").decode()
        for rank in seen.keys() - told.keys():
            told[rank] = self._ask_by_signal(seen[rank].position)
        self._end(verdict, told, seen)

    def _end(self, verdict: Verdict, told: dict[int, str], seen: dict[int, Seen]) -> None:
        self._write(verdict, told, seen)
        if not self.seat.supervised:
            sys.stderr.write(f"HangError: {verdict.message}\nMore: {self.seat.hang_file}\n")
        with suppress(*_STORE_GONE):
            self._channel.set("written", "")
        _exit()

    def _obey(self) -> None:
        """Leave the stacks, and end once the judge has written its report."""
        self._channel.set(f"stacks/{self.seat.rank}", stacks())
        deadline = time.monotonic() + STACKS_S + 2.0
        with suppress(*_STORE_GONE):
            while time.monotonic() < deadline and not self._channel.check(["written"]):
                time.sleep(0.1)
        _exit()

    def _ask_by_signal(self, at: Position) -> str:
        """The stacks of a rank of this machine whose watchdog cannot run."""
        if self.seat.stacks_file is None or at.host != self.here.last.host or not _lives(at.pid):
            return "(none: the rank does not answer)\n"
        if psutil.Process(at.pid).status() == psutil.STATUS_STOPPED:
            return "(none: the process is stopped, by SIGSTOP or a debugger)\n"
        os.kill(at.pid, signal.SIGUSR2)
        time.sleep(1.0)
        file = self.seat.stacks_file(at.rank)
        return (file.read_text() if file.exists() else "") or "(none: the rank does not answer)\n"

    def _write(self, verdict: Verdict, told: dict[int, str], seen: dict[int, Seen]) -> None:
        lines = [verdict.message, "", *describe(seen)]
        for rank in sorted(told):
            lines += ["", f"---- stacks of rank {rank} ----", told[rank].rstrip()]
        self.seat.hang_file.parent.mkdir(parents=True, exist_ok=True)
        self.seat.hang_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for call in self.on_hang:
            call(verdict)


def describe(seen: dict[int, Seen]) -> list[str]:
    """A line a rank, and its last events."""
    lines: list[str] = []
    for rank in sorted(seen):
        lines.append(f"rank {rank}: {seen[rank].words}")
        events = seen[rank].position.events
        if events:
            lines.append(f"    last events: {'; '.join(events)}")
    return lines


def read_positions(store: Any, attempt: str, world_size: int) -> dict[int, Seen]:
    """What the ranks of a launch said last, for the launcher, which serves the store."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    channel = PrefixStore(f"fullshard/watchdog/{attempt}", store)
    keys = [str(rank) for rank in range(world_size) if channel.check([str(rank)])]
    texts = channel.multi_get(keys) if keys else []
    return {place.rank: Seen(place) for place in filter(None, map(Position.from_json, texts))}


_current: list[Watchdog] = []


def start(seat: Seat) -> Watchdog:
    """Start the watchdog of this process; the one that runs already, where there is one."""
    if not _current:
        _current.append(Watchdog(seat))
        _current[0].start()
    return _current[0]


def phase(name: str, step: int = 0) -> None:
    """Tell what this process does now, which the timeout shall hold for; "" for nothing."""
    if _current:
        _current[0].here.phase(name, step)


def on_hang(call: Callable[[Verdict], None]) -> None:
    """Have a function called in the judging rank, before all ranks are ended."""
    if _current:
        _current[0].on_hang.append(call)


def current() -> Watchdog | None:
    """The watchdog of this process, if it has one."""
    return _current[0] if _current else None


def watch(ring: EventRing, titles: Sequence[str]) -> None:
    """Have the watchdog tell positions from a model's events; starts it in a launched process.

    Args:
        ring: Told by the model's engine.
        titles: Its units, in plan order.
    """
    dist = sys.modules.get("torch.distributed")
    launch = read_launch_environment() if dist is not None and dist.is_initialized() else None
    if not _current and launch is not None:
        seat = Seat.of(launch, launch.timeout_s or DEFAULT_TIMEOUT_S, None)
        if seat is not None:
            start(seat)
    if not _current:
        return
    _current[0].here.watch(ring, titles)
    file = _current[0].seat.kept_file
    if file is not None and not file.exists():  # a second model's events stay in memory
        ring.keep_in(file, titles)


def _steps_of(text: bytes) -> list[int]:
    """The steps that a rank asked for; none where the store has garbage in their place."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [step for step in found if type(step) is int] if isinstance(found, list) else []


def _last_frame(trace: TracebackType | None) -> FrameType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _exit() -> None:
    """End at once; what is printed comes out, unless a stuck thread holds the stream."""
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(0.5)
    os._exit(HangError.exit_code)
