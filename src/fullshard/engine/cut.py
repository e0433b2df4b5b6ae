"""Cutting a group's parameters: this rank's part stays, the rest is freed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.engine.homes import DeviceHomes, GradientShard
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.presentation import present
from fullshard.engine.unit import Group, Member
from fullshard.planner.units import GroupPlan
from fullshard.transport import Weights
from fullshard.transport.base import torch_dtype


def cut_group(
    plan: GroupPlan,
    params: Sequence[nn.Parameter],
    part: int,
    homes: DeviceHomes,
    shared: Weights | None,
) -> Group:
    """Cut a group's parameters: keep this rank's part, free the rest.

    Args:
        plan: The group's layout.
        params: The user's parameters in the layout's order: whole, or on meta or shards already,
            which become zero.
        part: This rank's index on the shard axis.
        homes: Where things live.
        shared: The memory of the weights; None where it is this rank's own.
    """
    layout = plan.layout
    dtypes = plan.dtypes
    if shared is None:
        master = homes.parameters.zeros(layout.part_numel, torch_dtype(dtypes.master))
    else:
        master = shared.master
    members = []
    whole = layout.num_parts == 1
    for param, placement, piece in zip(params, layout.placements, layout.slices(part), strict=True):
        local = slice(piece.offset, piece.offset + piece.numel)
        if not param.is_meta and not isinstance(param, ShardedParameter):
            with torch.no_grad():
                master[local].copy_(param.detach().reshape(-1)[piece.start : piece.stop])
        sharded = present(param, master[local], piece, whole=whole)
        compute = nn.Parameter(torch.empty(0, device=homes.device), requires_grad=False)
        members.append(Member(sharded, piece, compute, placement.offset))
    empty = torch.empty(0, dtype=torch_dtype(dtypes.compute), device=homes.device)
    full = master if plan.slot is None else empty
    full = full if shared is None else shared.full
    group = Group(plan, master, full, empty, members)
    if plan.trainable:
        group.grads = GradientShard(layout.part_numel, dtypes, homes)
    group.padding = _padding(plan)
    return group


def _padding(plan: GroupPlan) -> list[tuple[int, int]]:
    """Ranges of the flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for placement in plan.layout.placements:
        if placement.offset > end:
            gaps.append((end, placement.offset))
        end = placement.stop
    if plan.layout.numel > end:
        gaps.append((end, plan.layout.numel))
    return gaps
