"""From whole parameters to shards, and the memory of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.config.values import DType
from fullshard.engine._torch_compat import is_distributed, no_guard, plain
from fullshard.engine.cuts import Cut
from fullshard.engine.gradients import GradientShard
from fullshard.engine.homes import DeviceHomes
from fullshard.engine.parameter import PlacedParameter, ShardedParameter
from fullshard.engine.record import address_of
from fullshard.engine.unit import Group, Member
from fullshard.errors import UnsupportedModelError
from fullshard.planner.layout import Slice
from fullshard.planner.slots import Ring, cast_ring
from fullshard.planner.units import GroupPlan, SlotRef, UnitPlan
from fullshard.transport.base import Home, Slots, Weights, torch_dtype


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
        param: The whole parameter, or a shard that is sharded again.
        data: (n_local,), master dtype: this rank's elements in the flat shard.
        piece: Range of these elements in the parameter.
        whole: Whether every rank stores the whole parameter.

    Raises:
        UnsupportedModelError: Something refers to the parameter weakly, so it cannot be moved.
    """
    is_placed = is_distributed(param)
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
            f"{other.device}; a weak reference to it exists: {error} Drop the reference, or move "
            "the model before fs.shard."
        ) from error


class Masters:
    """This rank's masters, allocated group by group when they are first used.

    Initial values are written into them before the engine is built, so that a rank never stores
    its shards twice.

    Args:
        homes: Allocates masters that are not shared.
        home: Allocates shared masters, of units on all meshes.
        units: Units of the plan.

    Attributes:
        reads: Functions that write (n_local,) values into a master, by parameter name. They are
            called when the parameter is cut.
    """

    def __init__(self, homes: DeviceHomes, home: Home, units: Sequence[UnitPlan]) -> None:
        self.homes, self.home = homes, home
        self.reads: dict[str, Callable[[torch.Tensor], object]] = {}
        self._made: dict[tuple[int, int], Weights] = {}
        home.open_weights(units)

    def of(self, unit: UnitPlan, at: int) -> Weights:
        """The weights of a unit's group; `full` is empty if the group is gathered into a slot."""
        place, group = (unit.index, at), unit.groups[at]
        found = self.home.weights(*place) or self._made.get(place)
        if found is None:
            dtype = torch_dtype(group.dtypes.master)
            master = self.homes.parameters.zeros(group.layout.part_numel, dtype)
            full = master if group.slot is None else _nothing(group, self.homes)
            found = self._made[place] = Weights(master, full)
        return found


def _nothing(group: GroupPlan, homes: DeviceHomes) -> torch.Tensor:
    return torch.empty(0, dtype=torch_dtype(group.dtypes.compute), device=homes.device)


def cut_group(
    unit: UnitPlan, at: int, params: Sequence[nn.Parameter], part: int, masters: Masters
) -> Group:
    """Cut a group's parameters: keep this rank's part, free the rest.

    Args:
        unit: The unit of the group.
        at: Index of the group in its unit.
        params: The user's parameters in the layout's order: whole, on meta, or already shards. For
            those on meta and shards, the masters keep their values unless `masters` reads others.
        part: Index of this rank on the shard axis.
        masters: Allocates masters, and reads values.
    """
    plan, weights = unit.groups[at], masters.of(unit, at)
    layout, homes, master = plan.layout, masters.homes, weights.master
    members = []
    whole = layout.num_parts == 1
    for param, placement, piece in zip(params, layout.placements, layout.slices(part), strict=True):
        local = slice(piece.offset, piece.offset + piece.numel)
        if piece.name in masters.reads:
            masters.reads[piece.name](master[local])
        elif not param.is_meta and not isinstance(param, ShardedParameter):
            with torch.no_grad():
                master[local].copy_(plain(param).reshape(-1)[piece.start : piece.stop])
        cut = Cut.of(param)
        sharded = present(param, master[local], piece, whole=whole)
        compute = nn.Parameter(torch.empty(0, device=homes.device), requires_grad=False)
        members.append(Member(sharded, piece, compute, placement.offset, cut))
    reduce = torch_dtype(plan.dtypes.reduce)
    group = Group(plan, master, weights.full, _nothing(plan, homes), members, reduce)
    group.disk = homes.parameters.disk
    if plan.trainable:
        group.grads = GradientShard(layout.part_numel, plan.dtypes, homes)
    with no_guard():
        group.addresses = [address_of(member.param) for member in members]
    return group


# ---- slots


class Rings:
    """Slots by ring name and index: flat buffers whose addresses never change.

    Args:
        rings: The rings of the plan.
        shared: Slots that homes of transports own, by name of the ring.
        device: Device on which the other slots are allocated.
        poison: Fill slots that are not kept with NaN.
        kept: Slots of the previous plan's rings that did not change, by name of the ring.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        shared: Slots,
        device: torch.device,
        *,
        poison: bool,
        kept: Slots | None = None,
    ) -> None:
        self._rings, self._shared = rings, set(shared)
        self.buffers = {**(kept or {}), **shared}
        for ring in rings:
            if ring.name not in self.buffers:
                kind: dict[str, Any] = {"dtype": torch_dtype(ring.dtype), "device": device}
                slots = [torch.zeros(ring.numel, **kind) for _ in range(ring.count)]
                self.buffers[ring.name] = slots
        for name in self.buffers.keys() - (kept or {}).keys() if poison else ():
            for slot in self.buffers[name]:
                slot.fill_(float("nan"))

    def give(self, rings: Sequence[Ring]) -> Slots:
        """Return own slots of rings that are also in another plan, by name; drop all others."""
        held, self.buffers = self.buffers, {}
        own = [ring for ring in rings if ring in self._rings and ring.name not in self._shared]
        return {ring.name: held[ring.name] for ring in own}

    def view(self, ref: SlotRef, numel: int) -> torch.Tensor:
        """(numel,): a group's part of its slot."""
        return self.buffers[ref.ring][ref.index][ref.base : ref.base + numel]

    def cast(self, master: DType, numel: int) -> torch.Tensor | None:
        """(numel,): where parts of this dtype are cast; None if they are not offloaded."""
        slots = self.buffers.get(cast_ring(master))
        return None if slots is None else slots[0][:numel]

    def num_bytes(self, *, gradients: bool) -> int:
        """Bytes of the rings of gradients, or of all others."""
        rings = self.buffers.items()
        found = [slots for name, slots in rings if name.endswith(".grad") is gradients]
        return sum(slot.nbytes for slots in found for slot in slots)
