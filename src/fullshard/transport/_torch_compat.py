"""Every private or renamed name of torch.distributed, with versions and fallbacks.

Checked with torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fullshard.errors import ConfigError

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_many(fulls: Sequence[Any], parts: Sequence[Any], group: Any) -> Any:
    """All-gather several buffers in one collective; returns its work."""
    if len(fulls) == 1:
        return all_gather_single(fulls[0], parts[0], group=group, async_op=True)
    gather = _coalesced(group, "all_gather_single", "allgather_into_tensor")
    as_bytes = [[t.view(torch.uint8) for t in tensors] for tensors in (fulls, parts)]
    return gather(*as_bytes)  # gloo concatenates the buffers of a call, which need one dtype


def reduce_scatter_many(parts: Sequence[Any], fulls: Sequence[Any], group: Any) -> list[Any]:
    """Reduce-scatter several buffers, in one collective per dtype; returns the works."""
    works: list[Any] = []
    for dtype in dict.fromkeys(full.dtype for full in fulls):
        outs, ins = ([t for t in many if t.dtype is dtype] for many in (parts, fulls))
        if len(ins) == 1:
            works.append(reduce_scatter_single(outs[0], ins[0], group=group, async_op=True))
        else:
            scatter = _coalesced(group, "reduce_scatter_single", "reduce_scatter_tensor")
            works.append(scatter(outs, ins))
    return works


def _coalesced(group: Any, new: str, old: str) -> Callable[..., Any]:
    """Calls a process group's method for lists of tensors, which dist does not expose."""
    return getattr(group, f"{new}_coalesced", None) or getattr(group, f"{old}_coalesced")


def stream_key(device: int) -> object:
    """Tells the current streams of a CUDA device apart, in a tenth of `current_stream`'s time."""
    return torch._C._cuda_getCurrentStream(device)


def symmetric_memory() -> tuple[Any, Any, torch.device]:
    """torch's module of symmetric memory, set to NCCL, this rank's device, and the pool on it.

    Raises:
        ConfigError: torch or NCCL lacks it, or a program uses it with another backend.
    """
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        memory.set_backend("NCCL")
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        device = bound or torch.device("cuda", torch.cuda.current_device())
        return memory, memory.get_mem_pool(device), device
    except (AssertionError, AttributeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            "symmetric_memory: expected torch 2.11 or newer with symmetric memory of NCCL 2.27 or "
            f"newer; got torch {torch.__version__}: {str(error).splitlines()[0]} Leave it out."
        ) from error


def group_timeout(group: Any) -> Any:
    """The time-out (a timedelta) of a process group; None if it has none."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def new_group_of(layout: Sequence[Sequence[int]], name: str) -> Any:
    """Creates the group of this rank; every rank is in one of a layout. A collective of all ranks.

    It calls what `dist.new_group` calls (torch 2.11 to 2.14), which sorts ranks before 2.13 and
    needs a call per group of the layout (docs/log.md, Process groups). NCCL gets streams of high
    priority. If `init_process_group` was given a device, all ranks split its communicator, once
    for a layout; or once per group if two groups have the same color, which NCCL would join.

    Args:
        layout: The ranks of each group, in their order.
        name: Equal on all ranks, and unique in the default process group.
    """
    world: Any = dist.group.WORLD
    wait = group_timeout(world) or dist.default_pg_timeout  # torch's default is half an hour
    options, rank, rows = None, dist.get_rank(), [list(ranks) for ranks in layout]
    if "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = wait
    given = {"backend_options": options, "timeout": wait, "device_id": world.bound_device_id}
    is_apart = len(set(map(c10d._process_group_color, rows))) == len(rows)
    found = None
    for row in rows:
        if rank in row or not is_apart:
            at = row.index(rank) if rank in row else None
            place: Any = (len(row), at, row, *c10d._world.pg_map[world], f"{name}_{row[0]}")
            made, _ = c10d._new_process_group_helper(*place, **given)
            if at is not None:
                found = made
                c10d._world.pg_group_ranks[made] = {r: at for at, r in enumerate(row)}
    return found


def is_gloo(group: Any) -> bool:
    """Whether a process group uses gloo only."""
    return group is not None and dist.get_backend(group) == "gloo"


@cache
def await_gloo_at_exit() -> None:
    """Let this process end only when gloo's threads have ended their work."""
    atexit.register(_await_gloo)


def _await_gloo(seconds: float = 2.0) -> None:
    """Wait until gloo's threads sleep.

    After a collective they free its tensors, and take Python's lock to do so. A thread that asks
    for the lock of an interpreter that ends aborts the process ("terminate called without an
    active exception", signal 6), although the program has done all its work.
    """
    end, pauses = time.monotonic() + seconds, 0
    while pauses < 2 and time.monotonic() < end:
        time.sleep(0.001)  # the lock is free meanwhile
        pauses += 1
        for task in Path("/proc/self/task").glob("*/stat"):
            with suppress(OSError):  # the thread has ended
                if b"(pt_gloo_runloop) R" in task.read_bytes():
                    pauses = 0
