"""Memory of this process on Linux: proportional set size and resident set, with their peaks.

The proportional set size counts a page that n processes share as 1/n, so mappings that ranks share
count once in total. Linux keeps no peak of it, so a thread samples it. The peak of the resident set
(VmHWM) is exact, but counts shared pages in full.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 0.002
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def can_measure() -> bool:
    """Whether this system reports proportional set sizes."""
    return psutil.LINUX


def proportional_bytes() -> int:
    """Returns this process's proportional set size."""
    return psutil.Process().memory_full_info().pss


def resident_bytes() -> int:
    """Returns this process's resident set, shared pages in full."""
    return psutil.Process().memory_info().rss


def resident_peak_bytes() -> int:
    """Returns the peak of this process's resident set since the last reset."""
    (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+)", STATUS.read_text(), re.MULTILINE)
    return 1024 * int(kibibytes)


def return_free_memory() -> None:
    """Returns freed heap pages to the system, so that they do not count as used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PeakSampler:
    """Samples the proportional set size in a thread while the context is open."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, proportional_bytes())
            self._stop.wait(SAMPLE_EVERY_S)

    def __enter__(self) -> PeakSampler:
        CLEAR_REFS.write_text(RESET_PEAK)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.resident_peak_bytes = resident_peak_bytes()
