"""Fork ranks from a process that has already imported their modules.

    launcher ---- server     imports while the launcher prepares the run, then waits for jobs
       |             `------ between ----- rank
       `------ adopts -----------------------'     when the process between has ended

A launcher that adopts ranks (as their subreaper) supervises them like those that it started. A rank
sends its id to the launcher, and continues after the launcher's answer. The server forks only while
it has one thread; a launcher that gets no rank closes the server and starts processes directly.
Ranks on accelerators are not forked, because CUDA does not work in forked processes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.environment import add_variables, current_variables

WORD = "--forked"  # in the place of a rank's module
PR_SET_CHILD_SUBREAPER = 36
_JOB_BYTES = 1 << 16


@dataclass
class Adopted:
    """A process that we adopted, with what supervisors use of `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Reaps it once it has ended."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """The launcher's end.

    Args:
        entry: Module of the rank's frame.
        modules: Modules that the server imports.
        defaults: Variables of the ranks where the environment has none.
    """

    def __init__(self, entry: str, modules: Sequence[str], defaults: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[Any] = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", entry, str(os.getpid()), WORD, *modules],
                stdin=theirs.fileno(),
                env={**defaults, **current_variables()},
                process_group=0,
            )

    def wait(self, stop: Sequence[int]) -> None:
        """Wait until the server has imported; close it if that takes too long.

        Args:
            stop: Signals that were caught; the first ends the wait.
        """
        for _ in range(1200):  # a minute
            if stop or select.select([self._socket], [], [], 0.05)[0]:
                return
        self.close()

    def fork(
        self, words: Sequence[str], variables: Mapping[str, str], *files: int
    ) -> Adopted | None:
        """A rank, the leader of its process group; None if the server cannot fork.

        Args:
            words: Its module and arguments.
            variables: Environment variables in addition to those of the launcher.
            files: Its standard output and error.
        """
        job = json.dumps([*words, dict(variables)]).encode()
        ours, theirs = socket.socketpair()
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            with ours:
                with theirs:
                    socket.send_fds(self._socket, [job], [theirs.fileno(), *files])
                ours.settimeout(10.0)
                pid = int(ours.recv(64) or 0)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fails if not ours
                ours.send(b"1")
                return Adopted(pid)
        except OSError:
            return self.close()
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """Ends the server; its ranks stay."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def become_rank(modules: Sequence[str]) -> list[str]:
    """Imports modules, then serves jobs; returns in each rank that it forks, with its words."""
    jobs = socket.socket(fileno=os.dup(0))
    sys.excepthook = lambda *_: None  # a started rank raises the error too, and reports it
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # ranks share these objects, and need not go through them
    jobs.send(b"1")
    while True:
        job, files, *_ = socket.recv_fds(jobs, _JOB_BYTES, 3)
        if not job:
            os._exit(0)
        if len(list(Path("/proc/self/task").iterdir())) == 1 and _forked():
            break
        for file in files:
            os.close(file)
    jobs.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.write(0, str(os.getpid()).encode())
    if not os.read(0, 1):
        os._exit(1)
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)  # under `nohup` the launcher does
    for name, number in (("stdout", 1), ("stderr", 2)):  # the server's know if its files can seek
        raw = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, sys.stdin.encoding, write_through=True))
    if random := sys.modules.get("numpy.random"):
        random.seed()  # else every rank would draw the same numbers
    *words, variables = json.loads(job)
    add_variables(variables)
    return words


def _forked() -> bool:
    """Forks a process whose parent has ended; whether this is that process."""
    if between := os.fork():
        os.waitpid(between, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        os.sched_yield()
    os.setpgid(0, 0)
    return True
