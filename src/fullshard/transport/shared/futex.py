"""Counters in shared memory that one process writes and others sleep on.

A waiter looks for some microseconds, then sleeps in the kernel (futex) until the writer changes the
counter. Linux on x86-64 alone, where writes become visible in the order in which they were made.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable

_FUTEX = 202  # the system call's number on x86-64
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
SPINS = 60  # looks before sleeping, about 10 us: a peer that is nearly there costs no sleep
SLEEP_S = 0.05  # at most, then the peer is looked after


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_SLEEP = _Timespec(0, int(SLEEP_S * 1e9))


class Counter:
    """A growing number of one writer, seen by every process that maps it.

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
        """Write the number and wake who sleeps on it."""
        self._cell.value = value
        _syscall(_FUTEX, self._address, _WAKE, _EVERYONE, None, None, 0)

    def wait(self, target: int, look: Callable[[], None]) -> None:
        """Return when the number is at least `target`.

        Args:
            target: To be reached.
            look: Called after every sleep without it; raises where waiting is in vain.
        """
        cell = self._cell
        for _ in range(SPINS):
            if cell.value >= target:
                return
        while (seen := cell.value) < target:
            if not self._sleep(seen):
                look()

    def _sleep(self, seen: int) -> bool:
        """Sleep while the number is `seen`; False after `SLEEP_S` without a change."""
        left = _syscall(
            _FUTEX, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(_SLEEP), None, 0
        )
        return left == 0 or ctypes.get_errno() != errno.ETIMEDOUT
