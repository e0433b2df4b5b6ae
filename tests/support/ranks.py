"""A standing pool of ranks: real processes that live as long as the test session.

    def body(size):                       # a module-level function of the test file
        ...                               # gloo group is up, seeded, one thread
        return value                      # anything that pickles

    def test_something(ranks):
        values = ranks(2)(body, 16)       # one value a rank, in rank order

    @on_ranks(2)                          # a test that is its own body
    def test_something_else(tmp_path):
        ...

Ranks are forked from a server that has imported torch (support/preload.py), so starting one takes
milliseconds. The body is sent as (file, name) and imported on the rank. If a rank raises, hangs or
dies, the error shows the state of every rank, the pool is killed, and the next call starts another.
"""

import contextlib
import functools
import inspect
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import forked
from support.rank_worker import Body, Seat, serve

START_TIMEOUT_S = 180.0
GRACE_S = 3.0  # after the first failure, how long the other ranks may take to report theirs
DUMP_S = 2.0  # how long a rank may take to write its stacks


class RankError(Exception):
    """One or more ranks raised, hung or died; the message joins the reports of all ranks."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    seat: Seat


class RankPool:
    """`world_size` processes in one gloo group, started at the first call."""

    def __init__(self, world_size: int, warning_filters: Iterable[str]) -> None:
        self.world_size = world_size
        self._warning_filters = tuple(warning_filters)
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._num_calls = 0

    def __call__(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Runs `function(*args)` on every rank.

        Args:
            function: a module-level function of a test file.
            *args: picklable, the same for every rank.
            timeout: seconds after which the ranks' stacks are shown and the ranks are killed.

        Returns:
            The value of each rank, in rank order.

        Raises:
            RankError: a rank raised, hung or died.
        """
        self._num_calls += 1
        body = _body_of(function, args, self._num_calls)
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _collect
                    worker.pipe.send(body)
            reports = self._collect(timeout)
            self._raise_failures(reports, function.__qualname__, timeout)
        except BaseException:
            self.kill()
            raise
        return [pickle.loads(reports[rank][1]) for rank in range(self.world_size)]

    @property
    def process_ids(self) -> list[int]:
        """Ids of living ranks, in rank order; empty before the first call and after a failure."""
        return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """Asks the ranks to end, and kills those that do not."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.process.join(timeout=5.0)
        self.kill()

    def kill(self) -> None:
        """Kills the ranks; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        context = forked.server()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        common = self._folder, self._warning_filters, dict(os.environ)
        # Not a file, which ranks would poll every 10 ms for each other's keys, for each group.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(self.world_size):
                seat = Seat(rank, self.world_size, listener.getsockname()[1], *common)
                ours, theirs = context.Pipe()
                given = seat, theirs, listener if rank == 0 else None
                process = context.Process(target=serve, args=given, daemon=True)
                process.start()
                theirs.close()  # else a dead rank's pipe would never read as closed
                self._workers.append(_Worker(process, ours, seat))
        reports = self._collect(START_TIMEOUT_S)
        starts = {k: ("value", b"") if r == "ready" else r for k, r in reports.items()}
        self._raise_failures(starts, "start of the pool", START_TIMEOUT_S)

    def _collect(self, timeout: float) -> dict[int, Any]:
        """Drains every rank's pipe; after the first failure the others get a short grace period."""
        deadline = time.monotonic() + timeout
        pending = {worker.pipe: worker for worker in self._workers}
        reports: dict[int, Any] = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), left):
                assert isinstance(pipe, Connection)
                worker = pending.pop(pipe)
                try:
                    report = pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    report = ("died", f"ended with exit code {worker.process.exitcode}\n")
                reports[worker.seat.rank] = report
                if report[0] in ("error", "died"):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for worker in pending.values():
            reports[worker.seat.rank] = ("stuck", _stacks(worker))
        return reports

    def _raise_failures(self, reports: dict[int, Any], name: str, timeout: float) -> None:
        """Joins the reports, those of ranks that raised or died before those of waiting ranks."""
        failed = sorted(
            ((kind == "stuck", rank, kind, text) for rank, (kind, text) in reports.items())
        )
        failed = [entry for entry in failed if entry[2] != "value"]
        if not failed:
            return
        if all(kind == "stuck" for _, _, kind, _ in failed):
            head = f"{name} did not return within {timeout:g} s on {len(failed)} rank(s)"
        else:
            head = f"{name} failed on {sum(not stuck for stuck, *_ in failed)} rank(s)"
        headings = {"error": "raised", "died": "died", "stuck": "was still running, its stacks"}
        parts = [
            f"---- rank {rank} of {self.world_size} {headings[kind]} ----\n{text}"
            for _, rank, kind, text in failed
        ]
        raise RankError("\n".join([head, *parts]))


class RankPools:
    """One pool per world size; idle ranks sleep in a read."""

    def __init__(self, warning_filters: Iterable[str]) -> None:
        self._warning_filters = tuple(warning_filters)
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """Returns the pool of `world_size` ranks."""
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, self._warning_filters)
        return self._pools[world_size]

    def close(self) -> None:
        """Ends every pool."""
        for pool in self._pools.values():
            pool.close()


def on_ranks(size: int | str, *, timeout: float = 60.0) -> Callable[[Any], Any]:
    """Makes a test that runs on every rank, with the fixtures and parameters that it names.

    Args:
        size: Number of ranks, or the name of its parameter, which the body need not take.
        timeout: Seconds.
    """

    def wrap(body: Callable[..., None]) -> Callable[..., None]:
        taken = list(inspect.signature(body).parameters)

        def test(ranks: RankPools, **given: Any) -> None:
            number = given[size] if isinstance(size, str) else size
            ranks(number)(body, *(given[name] for name in taken), timeout=timeout)

        functools.update_wrapper(test, body)
        names = dict.fromkeys(["ranks", *([size] if isinstance(size, str) else []), *taken])
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        test.body_on_ranks = body
        return test

    return wrap


def _body_of(function: Callable[..., Any], args: tuple[Any, ...], number: int) -> Body:
    function = inspect.unwrap(function)
    if "<" in function.__qualname__:
        raise TypeError(
            f"ranks: expected a module-level function, got {function.__qualname__}: "
            "ranks import it by file and name. Move it to the top of the test file."
        )
    file = str(Path(inspect.getfile(function)).resolve())
    return Body(file, function.__module__, function.__qualname__, pickle.dumps(args), number)


def _stacks(worker: _Worker) -> str:
    """Asks a rank that does not answer for the stacks of its threads."""
    if worker.process.pid is None or worker.process.exitcode is not None:
        return f"ended with exit code {worker.process.exitcode}\n"
    size = -1
    os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + DUMP_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        written = worker.seat.dump_file.stat().st_size if worker.seat.dump_file.exists() else 0
        if written == size and written > 0:
            break
        size = written
    text = worker.seat.dump_file.read_text() if worker.seat.dump_file.exists() else ""
    return text or "(no stacks were written)\n"
