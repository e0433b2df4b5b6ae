"""Slots: the persistent buffers of gathered units and gradients.

Units of one size class share a ring. With prefetch depth 1 a ring has two slots, used in turn:

    slot 0   | layers.0 |          | layers.2 |          | ...
    slot 1        | layers.1 |          | layers.3 |
             --> time: layers.1 is gathered while layers.0 computes

[Note: slots are fixed]
A unit's slot is fixed by the plan. Autograd saves views of the slot in forward and reads them in
backward, so the backward must read the same storage as its forward (law 1). Units that are called
more than once in a step are resident: they have a slot of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fullshard.config.values import DType
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.units import GroupPlan, Homes, Place, SlotRef, UnitPlan, ancestors_of
from fullshard.planner.wrap import Role

SIZE_CLASS = 0.5  # units below this share of the largest unit begin a new size class
GRADIENT_SLOTS = 2  # one is filled while the other is reduced


@dataclass(frozen=True, slots=True)
class Ring:
    """`count` slots of `numel` elements.

    Attributes:
        name: Unique name; rings of gradients end in ".grad".
    """

    name: str
    dtype: DType
    numel: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.count * self.numel * ITEMSIZE[self.dtype]


def assign_slots(
    units: Sequence[UnitPlan], order: Sequence[int], num_slots: int, homes: Homes
) -> tuple[tuple[UnitPlan, ...], tuple[Ring, ...]]:
    """Assigns a slot to every group, and returns the units and the rings.

    Args:
        units: Units without slots.
        order: Unit indices in the order of their forwards; neighbours get different slots. Units
            that are in it repeatedly become resident.
        num_slots: Units that may be gathered at once: the larger prefetch depth + 1.
        homes: Where state is stored.
    """
    placed = list(units)
    rings: list[Ring] = []
    uses = Counter(order)
    entered = [units[index] for index in uses]
    resident = {index for index, count in uses.items() if count > 1}
    for name, members in _classes(units, entered, resident).items():
        first = members[0]
        window = num_slots if first.reshard_after_forward else len(units)
        peers = [u for u in entered if _depth(units, u) == _depth(units, first)]
        turns = _take_turns(members, peers, window)
        grad_turns = _take_turns(
            [u for u in members if u.trainable], [u for u in peers if u.trainable], GRADIENT_SLOTS
        )
        sizes: dict[tuple[str, DType], int] = defaultdict(int)
        for unit in members:
            indices = turns[unit.index], grad_turns.get(unit.index, 0)
            groups, used = _place(unit, name, indices, homes)
            placed[unit.index] = replace(unit, groups=groups)
            for key, numel in used.items():
                sizes[key] = max(sizes[key], numel)
        for (ring, dtype), numel in sizes.items():
            taken = grad_turns if ring.endswith(".grad") else turns
            rings.append(Ring(ring, dtype, numel, count=len(set(taken.values()))))
    return tuple(placed), (*rings, *_cast_rings(placed, homes))


def cast_ring(master: DType) -> str:
    """Name of the ring in which offloaded parts of this dtype are cast."""
    return f"cast.{master}"


def _cast_rings(units: Sequence[UnitPlan], homes: Homes) -> list[Ring]:
    """One slot per master dtype: offloaded parts are copied to the device before they are cast."""
    sizes: dict[DType, int] = defaultdict(int)
    for group in (group for unit in units for group in unit.groups if homes.offloads):
        dtypes = group.dtypes
        if group.slot is not None and dtypes.compute is not dtypes.master:
            sizes[dtypes.master] = max(sizes[dtypes.master], group.layout.part_numel)
    return [Ring(cast_ring(dtype), dtype, numel, count=1) for dtype, numel in sizes.items()]


def _take_turns(
    members: Sequence[UnitPlan], peers: Sequence[UnitPlan], window: int
) -> dict[int, int]:
    """A slot index for every member; members among `window` neighbours get different ones.

        window 2     peers  A A B A B C B        A: 0 1 0    B: 0 0 0    C: 0

    Peers are the units of one depth in forward order. Units around and inside of them use other
    rings.
    """
    ours = {unit.index for unit in members}
    places = [at for at, peer in enumerate(peers) if peer.index in ours]
    count = max((bisect_left(places, at + window) - i for i, at in enumerate(places)), default=1)
    return {unit.index: position % count for position, unit in enumerate(members)}


def _classes(
    units: Sequence[UnitPlan], entered: Sequence[UnitPlan], resident: Collection[int]
) -> dict[str, list[UnitPlan]]:
    """Size classes: units of one kind of role and one depth, within a factor of two in size.

    Units that stay gathered after forward share no ring with units that are released. Nested units
    share no ring with the units around them, which are in use at the same time.
    """
    found: dict[str, list[UnitPlan]] = {}
    families: dict[str, list[UnitPlan]] = defaultdict(list)
    for unit in entered:
        if unit.index in resident and unit.role is not Role.ROOT:
            found[f"resident{unit.index}"] = [unit]
        else:
            families[_family(units, unit)].append(unit)
    for family, members in families.items():
        number, largest, classes = -1, 0, dict[int, int]()
        for unit in sorted(members, key=lambda unit: -unit.numel):
            if number < 0 or unit.numel < SIZE_CLASS * largest:
                number, largest = number + 1, unit.numel
            classes[unit.index] = number
        for unit in members:  # in forward order, so that neighbours alternate
            found.setdefault(f"{family}{classes[unit.index]}", []).append(unit)
    return found


def _family(units: Sequence[UnitPlan], unit: UnitPlan) -> str:
    kept = "" if unit.reshard_after_forward else "kept-"
    if unit.role is Role.ROOT:
        return f"{kept}root"
    kind = "block" if unit.role is Role.BLOCK else "ends"
    if unit.mesh != units[0].mesh:  # a home of a mesh has its slots
        kind = f"{unit.mesh.replicate}x{unit.mesh.shard}x{unit.mesh.inner}-"
    return f"{kept}{kind}{_depth(units, unit)}."


def _depth(units: Sequence[UnitPlan], unit: UnitPlan) -> int:
    """Number of units around it, without the root; -1 for the root."""
    return len(ancestors_of(units, unit)) - 1


def _place(
    unit: UnitPlan, ring: str, indices: tuple[int, int], homes: Homes
) -> tuple[tuple[GroupPlan, ...], dict[tuple[str, DType], int]]:
    """The unit's groups with slots, and the elements of each ring that they use."""
    index, grad_index = indices
    used: dict[tuple[str, DType], int] = defaultdict(int)
    groups: list[GroupPlan] = []
    for group in unit.groups:
        slot = grad_slot = None
        dtypes, numel = group.dtypes, group.layout.numel
        if _needs_slot(group, homes):
            name = f"{ring}.{dtypes.compute}"
            slot = SlotRef(name, index, used[name, dtypes.compute])
            used[name, dtypes.compute] += numel
        if group.trainable:
            name = f"{ring}.{dtypes.reduce}.grad"
            grad_slot = SlotRef(name, grad_index, used[name, dtypes.reduce])
            used[name, dtypes.reduce] += numel
        groups.append(replace(group, slot=slot, grad_slot=grad_slot))
    return tuple(groups), used


def _needs_slot(group: GroupPlan, homes: Homes) -> bool:
    """Whether a group computes from a slot, not from its master or a shared mapping."""
    if group.layout.num_parts > 1:
        return homes.parameters is not Place.SHARED
    return homes.offloads or group.dtypes.compute is not group.dtypes.master
