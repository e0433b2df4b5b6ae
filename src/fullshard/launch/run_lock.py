"""The lock of a run's folder: one live run per folder, on this host and on others.

    flock(FOLDER/.lock)       held from before the first write to the end of the process that
                              started the run; the kernel releases it however that process dies
    beats: mtime of .lock     every BEAT_S; seen by hosts to which the file system carries no locks

A folder that is moved keeps its lock: the process that moves it locks the new folder too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from pathlib import Path

from fullshard.config.regular_files import open_regular
from fullshard.errors import ConfigError

LOCK = ".lock"
BEAT_S = 5.0
WATCH_S = 3 * BEAT_S


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """Holds a folder for this process until `release`.

    Args:
        folder: Exists.

    Raises:
        ConfigError: Another live process holds it; names that process.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._descriptor = _open(self._file, os.O_RDWR | os.O_CREAT)
        self._released = threading.Event()
        try:
            if not self._is_free():
                raise held_elsewhere(folder)
            holder = f"process {os.getpid()} on host {socket.gethostname()}\n{_kernel()}\n"
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._beats = threading.Thread(target=self._beat, name="lock of the run", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Releases the folder."""
        if not self._released.is_set():
            self._released.set()
            self._beats.join()
            with contextlib.suppress(OSError):  # empty: the next process need not watch for beats
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_free(self) -> bool:
        """Takes the lock; watches for beats if the last holder ran under another kernel."""
        last = os.pread(self._descriptor, 1000, 0).decode(errors="replace").split("\n")
        try:
            taken = _take(self._descriptor)
        except OSError:  # a file system without locks
            return not (last[0] and _beats(self._file))
        if not taken or _is_replaced(self._file, self._descriptor):
            return False
        return last[0] == "" or _kernel() in last or not _beats(self._file)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


def is_held(folder: Path) -> bool:
    """Whether a live process of this host, or of one that shares its locks, holds a folder."""
    try:
        descriptor = _open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _take(descriptor, tries=1)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def wait_until_free(folder: Path, timeout_s: float = 60.0) -> None:
    """Waits for the ranks of a launch that is being replaced."""
    deadline = time.monotonic() + timeout_s
    while is_held(folder) and time.monotonic() < deadline:
        time.sleep(0.2)


def held_elsewhere(folder: Path) -> ConfigError:
    """The error that names the holder of a folder."""
    try:
        holder = (folder / LOCK).read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        holder = ""
    return ConfigError(
        f"training.output_dir: expected a folder that no run uses, got '{folder}', whose run is "
        f"still going on ({holder or 'it is just starting'}). Name another folder or stop that run."
    )


def _open(file: Path, flags: int) -> int:
    """Opens a lock; a link is an error, because it may lead to a file of the user."""
    return open_regular(file, flags | os.O_NOFOLLOW)


def _take(descriptor: int, tries: int = 5) -> bool:
    """Whether the lock is ours now; `is_held` of another process has it for a moment."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05 * bool(left))
        else:
            return True
    return False


def _is_replaced(file: Path, descriptor: int) -> bool:
    """Whether another start moved the folder between our opening and our locking of the file."""
    try:
        return not os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return True


def _kernel() -> str:
    """Identifies the running kernel, whose locks all of its processes see."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def _beats(file: Path) -> bool:
    """Whether a holder touches the file while we watch; clocks of hosts are not compared."""
    seen = {_touched(file)}
    deadline = time.monotonic() + WATCH_S
    while len(seen) == 1 and time.monotonic() < deadline:
        time.sleep(BEAT_S / 5)
        seen.add(_touched(file))
    return len(seen) > 1


def _touched(file: Path) -> int:
    with file.open("rb") as opened:  # opening asks a network file system anew
        return os.fstat(opened.fileno()).st_mtime_ns
