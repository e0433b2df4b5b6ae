"""Every private or renamed name of torch.distributed, with versions and fallbacks.

Checked with torch 2.11 and 2.13; written for 2.8 and newer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

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


def symmetric_memory() -> tuple[Any, Any, torch.device]:
    """torch's module of symmetric memory, set to NCCL, this rank's device, and the pool on it.

    Raises:
        ConfigError: torch or NCCL lacks it, or a program uses it with another backend.
    """
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        memory.set_backend("NCCL")
        device = torch.device("cuda", torch.cuda.current_device())
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


def new_group_of(layout: Sequence[Sequence[int]]) -> Any:
    """Creates the groups of a layout; returns the one with this rank. A collective of all ranks.

    NCCL gets streams of high priority, and splits its communicator if `init_process_group` was
    given a device. Not `dist.split_group`: see docs/log.md, Process groups.

    Raises:
        ConfigError: A group has its ranks in another order, which torch before 2.13 cannot do.
    """
    wait = group_timeout(dist.group.WORLD)  # torch's default is half an hour
    options, rows = None, [list(ranks) for ranks in layout]
    is_sorted = all(ranks == sorted(ranks) for ranks in rows)
    if "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = wait
    if not is_sorted and "sort_ranks" not in signature(dist.new_group).parameters:
        raise ConfigError(
            f"mesh: expected ascending ranks in each group, since torch {torch.__version__} sorts "
            f"them (2.13 need not); got {rows}. Number the ranks row by row."
        )
    kept: dict[str, Any] = {} if is_sorted else {"sort_ranks": False}
    groups = [dist.new_group(row, timeout=wait, pg_options=options, **kept) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row)


def is_gloo(group: Any) -> bool:
    """Whether a process group uses gloo only."""
    return group is not None and dist.get_backend(group) == "gloo"
