"""The lock of a run's folder: one live run per folder, on this host and on others.

    flock(FOLDER/.lock)       held from before the first write to the end of the process that
                              started the run; the kernel releases it however that process dies
    beats: mtime of .lock     every BEAT_S; seen by hosts to which the file system carries no locks

A folder that is moved keeps its lock: the process that moves it locks the new folder too.

An object store has no locks. `StoreLock` is an object there that is written anew every BEAT_S.
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
from fullshard.errors import CheckpointError, ConfigError

LOCK = ".lock"
BEAT_S = 5.0
WATCH_S = 3 * BEAT_S
TOGETHER_S = 1.0  # between the writes of two starts that saw no lock


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


class StoreLock(contextlib.AbstractContextManager["StoreLock"]):
    """Holds the checkpoints of a run in an object store for this process until the block ends.

    Args:
        place: The place of the checkpoints.
        token: Identifies the holder.

    Raises:
        CheckpointError: The store cannot be written.
        ConfigError: Another live process holds the place; names that process.
    """

    def __init__(self, place: Path, token: str) -> None:
        self._file = place / LOCK
        self._holder = f"process {os.getpid()} on host {socket.gethostname()}\n{token}\n"
        self._place, self._token, self._count = place, token, 0
        self._released = threading.Event()
        try:
            if not self._is_free():
                raise ConfigError(
                    f"training.checkpoint_dir: expected a place to which no run saves, got "
                    f"'{place}', whose run is still going on ({_read(self._file)[0]}). Name "
                    "another place or stop that run."
                )
        except OSError as error:
            raise CheckpointError(
                f"training.checkpoint_dir: expected a store that can be read and written, got "
                f"'{place}': {error.strerror or error}. Name another place."
            ) from error
        self._beats = threading.Thread(target=self._beat, name="lock of the store", daemon=True)
        self._beats.start()

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            if is_holder(self._place, self._token):
                self._file.unlink(missing_ok=True)

    def _is_free(self) -> bool:
        seen, deadline = {_read(self._file)}, time.monotonic() + WATCH_S
        while len(seen) == 1 and any(*seen) and time.monotonic() < deadline:
            time.sleep(BEAT_S / 5)
            seen.add(_read(self._file))
        if len(seen) > 1 and any(_read(self._file)):
            return False
        self._write()
        time.sleep(TOGETHER_S)
        return is_holder(self._place, self._token)

    def _write(self) -> None:
        self._count += 1
        self._file.write_bytes(f"{self._holder}{self._count}".encode())

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if not is_holder(self._place, self._token):
                    return  # taken by a start that saw no beats, as of a suspended machine
                self._write()


def is_holder(place: Path, token: str) -> bool:
    """Whether the lock of a place in a store is that of this holder.

    A lock that was removed is nobody else's: the holder's next beat writes it again.
    """
    return _read(place / LOCK)[1:2] in ((), (token,))


def _read(file: Path) -> tuple[str, ...]:
    """Lines of a store's lock; none if nobody holds it."""
    try:
        return tuple(file.read_bytes().decode(errors="replace").split("\n"))
    except FileNotFoundError:
        return ()


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
