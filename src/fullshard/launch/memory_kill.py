"""Whether the kernel killed a process because memory ran out: a rank cannot say it itself."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil

from fullshard.config.host_memory import kill_counters

_SYSTEM = Path("/proc/vmstat")
_COUNT = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
SAMPLE_S = 0.5
LOW = 0.03  # of memory: what a killer in user space, whom nothing counts, leaves at the most

CURE = (
    "Lower what a rank needs (batch, sequence length, model), start fewer ranks, offload less to "
    "the host, or raise the memory of the machine or of the container"
)


class MemoryWatch:
    """Counts the kernel's kills since it was made, and notes when memory is low."""

    def __init__(self) -> None:
        self._counters = [_SYSTEM, *kill_counters()]
        self._kills = self._count()
        self._sampled = self._low = float("-inf")

    def look(self) -> None:
        """Take a sample of free memory; call it often."""
        now = time.monotonic()
        if now - self._sampled < SAMPLE_S:
            return
        self._sampled = now
        memory = psutil.virtual_memory()
        if memory.available < LOW * memory.total:
            self._low = now

    def ran_out(self) -> bool:
        """Whether memory was short enough that it explains a SIGKILL that came just now."""
        return self._count() > self._kills or time.monotonic() - self._low < 10.0

    def _count(self) -> int:
        return sum(map(_read, self._counters))


def _read(file: Path) -> int:
    try:
        found = _COUNT.search(file.read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found[1]) if found else 0
