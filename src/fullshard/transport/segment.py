"""Memory that the ranks of one host map, and their progress counters in it.

Segments are anonymous files, whose descriptors pass through a socket.

    part 0   memfd_create --> listens      sends the descriptor to each other part
    part k                    connects <--

An anonymous file (memfd) has no name. The kernel frees it when the last process that maps it ends,
in any way, and the size of /dev/shm does not limit it. Every part first writes its own pages. They
are then allocated on its own memory node, and a host with too little memory raises an error in all
ranks now, instead of ending one of them with SIGBUS later.

[Note: progress]
A board has the progress counters of the ranks:

    line of rank 0   begun | done | ready | pulled | ...      each counter on a cache line
    line of rank 1   begun | done | ready | pulled | ...      of its own; only its rank writes it

A waiting rank watches its peers. It stops waiting for a peer that has ended, or that is ahead in
another counter: all ranks pass the same points in one order, so a peer that is ahead elsewhere will
never arrive. (Gathers and reductions may change places.)

[Note: counters]
One process writes a counter in shared memory and others wait for it. A waiter spins for some
microseconds, then sleeps in the kernel (futex) until the writer changes the counter. This needs
Linux on x86-64, where writes become visible in program order.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from fullshard.config import host_memory
from fullshard.errors import EngineError, HangError, OutOfMemoryError, cure_of, raise_together
from fullshard.transport.base import CURE, check_process

POPULATE_WRITE, REMOVE = 23, 9  # madvise, since Linux 5.14 and 2.6
CONNECT_TIMEOUT_S = 60.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

AllValues = Callable[[Any], list[Any]]  # returns the values of all parts; a collective


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


# ---- shared memory


class Segment:
    """Shared memory of all parts.

    Attributes:
        mapping: The mapped file.
        memory: (num_bytes,) uint8.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        _MAPPINGS.add(mapping)

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


_MAPPINGS: WeakSet[mmap.mmap] = WeakSet()
LOST: WeakSet[mmap.mmap] = WeakSet()  # those of before this process was forked


def _shut() -> None:
    """Take access from a forked process. See [Note: forked processes] in transport/base.py."""
    for mapping in _MAPPINGS:
        protect(mapping, 0)
        LOST.add(mapping)


def protect(mapping: mmap.mmap, access: int) -> None:
    """Limits what this process can do with a mapping to `mmap.PROT_READ`, or 0: nothing."""
    _mprotect(ctypes.c_void_p(start_of(mapping)), ctypes.c_size_t(len(mapping)), access)


def start_of(mapping: mmap.mmap) -> int:
    """The address of the first byte of a mapping."""
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


_mprotect = ctypes.CDLL(None).mprotect
os.register_at_fork(after_in_child=_shut)


def share_segment(
    part: int, num_bytes: int, own: Sequence[tuple[int, int]], all_values: AllValues
) -> Segment:
    """Creates one segment for all parts. A collective.

    Args:
        part: This process's part; part 0 creates the segment.
        num_bytes: Size of the segment; equal in all parts.
        own: Ranges (start, number of bytes) whose pages this part allocates.
        all_values: Returns the values of all parts.

    Raises:
        OutOfMemoryError: The host has too little memory; raised in every part.
        EngineError: A part could not map the segment; raised in every part.
    """

    def together(function: Callable[..., Any], *args: Any) -> Any:
        return raise_together(all_values, part, partial(typed, num_bytes, part, function, *args))

    with ExitStack() as opened:
        made = together(lambda: _create(opened, num_bytes) if part == 0 else None)
        addresses = all_values(None if made is None else made[1].getsockname())
        if made is None:
            descriptor = together(_receive, opened, addresses[0])
        else:
            descriptor, listener = made
            together(_send, listener, descriptor, len(addresses) - 1)
        needed = len(addresses) * sum(length for _, length in own)
        segment = together(_map, descriptor, num_bytes, needed)
    together(lambda: [segment.populate(*pages) for pages in own])  # after all read the free memory
    return segment


def typed(num_bytes: int, part: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; system errors become typed errors with a remedy."""
    try:
        return function(*args)
    except OSError as error:
        lacks = error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EFBIG)
        kind = OutOfMemoryError if lacks else EngineError
        raise kind(
            f"transport shared: expected {num_bytes:,} bytes of memory shared by the ranks of "
            f"this host; rank {part} of them got: {error}. "
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


# ---- progress counters ---------------------------------------------------------------------------

CACHE_LINE = 64
TIMEOUT_S = 1800.0  # torch's limit for a collective; the watchdog's is shorter


class Mark(IntEnum):
    """The counters of a rank.

    BEGUN: started forwards of the whole model; the rank's parts were written before.
    DONE: forwards whose weights the rank no longer reads.
    READY: reductions whose gradients the rank has collected.
    PULLED: reductions that the rank has finished reading.
    SUMMED: small sums to which the rank has contributed its vector.
    PLACED: gathers of offloaded weights whose parts the rank has loaded.
    FETCHED: gathers that the rank has finished copying.
    """

    BEGUN = 0
    DONE = 1
    READY = 2
    PULLED = 3
    SUMMED = 4
    PLACED = 5
    FETCHED = 6


_PHASES = {
    Mark.BEGUN: "the beginning of a forward",
    Mark.READY: "a reduction in backward",
    Mark.SUMMED: "a sum over all ranks (the end of a backward, a norm, a mean)",
}
LINE_BYTES = CACHE_LINE * len(Mark)


class Board:
    """The counters of all parts, and the processes to watch while waiting.

    Args:
        segment: At least `bytes_of(num_parts)` zeros at its start.
        part: This process's.
        ranks: Global ranks, by part.
        pids: Process ids, by part.
    """

    def __init__(
        self, segment: Segment, part: int, ranks: Sequence[int], pids: Sequence[int]
    ) -> None:
        self.part, self._ranks, self._pids = part, ranks, pids
        self._others = [i for i in range(len(ranks)) if i != part]
        self._poll = select.poll()
        self._parts = {os.pidfd_open(pids[i]): i for i in self._others}  # by process descriptor
        for descriptor in self._parts:
            self._poll.register(descriptor, select.POLLIN)
        cell = partial(ctypes.c_uint32.from_buffer, segment.mapping)
        starts = [index * LINE_BYTES for index in range(len(ranks))]
        self._counters = [[Counter(cell(at + CACHE_LINE * m)) for m in Mark] for at in starts]
        self.check_process = partial(check_process, pids[part])

    def __del__(self) -> None:
        for descriptor in self._parts:
            os.close(descriptor)

    @staticmethod
    def bytes_of(num_parts: int) -> int:
        """The bytes that a board needs in its segment."""
        return LINE_BYTES * num_parts

    def advance(self, mark: Mark, value: int) -> None:
        """Advance a counter of this part."""
        self.check_process()
        self._counters[self.part][mark].advance(value)

    def await_all(self, mark: Mark, value: int, doing: str) -> None:
        """Wait until every other part's counter is at least `value`.

        Raises:
            EngineError: A peer has ended, or is ahead elsewhere.
            HangError: Half an hour has passed.
        """
        for part in self._others:
            counter = self._counters[part][mark]
            if counter.value < value:
                until = time.monotonic() + TIMEOUT_S
                counter.wait(value, partial(self._check_peers, (mark, value), part, doing, until))

    def has_all(self, mark: Mark, value: int) -> bool:
        """Whether every other part's counter is at least `value`."""
        return all(self._counters[part][mark].value >= value for part in self._others)

    def value(self, mark: Mark) -> int:
        """The value of a counter of this part."""
        return self._counters[self.part][mark].value

    def _check_peers(self, goal: tuple[Mark, int], awaited: int, doing: str, until: float) -> None:
        """Raise an error if an awaited part will never arrive."""
        mark, value = goal

        def is_late(part: int) -> bool:
            return self._counters[part][mark].value < value

        for part in (self._parts[descriptor] for descriptor, _ in self._poll.poll(0)):
            if is_late(part):  # a part that arrived and then ended is fine
                raise EngineError(
                    f"{doing}: expected rank {self._ranks[part]} (process {self._pids[part]}) to "
                    "take part; it has ended. See its output."
                )
        for part, other in product(self._others, _PHASES):
            is_further = self._counters[part][other].value > self.value(other)
            is_apart = other is Mark.READY and mark in (Mark.PLACED, Mark.FETCHED)
            if other is not mark and not is_apart and is_further and is_late(part):
                raise EngineError(
                    f"{doing}: expected rank {self._ranks[part]} to come here; it waits at "
                    f"{_PHASES[other]}, which this rank did not reach. {CURE}"
                )
        if time.monotonic() > until:
            raise HangError(
                f"{doing}: expected rank {self._ranks[awaited]} within {TIMEOUT_S:.0f} s; it did "
                "not come. It computes or waits elsewhere."
            )


# ---- counters with one writer and sleeping waiters

_FUTEX = 202  # the system call's number on x86-64
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
SPINS = 60  # spins before sleeping, about 10 us, for peers that arrive soon
SLEEP_S = 0.05  # maximum sleep between checks of peers


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_SLEEP = (ctypes.c_long * 2)(0, int(SLEEP_S * 1e9))  # struct timespec


class Counter:
    """A monotonic counter with one writer, visible to all processes that map it.

    Args:
        cell: 32 bits of shared memory, aligned.
    """

    __slots__ = ("_address", "_cell")

    def __init__(self, cell: ctypes.c_uint32) -> None:
        self._cell = cell
        self._address = ctypes.c_void_p(ctypes.addressof(cell))

    @property
    def value(self) -> int:
        return self._cell.value

    def advance(self, value: int) -> None:
        """Set the counter and wake waiters."""
        self._cell.value = value
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def wait(self, target: int, look: Callable[[], None]) -> None:
        """Wait until the counter is at least `target`.

        Args:
            target: Awaited value.
            look: Called after every sleep; raises an error if waiting is futile.
        """
        cell = self._cell
        for _ in range(SPINS):
            if cell.value >= target:
                return
        while (seen := cell.value) < target:
            if not self._sleep(seen):
                look()

    def _sleep(self, seen: int) -> bool:
        """Sleep while the counter equals `seen`; False after `SLEEP_S` without a change."""
        value, limit = ctypes.c_uint32(seen), ctypes.byref(_SLEEP)
        left = _syscall(_FUTEX, self._address, _WAIT, value, limit, None, 0)
        return left == 0 or ctypes.get_errno() != errno.ETIMEDOUT
