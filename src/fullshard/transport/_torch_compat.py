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
from torch.distributed import distributed_c10d as c10d

from fullshard.errors import ConfigError

_HELPER = "_new_process_group_helper"
_OPTIONAL = {"backend_options", "timeout", "device_id"}  # of its parameters

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


def new_group_of(layout: Sequence[Sequence[int]], name: str) -> Any:
    """Creates the group of this rank; every rank is in one of a layout. A collective of all ranks.

    NCCL gets streams of high priority. If `init_process_group` was given a device, one split of its
    communicator makes the groups of all ranks, as in `dist.split_group`, whose names may differ
    between ranks (docs/log.md, Process groups).

    Args:
        layout: The ranks of each group.
        name: Equal on all ranks, and unique in the default process group.

    Raises:
        ConfigError: A group has its ranks in another order, which this torch cannot do.
    """
    wait = group_timeout(dist.group.WORLD)  # torch's default is half an hour
    options, rows = None, [list(ranks) for ranks in layout]
    own = next(row for row in rows if dist.get_rank() in row)
    if "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = wait
    if _makes_one(rows):
        return _new_group(own, f"{name}_{own[0]}", options, wait)
    is_sorted = all(ranks == sorted(ranks) for ranks in rows)
    if not is_sorted and "sort_ranks" not in signature(dist.new_group).parameters:
        raise ConfigError(
            f"mesh: expected ascending ranks in each group, since torch {torch.__version__} sorts "
            f"them (2.13 need not); got {rows}. Number the ranks row by row."
        )
    kept: dict[str, Any] = {} if is_sorted else {"sort_ranks": False}
    groups = [dist.new_group(row, timeout=wait, pg_options=options, **kept) for row in rows]
    return groups[rows.index(own)]


def _makes_one(rows: Sequence[Sequence[int]]) -> bool:
    """Whether a rank may create only its own group of a layout; otherwise each creates all.

    It may if torch has what `dist.new_group` itself calls (2.8 to 2.13), and if no two groups have
    the same hash, by which NCCL tells the parts of a split apart.
    """
    make, color = (getattr(c10d, name, None) for name in (_HELPER, "_process_group_color"))
    if make is None or color is None or not _OPTIONAL <= signature(make).parameters.keys():
        return False
    return len(set(map(color, rows))) == len(rows)


def _new_group(ranks: list[int], name: str, options: Any, wait: Any) -> Any:
    """`dist.new_group` of a group with this rank, with a name of our own, in the ranks' order."""
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    given = {"backend_options": options, "timeout": wait or dist.default_pg_timeout}
    place = len(ranks), ranks.index(dist.get_rank()), ranks
    make = getattr(c10d, _HELPER)
    group, _ = make(*place, backend, store, name, **given, device_id=world.bound_device_id)
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
    return group


def is_gloo(group: Any) -> bool:
    """Whether a process group uses gloo only."""
    return group is not None and dist.get_backend(group) == "gloo"
