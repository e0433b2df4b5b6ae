"""Local ranks of a measurement, and their memory.

[Note: a rank's memory]
The proportional set size counts a page that n processes share as 1/n, so mappings that ranks share
count once in total. Linux keeps no peak of it, so a thread samples it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import time
from collections.abc import Callable
from typing import Any

import psutil

from fullshard.errors import FullshardError
from fullshard.launch.local_call import call_on_ranks
from fullshard.launch.spawn import print_failure
from fullshard.observe.metrics import repeated

SAMPLE_EVERY_S = 0.002


def proportional_bytes() -> int:
    """Returns this process's proportional set size."""
    return psutil.Process().memory_full_info().pss


def return_free_memory() -> None:
    """Returns freed heap pages to the system, so that they do not count as used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PeakSampler:
    """Samples the proportional set size in a thread while the context is open."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, proportional_bytes())

    def __enter__(self) -> PeakSampler:
        self._sample()
        self._end = repeated(self._sample, SAMPLE_EVERY_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of this rank, of an action that all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - used


# ---- running -------------------------------------------------------------------------------------


def run_ranks(
    measure: str, job: object, num_ranks: int, *, what: str, timeout_s: float
) -> list[Any]:
    """Calls a function on local ranks, in a process group, and returns each rank's result.

    Args:
        measure: `module:function`. It gets the job and runs on one thread.
        job: What to measure; any object that can be pickled.
        num_ranks: Local ranks.
        what: Names the group in an error, as in "bench step: the ranks of 29M".
        timeout_s: Limit for the whole group.

    Raises:
        FullshardError: A rank failed. Its own error is already on standard error.
    """
    call = measure, job
    function = f"{__name__}:on_one_thread"
    launch, result, found = call_on_ranks(function, call, num_ranks, timeout_s)
    print_failure(launch, result)
    if result.exit_code:
        cause = "the error above" if result.failure else "a signal"
        error = FullshardError(
            f"{what}: expected exit code 0, got {result.exit_code}, because of {cause}."
        )
        error.exit_code = result.exit_code
        raise error
    return found


def on_one_thread(call: tuple[str, object]) -> Any:
    """Calls `module:function` with its job on one thread of this rank."""
    import torch

    torch.set_num_threads(1)
    measure, job = call
    module, _, function = measure.partition(":")
    return getattr(importlib.import_module(module), function)(job)
