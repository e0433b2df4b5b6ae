"""How busy other processes kept this machine while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

IDLE_SHARE = 0.05  # of all cores: a machine is idle while other processes use less
IDLE_FOR_S = 3
WAIT_LIMIT_S = 600.0

Say = Callable[[str], None]


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
        # User and nice contain the guest times.
        counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return CpuClock(time.perf_counter(), counted - idle)


def others_share(start: CpuClock, end: CpuClock, own_cpu_s: float) -> float:
    """Returns the share of all cores that other processes used between two readings."""
    capacity_s = (end.wall_s - start.wall_s) * (psutil.cpu_count() or 1)
    return max(0.0, (end.busy_s - start.busy_s - own_cpu_s) / capacity_s)


class Neighbours:
    """Measures how much of the machine other processes use inside a `with` block.

    Child processes that ended inside the block count as ours.

    Attributes:
        share: Share of all cores that others used; known after the block.
        became_idle: Whether the machine was idle before the block began, where that was awaited.
    """

    share = 0.0

    def __init__(self, *, wait: bool = False, say: Say = print) -> None:
        """With `wait`, first waits until the machine is idle, and reports through `say`."""
        self.became_idle = not wait or wait_until_idle(WAIT_LIMIT_S, say)

    def __enter__(self) -> Neighbours:
        self._start, self._own_s = CpuClock.now(), sum(os.times()[:4])
        return self

    def __exit__(self, *exc: object) -> None:
        own_s = sum(os.times()[:4]) - self._own_s
        self.share = others_share(self._start, CpuClock.now(), own_s)


def wait_until_idle(limit_s: float, say: Say) -> bool:
    """Waits until other processes have left the processor alone for some seconds.

    Returns:
        False if they did not within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    quiet_s = 0
    was_reported = False
    while quiet_s < IDLE_FOR_S:
        if time.monotonic() > deadline:
            say(f"the machine was not idle within {limit_s:.0f} s: rows are marked loaded")
            return False
        start = CpuClock.now()
        time.sleep(1.0)
        share = others_share(start, CpuClock.now(), 0.0)
        quiet_s = quiet_s + 1 if share < IDLE_SHARE else 0
        if not was_reported and quiet_s == 0:
            say(f"waiting for other processes, which use {share:.0%} of the cores")
            was_reported = True
    return True
