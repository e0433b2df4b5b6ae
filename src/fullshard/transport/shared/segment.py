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
import platform
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.config import host_memory
from fullshard.errors import EngineError, FullshardError, OutOfMemoryError

POPULATE_WRITE, REMOVE = 23, 9  # madvise, since Linux 5.14 and 2.6
CONNECT_TIMEOUT_S = 60.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

TellAll = Callable[[Any], list[Any]]  # what every part says, to every part; a collective


@dataclass(frozen=True)
class Host:
    """Where a process runs: those with equal hosts can map each other's memory."""

    boot: str
    pid_namespace: int
    net_namespace: int

    @classmethod
    def here(cls) -> Host | None:
        """This process's; None where the system cannot share memory this way.

        Counters without locks rely on the order in which x86 makes writes visible.
        """
        if platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
            return None
        try:
            os.close(os.memfd_create("fullshard"))
            os.close(os.pidfd_open(os.getpid()))  # sandboxes refuse it
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
        """(numel,) of a dtype, `start` bytes from the beginning: with a storage of its own.

        So saving a part does not save the whole segment.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start)

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
    part: int, num_bytes: int, own: Sequence[tuple[int, int]], tell_all: TellAll
) -> Segment:
    """Make one segment for all parts. A collective.

    Args:
        part: This process's; part 0 makes it.
        num_bytes: The same in every part.
        own: Ranges (start, number of bytes) whose pages this part takes.
        tell_all: Lets all parts hear what each says.

    Raises:
        OutOfMemoryError: The host has too little memory; raised in every part.
        EngineError: A part could not map the segment; raised in every part.
    """
    made, failure = _attempt(_create, num_bytes) if part == 0 else (None, None)
    descriptor, listener = made or (None, None)
    said = tell_all(None if listener is None else listener.getsockname())
    if listener is not None:
        with listener:
            _, failure = _attempt(_send, listener, descriptor, len(said) - 1)
    elif said[0] is not None:
        descriptor, failure = _attempt(_receive, said[0])
    segment = None
    if descriptor is not None:
        needed = len(said) * sum(length for _, length in own)
        segment, late = _attempt(_map, descriptor, num_bytes, needed)
        failure = failure or late
        os.close(descriptor)
    _agree(failure, num_bytes, tell_all)  # all have looked at what is left; now they take it
    assert segment is not None
    _, failure = _attempt(lambda: [segment.populate(*pages) for pages in own])
    _agree(failure, num_bytes, tell_all)
    return segment


def _attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, OSError | None]:
    """(result, None), or (None, why not): what fails on one rank is told to all."""
    try:
        return function(*args), None
    except OSError as error:
        return None, error


def _agree(failure: Exception | None, num_bytes: int, tell_all: TellAll) -> None:
    """All parts go on, or none does."""
    failures = tell_all(None if failure is None else (getattr(failure, "errno", 0), str(failure)))
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
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = -1
    try:
        listener.bind(f"\0fullshard-{secrets.token_hex(16)}")
        listener.listen()
        listener.settimeout(CONNECT_TIMEOUT_S)
        descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        listener.close()
        if descriptor >= 0:
            os.close(descriptor)
        raise
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


def _map(descriptor: int, num_bytes: int, needed_bytes: int) -> Segment:
    available = host_memory.available_bytes()
    if needed_bytes > available:  # Linux would end some process instead
        left = f"{os.strerror(errno.ENOMEM)}, {available / 2**30:.3f} GiB left"
        raise OSError(errno.ENOMEM, left)
    mapping = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Segment(mapping)
