"""The lock of a run's folder: one live run per folder, on this host and on others.

    flock(FOLDER/.lock)       locked from before the first write to the end of the process that
    flock(FOLDER)             started the run; the kernel releases both however that process dies
    beats: mtime of .lock     every BEAT_S; seen by hosts to which the file system carries no locks

The lock of the folder itself stays if somebody removes .lock. Network file systems may have none.

A folder that is moved keeps its lock: the process that moves it locks the new folder too.

An object store has no locks. `StoreLock` is an object that is written again every BEAT_S.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fullshard.config.regular_files import open_regular
from fullshard.errors import CheckpointError, ConfigError
from fullshard.observe.metrics import repeated, wait_until

LOCK = ".lock"
BEAT_S = 5.0
WATCH_S = 3 * BEAT_S
TOGETHER_S = 1.0  # between the writes of two starts that saw no lock
OUTPUT_DIR = "training.output_dir"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class RunLock(contextlib.ExitStack):
    """Holds a folder for this process until `close`.

    Args:
        folder: Exists.
        key: Key of the configuration that names the folder, for errors.

    Raises:
        ConfigError: Another live process has the lock; names that process.
    """

    def __init__(self, folder: Path, key: str = OUTPUT_DIR) -> None:
        super().__init__()
        self._file = folder / LOCK
        self._descriptor = _open(self._file, os.O_RDWR | os.O_CREAT)
        self.callback(os.close, self._descriptor)
        try:
            itself = os.open(folder, _FOLDER)
            self.callback(os.close, itself)
            if not (_is_ours(itself) and self._is_free()):
                raise held_elsewhere(folder, key)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _signed(_kernel()), 0)
        except BaseException:
            self.close()
            raise
        self.callback(self._empty)
        self.callback(repeated(partial(os.utime, self._descriptor), BEAT_S))

    def _empty(self) -> None:
        """An empty file: the next process need not watch for beats."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def _is_free(self) -> bool:
        """Takes the lock; watches for beats if the last holder ran under another kernel."""
        last = os.pread(self._descriptor, 1000, 0).decode(errors="replace").split("\n")
        try:
            taken = _take(self._descriptor)
        except OSError:  # a file system without locks
            return not (last[0] and _changes(partial(_touched, self._file)))
        if not taken or _is_replaced(self._file, self._descriptor):
            return False
        known = last[0] == "" or _kernel() in last
        return known or not _changes(partial(_touched, self._file))


class StoreLock(contextlib.ExitStack):
    """Holds the checkpoints of a run in an object store for this process until the block ends.

    Args:
        place: The place of the checkpoints.
        token: Identifies the holder.

    Raises:
        CheckpointError: The store cannot be written.
        ConfigError: Another live process has the lock; names that process.
    """

    def __init__(self, place: Path, token: str) -> None:
        super().__init__()
        self._place, self._token, self._count = place, token, 0
        self._file, look = place / LOCK, partial(_read, place / LOCK)
        try:
            is_held = any(look()) and _changes(look) and any(look())
            if not is_held:
                self._write()
                time.sleep(TOGETHER_S)
            if is_held or not is_holder(place, token):
                raise ConfigError(
                    "training.checkpoint_dir: expected a folder to which no other run saves, got "
                    f"'{place}', whose run is still active ({look()[0]}). Use another folder or "
                    "stop that run."
                )
        except OSError as error:
            raise CheckpointError(
                f"training.checkpoint_dir: expected a store that can be read and written, got "
                f"'{place}': {error.strerror or error}."
            ) from error
        self.callback(self._remove)
        self.end_beats = self.callback(repeated(self._beat, BEAT_S))

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if is_holder(self._place, self._token):
                self._file.write_bytes(b"")  # no owner; an owner writes a removed file again

    def _write(self) -> None:
        self._count += 1
        self._file.write_bytes(_signed(self._token) + b"%d" % self._count)

    def _beat(self) -> None:
        if is_holder(self._place, self._token):  # else a start saw no beats of a suspended machine
            self._write()


def _signed(word: str) -> bytes:
    """The holder of a lock, in words and by a word that identifies it."""
    return f"process {os.getpid()} on host {socket.gethostname()}\n{word}\n".encode()


def is_holder(place: Path, token: str) -> bool:
    """Whether the lock of a place in a store is that of this holder.

    A removed lock has no other owner; the owner's next beat writes it again.
    """
    lines = _read(place / LOCK)
    return not lines or lines[1:2] == (token,)


def _read(file: Path) -> tuple[str, ...]:
    """Lines of a store's lock; none if no process has it."""
    try:
        return tuple(file.read_bytes().decode(errors="replace").split("\n"))
    except FileNotFoundError:
        return ()


def is_held(folder: Path) -> bool:
    """Whether a live process of this host, or of one that shares its locks, has locked a folder."""
    for look in (partial(_open, folder / LOCK, os.O_RDONLY), partial(os.open, folder, _FOLDER)):
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            closing.callback(os.close, descriptor := look())
            if not _take(descriptor, fcntl.LOCK_SH, tries=1):  # which others may have, too
                return True
    return False


def wait_until_free(folder: Path, timeout_s: float = 60.0) -> None:
    """Waits for the ranks of a launch that is being replaced."""
    wait_until(lambda: not is_held(folder), timeout_s, 0.2)


def held_elsewhere(folder: Path, key: str = OUTPUT_DIR) -> ConfigError:
    """The error that names the holder of a folder."""
    try:
        holder = (folder / LOCK).read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        holder = ""
    who = holder or "it is still starting, or its .lock was removed"
    return ConfigError(
        f"{key}: expected a folder that no run uses, got '{folder}', whose run is still active "
        f"({who}). Use another folder or stop that run."
    )


def _open(file: Path, flags: int) -> int:
    """Opens a lock; a link is an error, because it may lead to a file of the user."""
    return open_regular(file, flags | os.O_NOFOLLOW)


def _take(descriptor: int, kind: int = fcntl.LOCK_EX, tries: int = 5) -> bool:
    """Whether the lock is ours now; `is_held` of another process has it for a moment."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05 * bool(left))
        else:
            return True
    return False


def _is_ours(folder: int) -> bool:
    """Whether the lock of the folder itself is ours now, or its file system has none."""
    with contextlib.suppress(OSError):
        return _take(folder)
    return True


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


def _changes(look: Callable[[], object]) -> bool:
    """Whether a holder renews its lock while we watch; clocks of hosts are not compared."""
    seen = look()
    return wait_until(lambda: look() != seen, WATCH_S, BEAT_S / 5)


def _touched(file: Path) -> int:
    with file.open("rb") as opened:  # opening queries a network file system again
        return os.fstat(opened.fileno()).st_mtime_ns
