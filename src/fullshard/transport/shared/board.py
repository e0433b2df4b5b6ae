"""Progress counters of the ranks of one host, in shared memory.

    line of rank 0   begun | done | ready | pulled | summed      each counter on a cache line
    line of rank 1   begun | done | ready | pulled | summed      of its own; only its rank writes it

A waiting rank watches its peers. It stops waiting for a peer that has ended, or that is ahead in
another counter: all ranks pass the same points in one order, so a peer that is ahead elsewhere will
never arrive.

[Note: counters]
One process writes a counter in shared memory and others wait for it. A waiter spins for some
microseconds, then sleeps in the kernel (futex) until the writer changes the counter. This needs
Linux on x86-64, where writes become visible in program order.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from itertools import product

from fullshard.errors import EngineError, HangError
from fullshard.transport.base import CURE
from fullshard.transport.shared.segment import Segment

CACHE_LINE = 64
TIMEOUT_S = 1800.0  # torch's limit for a collective; the watchdog's is shorter


class Mark(IntEnum):
    """The counters of a rank.

    BEGUN: started forwards of the whole model; the rank's parts were written before.
    DONE: forwards whose weights the rank no longer reads.
    READY: reductions whose gradients the rank has collected.
    PULLED: reductions that the rank has finished reading.
    SUMMED: small sums to which the rank has contributed its vector.
    """

    BEGUN = 0
    DONE = 1
    READY = 2
    PULLED = 3
    SUMMED = 4


_PLACES = {
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

    def __del__(self) -> None:
        for descriptor in self._parts:
            os.close(descriptor)

    @staticmethod
    def bytes_of(num_parts: int) -> int:
        """The bytes that a board needs in its segment."""
        return LINE_BYTES * num_parts

    def tell(self, mark: Mark, value: int) -> None:
        """Advance a counter of this part."""
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
                    "take part; it has ended. Its own output says why."
                )
        for part, other in product(self._others, _PLACES):
            is_further = self._counters[part][other].value > self.value(other)
            if other is not mark and is_further and is_late(part):
                raise EngineError(
                    f"{doing}: expected rank {self._ranks[part]} to come here; it "
                    f"waits at {_PLACES[other]}, where this rank has not been. {CURE}"
                )
        if time.monotonic() > until:
            raise HangError(
                f"{doing}: expected rank {self._ranks[awaited]} within "
                f"{TIMEOUT_S:.0f} s; it did not come. It waits for something else, or computes."
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
