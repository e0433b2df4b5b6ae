"""Memory of this process on Linux: proportional set size and resident set, with their peaks.

The proportional set size counts a page that n processes share as 1/n, so mappings that ranks share
count once in total. Linux keeps no peak of it, so a thread samples it. The peak of the resident set
(VmHWM) is exact, but counts shared pages in full.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

SAMPLE_EVERY_S = 0.002
ROLLUP = Path("/proc/self/smaps_rollup")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def _field_bytes(path: Path, field: str) -> int:
    """Reads a `Field:   123 kB` line of a file under /proc."""
    for line in path.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{path}: expected a line {field!r}, got none.")


def can_measure() -> bool:
    """Whether this system reports proportional set sizes."""
    return ROLLUP.exists()


def proportional_bytes() -> int:
    """Returns this process's proportional set size."""
    return _field_bytes(ROLLUP, "Pss:")


def resident_bytes() -> int:
    """Returns this process's resident set, shared pages in full."""
    return _field_bytes(STATUS, "VmRSS:")


def resident_peak_bytes() -> int:
    """Returns the peak of this process's resident set since the last reset."""
    return _field_bytes(STATUS, "VmHWM:")


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
