"""The machine a figure was measured on, and what others were doing on it meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

IDLE_SHARE = 0.05  # of all cores, used by others: below it a machine counts as idle
IDLE_FOR_S = 3


def available_bytes() -> int:
    """Returns the memory that can be used without swapping."""
    return psutil.virtual_memory().available


@dataclass(frozen=True)
class CpuClock:
    """Processor seconds of the whole machine at one moment."""

    wall_s: float
    busy_s: float

    @staticmethod
    def now() -> CpuClock:
        """Reads the clock; time that the hypervisor gave to others counts as busy."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest times are contained in user and nice.
        counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return CpuClock(time.perf_counter(), counted - idle)


def others_share(start: CpuClock, end: CpuClock, own_cpu_s: float) -> float:
    """Returns the share of all cores that processes other than ours used between two readings."""
    capacity_s = (end.wall_s - start.wall_s) * (psutil.cpu_count() or 1)
    return max(0.0, (end.busy_s - start.busy_s - own_cpu_s) / capacity_s)


class Neighbours:
    """Measures inside a `with` block what other processes use; ended children are ours.

    Attributes:
        share: of all cores, known when the block has ended.
    """

    share = 0.0

    def __enter__(self) -> Neighbours:
        self._start, self._own_s = CpuClock.now(), sum(os.times()[:4])
        return self

    def __exit__(self, *exc: object) -> None:
        own_s = sum(os.times()[:4]) - self._own_s
        self.share = others_share(self._start, CpuClock.now(), own_s)


def wait_until_idle(limit_s: float, say: Callable[[str], None]) -> bool:
    """Waits until neighbours have left the processor alone for some seconds.

    Returns:
        False if they did not within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    quiet_s = 0
    said = False
    while quiet_s < IDLE_FOR_S:
        if time.monotonic() > deadline:
            say(f"the machine was not idle within {limit_s:.0f} s: rows are marked loaded")
            return False
        start = CpuClock.now()
        time.sleep(1.0)
        share = others_share(start, CpuClock.now(), 0.0)
        quiet_s = quiet_s + 1 if share < IDLE_SHARE else 0
        if not said and quiet_s == 0:
            say(f"waiting for idle neighbours (they use {share:.0%} of the cores)")
            said = True
    return True
