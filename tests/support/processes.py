"""Waits for files and processes, with a deadline that fails the test."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits until the condition holds; otherwise raises AssertionError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    """Returns a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finished(
    *words: object, code: int = 0, run: Callable[..., Any] = subprocess.run, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command, checks its exit code and returns its output."""
    options = {"capture_output": True, "text": True, "timeout": 110, "check": False, **how}
    done = run([*map(str, words)], **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def python(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python like `finished`."""
    return finished(sys.executable, *words, **how)


def newest_child() -> psutil.Process:
    """Returns the process that this one started last."""
    return max(psutil.Process().children(), key=psutil.Process.create_time)


def close_folders(below: Path) -> None:
    """Closes open folders of this process at or below a path, which releases their locks."""
    for descriptor in [*Path("/proc/self/fd").iterdir()]:
        # The descriptor of the listing is already closed.
        if descriptor.is_dir() and descriptor.readlink().is_relative_to(below.resolve()):
            os.close(int(descriptor.name))


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pids(folder: Path, num_ranks: int) -> list[int]:
    """Waits for and returns the process ids that ranks of `fork_and_sleep` wrote."""
    files = [folder / f"pids_{rank}" for rank in range(num_ranks)]
    wait_until(lambda: all(file.exists() for file in files), 90, "every rank has started")
    return [int(word) for file in files for word in file.read_text().split()]


def assert_all_end(pids: Iterable[int], timeout_s: float = 30.0) -> None:
    """Waits until no process of `pids` is left."""
    wait_until(lambda: not any(map(is_running, pids)), timeout_s, "all processes have ended")
