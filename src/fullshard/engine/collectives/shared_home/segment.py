"""Memory that the ranks of one host map: anonymous files, their descriptors passed by socket.

    part 0   memfd_create --> listens      one answer a rank: the descriptor
    part k                    connects <--

An anonymous file (memfd) has no name: when the last process that maps it ends, in whatever way, it
is gone. It is no subject to the size of /dev/shm. Every part writes its own pages first, so that
they lie on its own memory node, and so that a host without enough memory says so now, in all ranks,
and does not end one of them with SIGBUS later.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fullshard.errors import EngineError, FullshardError, OutOfMemoryError

POPULATE_WRITE, REMOVE = 23, 9  # madvise, since Linux 5.14 and 2.6
CONNECT_TIMEOUT_S = 60.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

CGROUP = Path("/sys/fs/cgroup")

Exchange = Callable[[Any], list[Any]]  # what every part says, to every part; a collective


@dataclass(frozen=True)
class Host:
    """Where a process runs: those with equal hosts can map each other's memory."""

    boot: str
    pid_namespace: int
    net_namespace: int

    @classmethod
    def here(cls) -> Host | None:
        """This process's; None where the system cannot share memory this way."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return None
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            inodes = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net")]
        except OSError:
            return None
        return cls(boot, *inodes)


class Segment:
    """Shared memory of all parts, as bytes.

    Attributes:
        memory: (num_bytes,) uint8.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def view(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) of a dtype, `start` bytes from the beginning."""
        return self.memory[start : start + numel * dtype.itemsize].view(dtype)

    @property
    def mapping(self) -> mmap.mmap:
        return self._mapping

    def populate(self, start: int, num_bytes: int) -> None:
        """Take the pages of a range now.

        Raises:
            OSError: There is not so much memory.
        """
        if num_bytes == 0:
            return
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mapping.madvise(POPULATE_WRITE, low, start + num_bytes - low)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
            self.memory[start : start + num_bytes].zero_()  # an older kernel

    def give_back(self, start: int, num_bytes: int) -> None:
        """Return the whole pages of a range, whose contents are lost."""
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if high > low:
            self._mapping.madvise(REMOVE, low, high - low)


def share_segment(
    part: int, num_bytes: int, own: Sequence[tuple[int, int]], exchange: Exchange
) -> Segment:
    """Make one segment for all parts. A collective.

    Args:
        part: This process's; part 0 makes it.
        num_bytes: The same in every part.
        own: Ranges (start, number of bytes) whose pages this part takes.
        exchange: Lets all parts hear what each says.

    Raises:
        OutOfMemoryError: In every part, where the host has not so much memory.
        EngineError: In every part, where one could not map it.
    """
    descriptor, listener = -1, None
    failure: Exception | None = None
    if part == 0:
        try:
            descriptor, listener = _create(num_bytes)
        except OSError as error:
            failure = error
    said = exchange(listener.getsockname() if listener is not None else None)
    if said[0] is not None:
        try:
            if listener is None:
                descriptor = _receive(said[0])
            else:
                _send(listener, descriptor, len(said) - 1)
        except OSError as error:
            failure = error
    segment = None
    if descriptor >= 0:
        try:
            segment = _map(descriptor, num_bytes, own, len(said))
        except OSError as error:
            failure = error
        os.close(descriptor)
    if listener is not None:
        listener.close()
    _agree(failure, num_bytes, exchange)
    assert segment is not None
    return segment


def _agree(failure: Exception | None, num_bytes: int, exchange: Exchange) -> None:
    """All parts go on, or none does."""
    failures = exchange(None if failure is None else (getattr(failure, "errno", 0), str(failure)))
    found = [(part, why) for part, why in enumerate(failures) if why is not None]
    if not found:
        return
    part, (number, text) = found[0]
    kind: type[FullshardError] = EngineError
    if number in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
        kind = OutOfMemoryError
    raise kind(
        f"transport shared: expected {num_bytes / 2**30:.3f} GiB of memory for what the ranks of "
        f"this host share; rank {part} of them got: {text}. Use fewer parameters or more hosts, "
        "or transport=direct, which shares no memory."
    )


def _create(num_bytes: int) -> tuple[int, socket.socket]:
    descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0fullshard-{secrets.token_hex(16)}")
    listener.listen()
    listener.settimeout(CONNECT_TIMEOUT_S)
    return descriptor, listener


def _send(listener: socket.socket, descriptor: int, count: int) -> None:
    """Answer every other part."""
    while count:
        connection, _ = listener.accept()
        with connection:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(raw)[1] != os.getuid():
                continue  # another user's process that guessed the address
            socket.send_fds(connection, [b"."], [descriptor])
            count -= 1


def _receive(address: Any) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(address)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError(errno.ECONNRESET, "no descriptor came")
    return descriptors[0]


def _map(
    descriptor: int, num_bytes: int, own: Sequence[tuple[int, int]], num_parts: int
) -> Segment:
    needed = num_parts * sum(length for _, length in own)
    if needed > (available := _available_bytes()):  # Linux would end some process instead
        left = f"{os.strerror(errno.ENOMEM)}, {available / 2**30:.3f} GiB left"
        raise OSError(errno.ENOMEM, left)
    mapping = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    segment = Segment(mapping)
    for start, length in own:
        segment.populate(start, length)
    return segment


def _available_bytes() -> int:
    """Memory that this process and its like may still take."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or another cgroup version
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        available = min(available, limit - used)
    return available
