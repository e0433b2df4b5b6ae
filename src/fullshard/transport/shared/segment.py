"""Memory that the ranks of one host map: anonymous files, whose descriptors pass through a socket.

    part 0   memfd_create --> listens      sends the descriptor to each other part
    part k                    connects <--

An anonymous file (memfd) has no name. The kernel frees it when the last process that maps it ends,
in any way, and the size of /dev/shm does not limit it. Every part first writes its own pages. They
are then allocated on its own memory node, and a host with too little memory raises an error in all
ranks now, instead of ending one of them with SIGBUS later.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.config import host_memory
from fullshard.errors import EngineError, OutOfMemoryError, cure_of, raise_together

POPULATE_WRITE, REMOVE = 23, 9  # madvise, since Linux 5.14 and 2.6
CONNECT_TIMEOUT_S = 60.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

TellAll = Callable[[Any], list[Any]]  # returns the values of all parts; a collective


@dataclass(frozen=True)
class Host:
    """Where a process runs. Processes with equal hosts can map each other's memory."""

    boot: str
    pid_namespace: int
    net_namespace: int

    @classmethod
    def here(cls) -> Host | None:
        """Returns the host of this process; None if the system cannot share memory this way.

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
    """Shared memory of all parts.

    Attributes:
        mapping: The mapped file.
        memory: (num_bytes,) uint8.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def view(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) of a dtype, `start` bytes from the beginning of the segment.

        It has a storage of its own, so that saving it does not save the whole segment.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=start)

    def populate(self, start: int, num_bytes: int) -> None:
        """Allocates the pages of a range.

        Raises:
            OSError: There is too little memory.
        """
        if num_bytes == 0:
            return
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.mapping.madvise(POPULATE_WRITE, low, start + num_bytes - low)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
            self.memory[start : start + num_bytes].zero_()  # an older kernel

    def give_back(self, start: int, num_bytes: int) -> None:
        """Frees the whole pages of a range; their contents are lost."""
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if high > low:
            self.mapping.madvise(REMOVE, low, high - low)


def share_segment(
    part: int, num_bytes: int, own: Sequence[tuple[int, int]], tell_all: TellAll
) -> Segment:
    """Creates one segment for all parts. A collective.

    Args:
        part: This process's part; part 0 creates the segment.
        num_bytes: Size of the segment; equal in all parts.
        own: Ranges (start, number of bytes) whose pages this part allocates.
        tell_all: Returns the values of all parts.

    Raises:
        OutOfMemoryError: The host has too little memory; raised in every part.
        EngineError: A part could not map the segment; raised in every part.
    """

    def together(function: Callable[..., Any], *args: Any) -> Any:
        return raise_together(tell_all, part, partial(_typed, num_bytes, part, function, *args))

    with ExitStack() as opened:
        made = together(lambda: _create(opened, num_bytes) if part == 0 else None)
        addresses = tell_all(None if made is None else made[1].getsockname())
        if made is None:
            descriptor = together(_receive, opened, addresses[0])
        else:
            descriptor, listener = made
            together(_send, listener, descriptor, len(addresses) - 1)
        needed = len(addresses) * sum(length for _, length in own)
        segment = together(_map, descriptor, num_bytes, needed)
    together(lambda: [segment.populate(*pages) for pages in own])  # after all saw what is left
    return segment


def _typed(num_bytes: int, part: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; the system's errors get a type and say what to do."""
    try:
        return function(*args)
    except OSError as error:
        lacks = error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT)
        kind = OutOfMemoryError if lacks else EngineError
        raise kind(
            f"transport shared: expected {num_bytes / 2**30:.3f} GiB of memory for what the ranks "
            f"of this host share; rank {part} of them got: {error}. "
            f"{cure_of(error, 'Use fewer parameters or more hosts')}, or transport=direct, which "
            "shares no memory."
        ) from error


def _create(opened: ExitStack, num_bytes: int) -> tuple[int, socket.socket]:
    """Creates the file, and a socket where other parts fetch its descriptor."""
    listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(f"\0fullshard-{secrets.token_hex(16)}")
    listener.listen()
    listener.settimeout(CONNECT_TIMEOUT_S)
    descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    opened.callback(os.close, descriptor)
    os.ftruncate(descriptor, num_bytes)
    return descriptor, listener


def _send(listener: socket.socket, descriptor: int, count: int) -> None:
    """Sends the descriptor to every other part."""
    while count:
        connection, _ = listener.accept()
        with connection:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(raw)[1] != os.getuid():
                continue  # another user's process that guessed the address
            socket.send_fds(connection, [b"."], [descriptor])
            count -= 1


def _receive(opened: ExitStack, address: Any) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(address)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError(errno.ECONNRESET, "no descriptor came")
    opened.callback(os.close, descriptors[0])
    return descriptors[0]


def _map(descriptor: int, num_bytes: int, needed_bytes: int) -> Segment:
    available = host_memory.available_bytes()
    if needed_bytes > available:  # Linux would end some process instead
        left = f"{os.strerror(errno.ENOMEM)}, {available / 2**30:.3f} GiB left"
        raise OSError(errno.ENOMEM, left)
    mapping = mmap.mmap(descriptor, num_bytes)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Segment(mapping)
