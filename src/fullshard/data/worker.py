"""Processes that make a rank's batches during the step before, or parts of the data on all cores.

    rank      | step 0           | step 1           | ...
    worker    | makes 1 |        | makes 2 |        | ...

The worker of a rank imports neither torch nor transformers and needs about 28 MiB; one that makes
conversations has transformers and a tokenizer, about 512 MiB. It ends with the rank, also if the
rank is killed; it ignores signals that stop a run, because the rank handles them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from subprocess import PIPE, Popen
from typing import Any

from fullshard.config.host_memory import available_bytes
from fullshard.errors import HangError
from fullshard.launch.exit_codes import STOP_SIGNALS, describe_status, die_with_parent

Request = tuple[bool, int]  # of a BatchMaker
PROCESS_BYTES = 1 << 29  # of a process with transformers, a tokenizer and a part of the data

# With the rank's path, in whatever folder it runs.
_PROGRAM = """
import sys
sys.path[:] = sys.argv[2:]
from fullshard.data.worker import serve
serve(int(sys.argv[1]))
"""


class Worker:
    """Calls a function in a process of its own, one call ahead.

    Args:
        function: The function, which is pickled.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the process inherits it
        try:
            words = ("-P", "-c", _PROGRAM, str(os.getpid()), *filter(None, sys.path))
            self._process: Any = Popen([sys.executable, *words], stdin=PIPE, stdout=PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.end = weakref.finalize(self, _end, self._process)
        self._ahead: Any = None
        self._send(function)

    def take(self, request: Any, ahead: Any) -> Any:
        """Returns the answer to a request, and begins the one that will probably follow.

        Raises:
            HangError: The process has ended.
            Exception: Whatever the function raised.
        """
        if self._ahead != request:
            if self._ahead is not None:
                self._receive()
            self._send(request)
        self._ahead = ahead
        if isinstance(answer := self._receive(ahead), Exception):
            raise answer
        return answer

    def _send(self, message: object) -> None:
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, ahead: Any = None) -> Any:
        """The next answer; the following request is sent before the answer is read."""
        if ahead is not None:
            self._send(ahead)
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):  # the latter: killed while it sent an answer
            raise self._ended() from None

    def _ended(self) -> HangError:
        advice = "See its messages above, and start again."
        if (status := self._process.wait()) == -signal.SIGKILL:
            advice = "Memory may have run out: free some, or use fewer cores (taskset)."
        return HangError(
            "data: expected data from the process that prepares it, but it "
            f"{describe_status(status)}. {advice}"
        )


def _end(process: Any) -> None:
    process.kill()
    process.communicate()  # to the end of its pipes, which are closed then


def on_all_cores(
    function: Callable[[Any], Any], requests: Sequence[Any], num_processes: int | None = None
) -> Iterator[Any]:
    """Calls a function with every request; yields each request with its answer, soonest first.

    Args:
        function: The function, which is pickled if there are several processes.
        requests: Its arguments.
        num_processes: Largest number of processes; None: one per core, if they fit in memory.
    """
    most = min(len(os.sched_getaffinity(0)), available_bytes() // PROCESS_BYTES)
    count = min(num_processes or most, len(requests))
    if count <= 1:
        yield from ((request, function(request)) for request in requests)
        return
    workers = [Worker(function) for _ in range(count)]
    idle = list(workers)  # one per thread

    def ask(request: Any) -> Any:
        worker = idle.pop()
        try:
            return request, worker.take(request, None)
        finally:
            idle.append(worker)

    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(ask, request) for request in requests]
        try:
            yield from (one.result() for one in as_completed(asked))
        finally:  # after an error, without the answers that are missing
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()


def serve(parent: int) -> None:
    """Answers requests until standard input ends, or the process that makes them."""
    die_with_parent(parent)
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries is not an answer
    try:
        function = pickle.load(source)
        while True:
            request = pickle.load(source)
            try:
                found = function(request)
            except Exception as error:  # noqa: BLE001  raised again by the rank
                found = error
            pickle.dump(found, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):  # the rank has ended
        os._exit(0)
