"""How much memory this process uses: of its GPU where it computes on one, else of the host."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """In use now, and the most so far, in bytes.

    Args:
        device: Where the model lives. On CUDA: what torch's allocator has given out; on the CPU:
            the process's resident set, which counts its libraries too.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    now = psutil.Process().memory_info().rss
    # The kernel counts both in batches a CPU, so that the peak may lag behind what is in use.
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
