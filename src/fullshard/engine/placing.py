"""From whole parameters to shards, and the memory of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import is_distributed, no_guard, plain
from fullshard.engine.cuts import Cut
from fullshard.engine.homes import DeviceHomes
from fullshard.engine.parameter import PlacedParameter, ShardedParameter
from fullshard.engine.unit import GradientShard, Group, Member, address_of
from fullshard.errors import UnsupportedModelError
from fullshard.planner.layout import Slice
from fullshard.planner.slots import Ring
from fullshard.planner.units import GroupPlan, SlotRef
from fullshard.transport import Weights
from fullshard.transport.base import torch_dtype


def shard_shape(piece: Slice, *, whole: bool) -> tuple[int, ...]:
    """(n_local, 1, ..., 1): the number of dimensions is kept; whole parameters keep their shape."""
    if whole:
        return tuple(piece.shape)
    return (piece.numel, *(1 for _ in piece.shape[1:]))


def present(
    param: nn.Parameter, data: torch.Tensor, piece: Slice, *, whole: bool
) -> ShardedParameter:
    """Turn the user's parameter into its shard, in place: the object stays the same.

    Args:
        param: The whole parameter, or a shard that is cut anew.
        data: (n_local,), master dtype: this rank's elements in the flat shard.
        piece: Range of these elements in the parameter.
        whole: Whether every rank holds the whole parameter.

    Raises:
        UnsupportedModelError: The object's class cannot be changed (a tensor subclass).
    """
    is_placed = is_distributed(param)
    if type(param) not in (nn.Parameter, ShardedParameter, PlacedParameter) and not is_placed:
        raise UnsupportedModelError(
            f"{piece.name}: expected a plain nn.Parameter; got {type(param).__name__}. "
            "Leave it out of sharding (ignore) or convert it first."
        )
    with no_guard():
        param.grad = None
    shown = data.view(shard_shape(piece, whole=whole))
    if is_placed:
        placed: Any = torch.Tensor._make_subclass(PlacedParameter, shown, param.requires_grad)
        _swap(param, placed, piece)
    elif param.is_meta or param.device != data.device:
        _swap(param, nn.Parameter(shown, requires_grad=param.requires_grad), piece)
    if not isinstance(param, ShardedParameter):
        param.__class__ = ShardedParameter
    with no_guard():
        param.data = shown
    return param  # type: ignore[return-value]


def _swap(param: nn.Parameter, other: nn.Parameter, piece: Slice) -> None:
    """Give the object another's device or kind, which `.data =` cannot."""
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{piece.name}: expected a parameter that can move from {param.device} to "
            f"{other.device}; something holds a weak reference to it: {error} Drop that, or move "
            "the model before fs.shard."
        ) from error


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
        part: Index of this rank on the shard axis.
        homes: Allocate masters and gradients.
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
                master[local].copy_(plain(param).reshape(-1)[piece.start : piece.stop])
        cut = Cut.of(param)
        sharded = present(param, master[local], piece, whole=whole)
        compute = nn.Parameter(torch.empty(0, device=homes.device), requires_grad=False)
        members.append(Member(sharded, piece, compute, placement.offset, cut))
    empty = torch.empty(0, dtype=torch_dtype(dtypes.compute), device=homes.device)
    full = master if plan.slot is None else empty
    full = full if shared is None else shared.full
    group = Group(plan, master, full, empty, members, torch_dtype(dtypes.reduce))
    if plan.trainable:
        group.grads = GradientShard(layout.part_numel, dtypes, homes)
    with no_guard():
        group.addresses = [address_of(member.param) for member in members]
    return group


# ---- slots


class Rings:
    """Slots by ring name and index: flat buffers whose addresses never change.

    Args:
        rings: The rings of the plan.
        given: Existing slots, by name of the ring.
        device: Device on which the other slots are allocated.
        poison: Fill all slots with NaN.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        given: Mapping[str, list[torch.Tensor]],
        device: torch.device,
        *,
        poison: bool,
    ) -> None:
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._rings = rings
        for ring in rings:
            dtype = torch_dtype(ring.dtype)
            slots = given.get(ring.name)
            if slots is None:
                make = partial(torch.zeros, ring.numel, dtype=dtype, device=device)
                slots = [make() for _ in range(ring.count)]
            if poison:
                for slot in slots:
                    slot.fill_(float("nan"))
            self._buffers[ring.name] = slots

    def give(self, rings: Sequence[Ring]) -> dict[str, list[torch.Tensor]]:
        """Give away the slots of rings that are alike, and drop all others."""
        held, self._buffers = self._buffers, {}
        return {ring.name: held[ring.name] for ring in rings if ring in self._rings}

    def view(self, ref: SlotRef, numel: int) -> torch.Tensor:
        """(numel,): a group's part of its slot."""
        return self._buffers[ref.ring][ref.index][ref.base : ref.base + numel]

    def num_bytes(self, *, gradients: bool) -> int:
        """Bytes of the rings of gradients, or of all others."""
        return sum(
            slot.nbytes
            for name, slots in self._buffers.items()
            if name.endswith(".grad") is gradients
            for slot in slots
        )
