"""Ranks that are forked from a process that has imported what they import.

    launcher ---- server     imports while the launcher prepares the run, then waits for jobs
       |             `------ between ----- rank
       `------ adopts -----------------------'     when the process between has ended

A launcher that adopts ranks (as their subreaper) supervises them like those that it started. The
server forks only while it has one thread; a launcher that gets no rank starts a process by itself.
Ranks on accelerators are not forked, because CUDA does not work in forked processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.environment import add_variables, current_variables

WORD = "--forked"  # in the place of a rank's module
_PR_SET_CHILD_SUBREAPER = 36
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
        modules: What the server imports.
        defaults: Variables of the ranks where the environment has none.
    """

    def __init__(self, entry: str, modules: Sequence[str], defaults: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[Any] = subprocess.Popen(
                [sys.executable, "-u", "-m", entry, str(os.getpid()), WORD, *modules],
                stdin=theirs.fileno(),
                env={**defaults, **current_variables()},
                process_group=0,
            )

    def fork(
        self, words: Sequence[str], variables: Mapping[str, str], *files: int
    ) -> Adopted | None:
        """A rank, the leader of its process group; None if the server cannot fork.

        Args:
            words: Its module and arguments.
            variables: Its environment, beside that of the launcher.
            files: Its standard output and error.
        """
        with contextlib.suppress(OSError), _adopting():
            job = json.dumps([*words, dict(variables)]).encode()
            socket.send_fds(self._socket, [job], files)
            if pid := int(self._socket.recv(64) or 0):
                return Adopted(pid)
        return None

    def close(self) -> None:
        """Ends the server; its ranks stay."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def become_rank(modules: Sequence[str]) -> list[str]:
    """Imports modules, then serves jobs; returns in each rank that it forks, with its words."""
    jobs = socket.socket(fileno=os.dup(0))
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # ranks share these objects, and need not go through them
    while True:
        job, files, *_ = socket.recv_fds(jobs, _JOB_BYTES, 2)
        if not job:
            os._exit(0)
        pid = _fork() if len(list(Path("/proc/self/task").iterdir())) == 1 else 0
        if pid is None:
            break
        for file in files:
            os.close(file)
        jobs.send(str(pid).encode())
    jobs.close()
    *words, variables = json.loads(job)
    add_variables(variables)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
        os.dup2(file, number)
        os.close(file)
    return words


def _fork() -> int | None:
    """Forks a process whose parent has ended; returns its id, or None in it."""
    reader, writer = os.pipe()
    if between := os.fork():
        os.close(writer)
        os.waitpid(between, 0)
        with os.fdopen(reader, "rb") as told:
            return int(told.read() or 0)
    os.close(reader)
    parent = os.getpid()
    if rank := os.fork():
        with contextlib.suppress(BaseException):
            os.setpgid(rank, rank)
            os.write(writer, str(rank).encode())
        os._exit(0)
    os.close(writer)
    while os.getppid() == parent:
        os.sched_yield()
    return None
