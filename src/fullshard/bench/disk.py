"""The disk's own speed: plain files of a rank, read and written directly."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
CHUNK = 8 * MIB


class Disk:
    """Plain files of a rank's share, which show the disk's own speed."""

    def __init__(self, folder: Path, num_bytes: int, rank: int) -> None:
        self.path = folder / f"plain-{rank}"
        self._chunks = max(1, num_bytes // CHUNK)
        self._buffer = mmap.mmap(-1, CHUNK)  # aligned to pages, as O_DIRECT requires
        self._buffer.write(os.urandom(CHUNK))

    def write(self) -> None:
        """Writes all bytes, then syncs."""
        descriptor = self._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(self._chunks):
            os.write(descriptor, self._buffer)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self) -> None:
        """Reads all bytes."""
        descriptor = self._open(os.O_RDONLY)
        while os.readv(descriptor, [self._buffer]):
            pass
        os.close(descriptor)

    def replay(self, num_bytes: int) -> None:
        """Reads so many bytes, again from the start where the file ends."""
        self._repeat(os.O_RDONLY, os.preadv, num_bytes)

    def rewrite(self, num_bytes: int) -> None:
        """Writes so many bytes in place, then syncs."""
        self._repeat(os.O_WRONLY, os.pwritev, num_bytes)

    def _repeat(self, flags: int, act: Callable[..., int], num_bytes: int) -> None:
        descriptor, buffer = self._open(flags), mmap.mmap(-1, CHUNK)
        for at in range(-(-num_bytes // CHUNK)):
            act(descriptor, [buffer], at % self._chunks * CHUNK)
        if flags == os.O_WRONLY:
            os.fdatasync(descriptor)
        os.close(descriptor)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs and the like
            return os.open(self.path, flags, 0o644)
