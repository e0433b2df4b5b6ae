"""Slots: the persistent buffers of gathered units and gradients, and the units in them.

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
from fullshard.errors import SlotError
from fullshard.planner.events import Event, EventKind, event_of
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


@dataclass(frozen=True, slots=True)
class SlotRules:
    """The rules for the number of slots.

    Attributes:
        num_slots: Units that may be gathered at once: the larger prefetch depth + 1.
        homes: Where state is stored.
        resident: Units that are called several times in a step.
    """

    num_slots: int
    homes: Homes
    resident: Collection[int] = ()

    def needs_slot(self, group: GroupPlan) -> bool:
        """Whether a group computes from a slot, not from its master or a shared mapping."""
        if group.layout.num_parts > 1:
            return self.homes.parameters is not Place.SHARED
        return self.homes.offloads or group.dtypes.compute is not group.dtypes.master


def assign_slots(
    units: Sequence[UnitPlan], order: Sequence[int], rules: SlotRules
) -> tuple[tuple[UnitPlan, ...], tuple[Ring, ...]]:
    """Assigns a slot to every group, and returns the units and the rings.

    Args:
        units: Units without slots.
        order: Unit indices in the order of their forwards; neighbours get different slots.
        rules: The rules for the number of slots.
    """
    placed = list(units)
    rings: list[Ring] = []
    entered = [units[index] for index in dict.fromkeys(order)]
    for name, members in _classes(units, entered, rules).items():
        first = members[0]
        window = rules.num_slots if first.reshard_after_forward else len(units)
        peers = [u for u in entered if _depth(units, u) == _depth(units, first)]
        turns = _take_turns(members, peers, window)
        grad_turns = _take_turns(
            [u for u in members if u.trainable], [u for u in peers if u.trainable], GRADIENT_SLOTS
        )
        sizes: dict[tuple[str, DType], int] = defaultdict(int)
        for unit in members:
            indices = turns[unit.index], grad_turns.get(unit.index, 0)
            groups, used = _place(unit, name, indices, rules)
            placed[unit.index] = replace(unit, groups=groups)
            for key, numel in used.items():
                sizes[key] = max(sizes[key], numel)
        for (ring, dtype), numel in sizes.items():
            taken = grad_turns if ring.endswith(".grad") else turns
            rings.append(Ring(ring, dtype, numel, count=len(set(taken.values()))))
    return tuple(placed), tuple(rings)


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
    units: Sequence[UnitPlan], entered: Sequence[UnitPlan], rules: SlotRules
) -> dict[str, list[UnitPlan]]:
    """Size classes: units of one kind of role and one depth, within a factor of two in size.

    Units that stay gathered after forward share no ring with units that are released. Nested units
    share no ring with the units around them, which are in use at the same time.
    """
    found: dict[str, list[UnitPlan]] = {}
    families: dict[str, list[UnitPlan]] = defaultdict(list)
    for unit in entered:
        if unit.index in rules.resident and unit.role is not Role.ROOT:
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
    match unit.role:
        case Role.ROOT:
            return f"{kept}root"
        case Role.BLOCK:
            return f"{kept}block{_depth(units, unit)}."
        case Role.EMBEDDING | Role.HEAD:
            return f"{kept}ends{_depth(units, unit)}."


def _depth(units: Sequence[UnitPlan], unit: UnitPlan) -> int:
    """Number of units around it, without the root; -1 for the root."""
    return len(ancestors_of(units, unit)) - 1


def _place(
    unit: UnitPlan, ring: str, indices: tuple[int, int], rules: SlotRules
) -> tuple[tuple[GroupPlan, ...], dict[tuple[str, DType], int]]:
    """The unit's groups with slots, and the elements of each ring that they use."""
    index, grad_index = indices
    used: dict[tuple[str, DType], int] = defaultdict(int)
    groups: list[GroupPlan] = []
    for group in unit.groups:
        slot = grad_slot = None
        dtypes, numel = group.dtypes, group.layout.numel
        if rules.needs_slot(group):
            name = f"{ring}.{dtypes.compute}"
            slot = SlotRef(name, index, used[name, dtypes.compute])
            used[name, dtypes.compute] += numel
        if group.trainable:
            name = f"{ring}.{dtypes.reduce}.grad"
            grad_slot = SlotRef(name, grad_index, used[name, dtypes.reduce])
            used[name, dtypes.reduce] += numel
        groups.append(replace(group, slot=slot, grad_slot=grad_slot))
    return tuple(groups), used


# ---- the units in the slots ----------------------------------------------------------------------

Slot = tuple[str, int]


def slot_of(unit: UnitPlan) -> Slot | None:
    """Returns the unit's slot; None if it reads its master."""
    for group in unit.groups:
        if group.slot is not None:
            return group.slot.ring.rpartition(".")[0], group.slot.index
    return None


class SlotTable:
    """The unit that each slot holds.

    Attributes:
        open: Number of forwards in progress, by unit; forwards nest.
        begun: Units whose backward is in progress.
        complete: Units whose expected gradients have all arrived.
        pending_uses: Number of forwards without a backward yet, by unit.
    """

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self._units = units
        self._slots = [slot_of(unit) for unit in units]
        self._gather_bytes = [sum(g.gather_bytes() for g in u.groups) for u in units]
        self._holder: dict[Slot, int] = {}
        self._waiting: set[int] = set()  # prefetched, not yet entered
        self.open = [0] * len(units)
        self.begun: set[int] = set()
        self.complete: set[int] = set()
        self.pending_uses: Counter[int] = Counter()

    def clear(self) -> None:
        """Empties every slot, because the weights may have changed."""
        self._holder.clear()
        self._waiting.clear()

    def holds(self, unit: int) -> bool:
        """Whether the unit's weights are available: gathered, or read from the master."""
        slot = self._slots[unit]
        return slot is None or self._holder.get(slot) == unit

    def enter(self, unit: int) -> None:
        """Notes that the unit is used now and no longer waits."""
        self._waiting.discard(unit)

    def gather(
        self, unit: int, events: list[Event], *, recompute: bool = False, inner: bool = False
    ) -> None:
        """Puts the unit into its slot.

        Args:
            unit: The unit that is needed now.
            events: Receives a GATHER unless the slot already holds the unit.
            recompute: Whether a recompute needs it; an evicted unit's own recompute gathers again.
            inner: Whether an inner backward needs it; backwards in progress continue after it.

        Raises:
            SlotError: The unit in the slot is computing (law 5).
        """
        slot = self._slots[unit]
        if slot is None or self._holder.get(slot) == unit:
            return
        holder = self._holder.get(slot, -1)
        if holder >= 0:
            under_way = holder in self.begun and holder not in self.complete
            last_use = under_way and self.pending_uses[holder] <= 0
            goes_on = inner and holder in self.begun
            if self.open[holder] or goes_on or (last_use and not recompute):
                raise SlotError(
                    f"{self._units[unit].title}: expected its slot to be free; it holds "
                    f"{self._units[holder].title}, whose computation is under way. Put both into "
                    "one unit (wrap), or use strategy shard_grad_op, where no slot is shared."
                )
        self._take(slot, unit, events)

    def look_ahead(self, unit: int, current: int, events: list[Event]) -> bool:
        """Prefetches a unit into its slot; returns False if the slot is in use."""
        slot = self._slots[unit]
        if slot is None:
            return True
        if self._holder.get(slot) == unit:
            self._waiting.add(unit)  # not to be evicted before its use
            return True
        holder = self._holder.get(slot, -1)
        in_use = holder in self._waiting or holder in self.begun or holder == current
        if holder >= 0 and (in_use or self.open[holder]):
            return False
        self._take(slot, unit, events)
        self._waiting.add(unit)
        return True

    def release(self, unit: int) -> list[Event]:
        """Empties the unit's slot if the unit is in it and its forward is over."""
        slot = self._slots[unit]
        if slot is None or self._holder.get(slot) != unit or self.open[unit]:
            return []
        del self._holder[slot]
        return [event_of(EventKind.RELEASE, unit)]

    def release_all(self) -> list[Event]:
        """Empties every slot except those of forwards in progress."""
        over = [unit for unit in sorted(self._holder.values()) if not self.open[unit]]
        self._waiting.clear()
        return [event for unit in over for event in self.release(unit)]

    def last_holders(self, order: Sequence[int]) -> set[int]:
        """Returns the units that are in slots after all units of `order` were gathered."""
        last = {self._slots[unit]: unit for unit in order}
        return {unit for slot, unit in last.items() if slot is not None}

    def _take(self, slot: Slot, unit: int, events: list[Event]) -> None:
        self._waiting.discard(self._holder.get(slot, -1))
        self._holder[slot] = unit
        events.append(event_of(EventKind.GATHER, unit, self._gather_bytes[unit]))
