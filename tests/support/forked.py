"""Forks Python processes in milliseconds from a server that has their imports.

    Popen([sys.executable, "-u", "-m", MODULE, ...])     as subprocess.Popen, a real child
      |                                                  with its environment and streams
      `-> fork server (support/preload.py) -> one that ends -> the process, which we adopt;
                                                               its ranks come from a fork of it

A test only needs `from support import forked as subprocess`. The server's modules are imported from
the start, so tests of imports or of a new interpreter use the real subprocess. Commands of other
programs are started as usual.
"""

import atexit
import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

import pytest

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "CompletedProcess",
    "Popen",
    "TimeoutExpired",
    "module",
    "run",
]
PR_SET_CHILD_SUBREAPER = 36
RANK_ENTRY = "fullshard.launch.rank_entry"
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def server() -> Any:
    """Starts the server if there is none; a context in which processes are forked from it."""
    multiprocessing.set_forkserver_preload(["support.preload"])
    with pytest.MonkeyPatch.context() as patch:
        # Before Python 3.13.1 the server finds modules only this way, and reports no error.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def leave_server() -> None:
    """Closes the inherited pipe whose end ends the server."""
    found = forkserver._forkserver  # type: ignore[attr-defined]
    if found._forkserver_alive_fd is not None:
        os.close(found._forkserver_alive_fd)
        found._forkserver_alive_fd = None


class Popen(subprocess.Popen):
    """A forked Python process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[0] != sys.executable:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        # In the order of subprocess: cwd, env; both ends of three pipes; the process group.
        cwd, env, (*pipes,), own_session, group = rest[4], rest[5], rest[9:15], *rest[-2:]
        ours, theirs = multiprocessing.Pipe()
        environment = dict(os.environ if env is None else env)
        job = (
            [os.fspath(word) for word in args[1:]],
            environment,
            str(cwd or Path.cwd()),
            0 if own_session else group,  # tests need only the process group of a session
            os.getpid(),
            theirs,
        )
        with _adopting():
            between = server().Process(target=_become, args=job)
            between.start()
            theirs.close()
            for number, end in enumerate((pipes[0], pipes[3], pipes[5])):
                reduction.send_handle(ours, number if end == -1 else end, between.pid)
            self.pid = ours.recv()
            between.join()
        ours.close()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: list[str], *, timeout: float, **options: Any) -> CompletedProcess[Any]:
    """Like subprocess.run."""
    check = options.pop("check", False)
    if options.pop("capture_output", False):
        options |= {"stdout": PIPE, "stderr": PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def module(*words: object, timeout: float = 110.0) -> CompletedProcess[str]:
    """Runs `python -m` with these arguments until it ends."""
    command = [sys.executable, "-m", *map(str, words)]
    return run(command, timeout=timeout, capture_output=True, text=True)


def result(*words: object, **how: Any) -> Any:
    """Returns the JSON that a command prints; it must end without an error."""
    done = module(*words, "--json", **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Forks ranks and references that fullshard starts, and torchrun's workers."""
    from fullshard.launch import fork_server, spawn
    from fullshard.verify import check as verify

    names = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})
    with pytest.MonkeyPatch.context() as patch:
        for module in (spawn, fork_server, verify):
            patch.setattr(module, "subprocess", names)
        if (torchrun := sys.modules.get(TORCHRUN)) is not None:
            patch.setattr(torchrun, "Popen", Popen)
        yield


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of grandchildren whose parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _become(
    words: list[str], env: dict[str, str], cwd: str, group: int, parent: int, pipe: Connection
) -> None:
    """Forks the final process from the server's child."""
    streams = [reduction.recv_handle(pipe) for _ in range(3)]
    if os.fork():
        os._exit(0)
    while os.getppid() != parent:
        os.sched_yield()
    leave_server()
    if group >= 0:
        os.setpgid(0, group)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None
    if RANK_ENTRY not in words:
        _serve()
    pipe.send(os.getpid())
    pipe.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  for life
    raw = open(1, "wb", 0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(raw, write_through=True)
    with launching():
        os._exit(_run(words))


def _serve() -> None:
    """Forks a server from this process: only its descendants can become its children."""
    address = f"\0fullshard tests {os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, held = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(held)
            try:
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    found = forkserver._forkserver  # type: ignore[attr-defined]
    found._forkserver_address, found._forkserver_alive_fd = address, held
    found._forkserver_pid = pid


def _run(words: list[str]) -> int:
    """Interprets a Python command line; returns its exit code after the exit handlers."""
    code = 0
    try:
        _interpret(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as an interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _interpret(words: list[str]) -> None:
    warnings.resetwarnings()
    first = [os.getcwd()]  # noqa: PTH109
    while words[0] in ("-u", "-P", "-W"):
        flag = words.pop(0)
        if flag == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
        first = [] if flag == "-P" else first
    # A new interpreter would also import it a second time, but later.
    warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
    path = os.environ.get("PYTHONPATH")
    sys.path[:0] = [*first, *(path.split(os.pathsep) if path else ())]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
