"""The watchdog: every rank publishes its position, and one rank finds who is to blame for a hang.

    rank k   thread, twice per second:  position --> TCPStore (not the training's process group)
    judge    the lowest rank that answers, and each rank whose collective failed, reads all
             positions and decides (see hang.py)
    verdict  --> every rank publishes its Python stacks --> the judge writes them into a file
             --> every rank ends with code 5

Nothing is added to the training: the thread reads the event ring, the phase set by the loop, and
the stacks of the other threads, which also show a wait in any collective of torch.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil

from fullshard.config.environment import (
    LaunchEnvironment,
    Launcher,
    rank_log,
    read_launch_environment,
)
from fullshard.errors import HangError, PreemptedError
from fullshard.observe.hang import (
    EXCHANGE,
    LOST_S,
    SETTLED_S,
    Entry,
    EventRing,
    Position,
    awaited,
    blamed,
    in_words,
    judge,
    streams,
)
from fullshard.observe.metrics import wait_until
from fullshard.planner.schedule import EventKind

DEFAULT_TIMEOUT_S = 600.0
PREFIX = "fullshard/watchdog/{}"  # of its keys in the store of a launch, by its start
POLL_S = 0.5
STACKS_S = 3.0  # for all ranks to publish their stacks
REPORT_S = STACKS_S + 2.0  # from a verdict to the end of all ranks
EXPLAIN_S = 3.0  # for the ranks to find a verdict, after an error in a collective
LAUNCHER_S = 8.0  # by then our launcher has ended all ranks, unless one left by os._exit(0)
STACKS_SIGNAL = signal.SIGUSR2  # SIGUSR1 is what schedulers send as a warning
# Raised if the store is gone, or never existed.
_STORE_GONE = (RuntimeError, AttributeError)
_VERDICT = 1_000_000  # added to the alarm by a verdict; a question adds 1

STANDS_S = 1.0  # a rank at one position for this long publishes the collectives it issued
MOVED_S = 0.002  # CPU time between two samples below which a thread counts as waiting
LAST_EVENTS = 16

_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = f"{_PACKAGE}/transport/"
_RUNTIME = f"{_PACKAGE}/engine/step.py"
_LIBRARIES = (_PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Watchdog:
    """The watchdog of this process. It publishes positions once the process group exists.

    Args:
        launch: The rank, and the store of its rendezvous.
        timeout_s: A rank that waits longer is stuck.
        hang_file: File of the report.
    """

    def __init__(self, launch: LaunchEnvironment, timeout_s: float, hang_file: Path) -> None:
        self._launch, self._rank, self._timeout_s = launch, launch.rank, timeout_s
        self.hang_file = hang_file
        # Our launcher sees which rank dies, and shows the report.
        self._is_ours = launch.launcher is Launcher.FULLSHARD
        self._channel: Any = None
        self.sampler = PositionSampler(self._rank, os.getpid())
        self._heard: dict[int, tuple[int, float]] = {}
        self._asked = False  # all ranks publish their last calls
        self._rounds = 0  # of the thread; no more where the store does not answer
        self._first = Position(0)
        self._shown = sys.excepthook
        self._stop = threading.Event()
        self._left = threading.Event()
        self._thread = _daemon(self._run, "fullshard watchdog")

    def start(self) -> None:
        """Starts the watchdog's thread, which runs until the process ends."""
        self._thread.start()
        if self._rank and self._launch.first_serves:
            _daemon(self._watch_store, "fullshard watchdog of the store").start()
        sys.excepthook = self._on_exception
        atexit.register(self.stop)

    def stop(self) -> None:
        """Publishes that this rank ended without a failure."""
        if os.getpid() != self.sampler.last.pid:
            return  # a forked child
        self._stop.set()
        self._thread.join(2.0)
        last = self.sampler.last
        if self._channel is not None:
            with suppress(*_STORE_GONE):
                self._publish(replace(last, beat=last.beat + 1, ended=True))
        self._left.set()

    def explain(self, error: BaseException) -> None:
        """Ends all ranks if one of them caused an error of a collective, or a launcher's SIGTERM.

        Call it in the main thread of a process that will end. A preempted rank publishes that it
        ended, so that no other rank mistakes its end for a cause.
        """
        frame = self._frame_of(error)
        if frame is None:
            return
        preempted = isinstance(error, PreemptedError)
        self.sampler.fail(frame, in_collective=not preempted)
        try:
            if preempted:
                self._beat()
                self._decide(0.0)
                self.stop()
            else:
                self._channel.add("alarm", 1)
                time.sleep(EXPLAIN_S)  # the thread ends this process
                if self._channel.add("alarm", 0) >= _VERDICT:
                    self._thread.join(REPORT_S)  # it collects the stacks of other ranks
        except _STORE_GONE:
            if not preempted:  # else rank 0 may have got the same signal
                gone = "run: expected rank 0 to be alive, but its store is gone."
                self.write(blamed(0, gone), {}, {})
                _exit()

    def _frame_of(self, error: BaseException) -> FrameType | None:
        """Frame of an error that another rank may have caused; ignores SIGTERM from then on."""
        frame = _last_frame(error.__traceback__) if os.getpid() == self.sampler.last.pid else None
        preempted = isinstance(error, PreemptedError)
        if frame is None or self._channel is None or (self._is_ours and preempted):
            return None
        if not preempted and not (isinstance(error, RuntimeError) and is_collective(frame)):
            return None
        if not self._is_ours:
            # torchrun sends SIGTERM to all ranks once one has died; the report comes first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return frame

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Hook for an uncaught exception, for ranks that our launcher did not start."""
        self._frame_of(error)  # before torchrun's SIGTERM arrives
        self._shown(kind, error, trace)
        self.explain(error)

    # ---- the thread

    def _run(self) -> None:
        while not self._stop.is_set():  # at once: a rank may die within the first seconds
            if self._channel is not None or self._connect():
                self._look()
            self._rounds += 1
            self._stop.wait(POLL_S)

    def _watch_store(self) -> None:
        """Ends this rank when rank 0, which serves the store, has been silent for the timeout.

        A request to the store of a stopped process waits without end. Polls are counted, because a
        clock also runs while this process is stopped.
        """
        rounds, polls = -1, 0
        while polls * POLL_S <= self._timeout_s + STACKS_S:
            if self._left.wait(POLL_S) or not self._thread.is_alive():
                return
            polls = polls + 1 if rounds == self._rounds else 0
            rounds = self._rounds
        first = replace(self._first, silent_s=polls * POLL_S)
        seen = {0: first, self._rank: self.sampler.sample()}
        verdict = judge(seen, self._timeout_s)
        if verdict is not None:
            self.write(verdict, {self._rank: stacks()}, seen)
            _exit()

    def _look(self) -> None:
        self.sampler.sample(is_asked=self._asked)
        try:
            self._beat()
        except RuntimeError:  # the store is gone
            alone = {self._rank: self.sampler.last}
            verdict = judge(alone, self._timeout_s)
            if verdict is not None:
                self.write(verdict, {self._rank: stacks()}, alone)
                _exit()

    def _connect(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        ready = getattr(dist, "is_initialized", None)
        if ready is None or not ready():
            return False
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        launch, timeout = self._launch, timedelta(seconds=30)
        host, port = launch.master_addr or "", launch.master_port or 0  # `start` looks for both
        try:
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError:
            self._stop.set()  # the ranks used another rendezvous
            self._left.set()
            return False
        # The next request would read the answer of one that timed out.
        store.set_timeout(timedelta(seconds=self._timeout_s + 60.0))
        self._channel = PrefixStore(PREFIX.format(launch.start), store)
        return True

    def _beat(self) -> None:
        self._publish(self.sampler.last)
        alarm = self._channel.add("alarm", 0)
        self._asked = alarm > 0
        if alarm >= _VERDICT:
            self._end_with_judge()
        if self.sampler.last.failed or self._is_judge():
            self._decide()

    def _decide(self, lost_s: float = LOST_S) -> None:
        seen = self._read()
        verdict = judge(seen, self._timeout_s, self._launch.world_size, lost_s)
        if verdict is not None:
            self._report(verdict, seen)

    def _publish(self, position: Position) -> None:
        self._channel.set(str(self._rank), position.to_json())

    def _is_judge(self) -> bool:
        """Whether no lower rank answers. Usually rank 0 does, so this asks once."""
        for rank in range(self._rank):
            seen = self._read(only=rank).get(rank)
            self._first = seen if seen and rank == 0 else self._first
            if seen is None or (seen.silent_s <= SETTLED_S and not seen.ended):
                return False
        return True

    def _read(self, only: int | None = None) -> dict[int, Position]:
        """All ranks that have published a position."""
        ranks = range(self._launch.world_size) if only is None else (only,)
        positions = _published(self._channel, ranks, self._heard)
        return {position.rank: self._see(position) for position in positions}

    def _see(self, position: Position) -> Position:
        now = time.monotonic()
        beat, heard = self._heard.get(position.rank, (-1, now))
        if beat != position.beat:
            heard = now
        self._heard[position.rank] = position.beat, heard
        is_sure = not self._is_ours or now - heard > min(LAUNCHER_S, self._timeout_s)
        local = position.host == self.sampler.last.host and is_sure
        gone = local and not position.ended and not _lives(position.pid)
        return replace(position, silent_s=now - heard, gone=gone)

    # ---- the end

    def _report(self, verdict: HangError, seen: dict[int, Position]) -> NoReturn:
        """Collects the stacks of all ranks, writes the report and ends."""
        self._channel.set("verdict", json.dumps([verdict.rank, str(verdict)]))
        if self._channel.add("alarm", _VERDICT) >= 2 * _VERDICT:
            self._end_with_judge()  # another rank reports
        texts = {self._rank: stacks()}
        answer = {rank for rank, one in seen.items() if one.silent_s <= SETTLED_S and not one.gone}
        deadline = time.monotonic() + STACKS_S
        while answer - texts.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in answer - texts.keys():
                if self._channel.check([f"stacks/{rank}"]):
                    texts[rank] = self._channel.get(f"stacks/{rank}").decode()
        for rank in seen.keys() - texts.keys():
            texts[rank] = self._ask_by_signal(seen[rank])
        self.write(verdict, texts, seen)
        with suppress(*_STORE_GONE):
            self._channel.set("written", "")
        _exit()

    def write(self, verdict: HangError, texts: dict[int, str], seen: dict[int, Position]) -> None:
        """Writes the report, and reports the verdict to the user."""
        lines = [str(verdict), "", *describe(seen)]
        for rank in sorted(texts):
            lines += ["", f"---- stacks of rank {rank} ----", texts[rank].rstrip()]
        with suppress(OSError):  # a full disk; the verdict is printed without it
            self.hang_file.parent.mkdir(parents=True, exist_ok=True)
            self.hang_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._tell(verdict)

    def _tell(self, verdict: HangError) -> None:
        verdict.add_note(f"The stacks of all ranks: {self.hang_file}")
        for call in _on_hang:
            call(verdict)
        if not self._is_ours:
            sys.stderr.write("\n".join([f"HangError: {verdict}", *verdict.__notes__, ""]))

    def _end_with_judge(self) -> NoReturn:
        """Publishes this rank's stacks, and ends once the judge has written the report."""
        self._channel.set(f"stacks/{self._rank}", stacks())
        with suppress(*_STORE_GONE):
            if self.sampler.last.failed and not self._is_ours:  # it printed an error
                self._tell(blamed(*json.loads(self._channel.get("verdict"))))
            wait_until(lambda: self._channel.check(["written"]), REPORT_S)
        _exit()

    def _ask_by_signal(self, at: Position) -> str:
        """Stacks of a rank of this machine whose watchdog cannot run."""
        log_dir, is_here = self._launch.log_dir, at.host == self.sampler.last.host
        if not self._is_ours or log_dir is None or not is_here or not _lives(at.pid):
            return NO_STACKS
        if psutil.Process(at.pid).status() == psutil.STATUS_STOPPED:
            return "(none: the process is stopped, by SIGSTOP or a debugger)\n"
        return stacks_of(at.pid, rank_log(log_dir, at.rank))


# ---- what the judge and the launcher read of other ranks

NO_STACKS = "(none: the rank does not answer)\n"


def stacks_of(pid: int, log: Path) -> str:
    """Python stacks of a rank of our launcher, which writes them into its log on a signal."""
    with suppress(OSError), log.open("rb") as file:
        before = file.seek(0, os.SEEK_END)
        os.kill(pid, STACKS_SIGNAL)
        wait_until(lambda: os.fstat(file.fileno()).st_size > before, 1.0)
        time.sleep(0.1)  # until all is written
        return file.read().decode(errors="replace") or NO_STACKS
    return NO_STACKS


def describe(seen: dict[int, Position]) -> list[str]:
    """One line per rank, and its last events."""
    lines: list[str] = []
    for rank in sorted(seen):
        lines.append(f"rank {rank}: {seen[rank].words}")
        if events := seen[rank].events:
            lines.append(f"    last events: {'; '.join(events)}")
    return lines


def read_positions(store: Any, world_size: int) -> dict[int, Position]:
    """Last positions of the ranks of a launch, for the launcher, which serves the store."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    channel = PrefixStore(PREFIX.format(0), store)
    return {place.rank: place for place in _published(channel, range(world_size), ())}


def _published(channel: Any, ranks: Iterable[int], known: Container[int]) -> Iterator[Position]:
    """Positions of the ranks that have published one, as those that are known have."""
    keys = [str(rank) for rank in ranks if rank in known or channel.check([str(rank)])]
    texts = channel.multi_get(keys) if keys else []
    return filter(None, map(Position.from_json, texts))


# ---- the watchdog of this process

_current: list[Watchdog] = []
_on_hang: list[Callable[[HangError], None]] = []
WATCHED: list[Sequence[str]] = []  # units of each model of this process


def start(
    launch: LaunchEnvironment, timeout_s: float | None = None, log_dir: Path | None = None
) -> Watchdog | None:
    """Starts the watchdog of a launched rank, or returns the running one; None without a store.

    Args:
        launch: Launch environment of the rank.
        timeout_s: A rank that waits longer is stuck; None: the launch's value, or ten minutes.
        log_dir: Folder of the report; None: that of the launch, or the working directory.
    """
    if not _current and launch.master_addr is not None and launch.master_port is not None:
        file = (log_dir or launch.log_dir or Path()) / "hang.txt"
        timeout_s = timeout_s or launch.timeout_s or DEFAULT_TIMEOUT_S
        _current.append(Watchdog(launch, timeout_s, file))
        _current[0].start()
    return current()


def phase(name: str, step: int = 0, *, limited: bool = True) -> None:
    """Set the current activity of this process: "" for the user's code.

    Args:
        name: Description of the activity.
        step: Step, counted from 1.
        limited: Whether the timeout applies; never to the user's code.
    """
    if _current:
        _current[0].sampler.phase(name, step, limited=limited)


def on_hang(call: Callable[[HangError], None]) -> None:
    """Adds a function that the judging rank calls before all ranks end."""
    _on_hang.append(call)


def explain(error: BaseException) -> None:
    """See `Watchdog.explain`; does nothing in a process without a watchdog."""
    if _current:
        _current[0].explain(error)


def current() -> Watchdog | None:
    """The watchdog of this process, if it has one."""
    return _current[0] if _current else None


def watch(ring: EventRing, titles: Sequence[str]) -> None:
    """Adds a model's events to the positions; starts the watchdog in a launched process.

    Args:
        ring: Event ring of the model's engine.
        titles: Titles of its units, in plan order.
    """
    WATCHED.append(titles)
    dist = sys.modules.get("torch.distributed")
    launch = read_launch_environment() if dist is not None and dist.is_initialized() else None
    dog = current() if launch is None else start(launch)
    if dog is not None:
        dog.sampler.watch(ring, titles)


def _last_frame(trace: TracebackType | None) -> FrameType | None:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return frames[-1] if frames else None


def _daemon(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _exit() -> NoReturn:
    """End at once; flush the output unless a stuck thread has locked the stream."""
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(0.5)
    os._exit(HangError.exit_code)


# ---- sampling


class PositionSampler:
    """Samples where this process is: its event rings, its phase, the stacks of its threads.

    Nothing is added to the training. A wait in a collective is an event that has begun and not
    ended, or an innermost frame in our transports or in torch.distributed.
    """

    def __init__(self, rank: int, pid: int) -> None:
        self.last = Position(rank, pid, _host())
        self._phase = ("", 0, False)
        self._models: list[_ModelEvents] = []
        self._key: Any = None
        self._since = time.perf_counter()
        self._cpu_s = 0.0
        self._failed_at: str | None = None
        self._in_collective = False
        self._main = threading.main_thread().ident or 0

    def phase(self, name: str, step: int = 0, *, limited: bool = True) -> None:
        """Set the current activity of this process; see `phase` of this module."""
        self._phase = (name, step, limited and bool(name))

    def watch(self, ring: EventRing, titles: Sequence[str]) -> None:
        """Adds the events of a model.

        Args:
            ring: Event ring of the model's engine.
            titles: Titles of its units, in plan order.
        """
        self._models.append(_ModelEvents(len(self._models), weakref.ref(ring), tuple(titles)))

    def fail(self, frame: FrameType, *, in_collective: bool) -> None:
        """Fixes the position at this frame: an error has unwound the main thread's stack."""
        self._failed_at, self._in_collective = _line_of(frame), in_collective

    def sample(self, *, is_asked: bool = False) -> Position:
        """Takes a new sample.

        Args:
            is_asked: Include the calls of the last two steps, as if this rank made no progress.
        """
        threads = sys._current_frames()
        threads.pop(threading.get_ident(), None)
        blocked = any(map(is_collective, threads.values()))
        in_engine = self._failed_at is not None or any(map(_in_engine, threads.values()))
        models = [*self._models]  # the main thread may add one
        rings = [model.ring() for model in models]
        begun = [ring.open if ring and in_engine else None for ring in rings]
        where = self._failed_at or _line_of(threads.get(self._main))
        del threads
        name, step, limited = self._phase
        now, cpu_s = time.perf_counter(), time.clock_gettime(time.pthread_getcpuclockid(self._main))
        key = (tuple(ring.count if ring else 0 for ring in rings), begun, name, step, blocked)
        moved = blocked and not any(begun) and cpu_s - self._cpu_s > MOVED_S
        if key != self._key or moved:
            self._key, self._since = key, now
        self._cpu_s = cpu_s
        since_s = now - self._since
        position = Position(
            rank=self.last.rank,
            pid=self.last.pid,
            host=self.last.host,
            beat=self.last.beat + 1,
            step=step,
            doing=f"a collective of {name or where}" if blocked else name or "the user's code",
            where=where,
            since_s=since_s,
            kind=EXCHANGE if blocked else "",
            limited=blocked or limited,
            failed=self._in_collective,
        )
        tells = is_asked or since_s > STANDS_S
        for model, entry in zip(models, begun, strict=True):
            position = model.add_to(position, entry, tells=tells)
        self.last = position
        return position


@dataclass(frozen=True)
class _ModelEvents:
    """Adds the events of one model to a position."""

    index: int
    ring: weakref.ref[EventRing]
    titles: tuple[str, ...]

    def add_to(self, position: Position, begun: Entry | None, *, tells: bool) -> Position:
        """The position with the awaited event and the last events.

        Args:
            position: Position without events.
            begun: Event that has begun and not ended.
            tells: Whether to add the calls of the last two steps.
        """
        ring, titles = self.ring(), self.titles
        entries = ring.copy() if ring is not None else []
        if not entries and begun is None:
            return position
        step = begun[1] if begun is not None else entries[-1][1]
        settled = begun is None and entries[-1][0].kind is EventKind.SETTLE
        changes: dict[str, Any] = {"step": position.step or step + 1 + settled}
        if begun is not None:
            waits = awaited(begun, entries, titles, self.index)
            changes = waits | changes | {"limited": True}
        issued = dict(position.streams)
        for at in (step - 1, step) if tells else ():
            issued |= streams(entries, titles, self.index, at)
        return replace(
            position,
            **changes,
            streams=issued,
            events=[in_words(e, at, titles) for e, at in entries[-LAST_EVENTS:]],
        )


def is_collective(frame: FrameType) -> bool:
    """Whether the innermost frame waits for other ranks."""
    file = frame.f_code.co_filename
    return file.startswith(_COLLECTIVES) or "/torch/distributed/" in file


def _in_engine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _RUNTIME:
        frame = frame.f_back
    return frame is not None


def _line_of(frame: FrameType | None) -> str:
    """`corpus.py:57 in read`: the innermost line of the user's code, or the innermost of all."""
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
    """Python stacks of all threads except this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)


def _host() -> str:
    """Hash that is equal for processes that share process ids; does not identify the machine."""
    name = f"{socket.gethostname()}{Path('/proc/self/ns/pid').readlink()}"
    return f"{zlib.crc32(name.encode()):08x}"
