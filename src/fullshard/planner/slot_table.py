"""Which unit each slot holds, and what is known of the units: pure bookkeeping of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fullshard.errors import SlotError
from fullshard.planner.events import Event, EventKind, event_of
from fullshard.planner.units import UnitPlan

Slot = tuple[str, int]


def slot_of(unit: UnitPlan) -> Slot | None:
    """The unit's slot; None where it reads its master."""
    for group in unit.groups:
        if group.slot is not None:
            return group.slot.ring.rpartition(".")[0], group.slot.index
    return None


class SlotTable:
    """Slots and their holders.

    Attributes:
        open: Forwards under way by unit, counted because they nest.
        begun: Units whose backward is under way.
        complete: Units whose expected gradients have all come.
        pending_uses: Forwards by unit whose backward has not begun.
    """

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self._units = units
        self._slots = [slot_of(unit) for unit in units]
        self._gather_bytes = [sum(g.gather_bytes() for g in u.groups) for u in units]
        self._holder: dict[Slot, int] = {}
        self._waiting: set[int] = set()  # gathered ahead, not yet entered
        self.open = [0] * len(units)
        self.begun: set[int] = set()
        self.complete: set[int] = set()
        self.pending_uses: Counter[int] = Counter()

    def clear(self) -> None:
        """Every slot is stale."""
        self._holder.clear()
        self._waiting.clear()

    def holds(self, unit: int) -> bool:
        """Whether the unit's weights are in place (gathered, or read from the master)."""
        slot = self._slots[unit]
        return slot is None or self._holder.get(slot) == unit

    def enter(self, unit: int) -> None:
        """The unit is used now: it no longer waits."""
        self._waiting.discard(unit)

    def gather(
        self, unit: int, events: list[Event], *, recompute: bool = False, inner: bool = False
    ) -> None:
        """Put the unit into its slot.

        Args:
            unit: Needed now.
            events: Gets a GATHER unless the slot holds the unit already.
            recompute: What is evicted is gathered again by its own recompute.
            inner: Every backward that has begun goes on afterwards.

        Raises:
            SlotError: The slot's holder computes (law 5).
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
        """Put the next unit into its slot if that is free; False keeps the order by waiting."""
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
        """Empty the unit's slot if it is the holder, and its forward is over."""
        slot = self._slots[unit]
        if slot is None or self._holder.get(slot) != unit or self.open[unit]:
            return []
        del self._holder[slot]
        return [event_of(EventKind.RELEASE, unit)]

    def release_all(self) -> list[Event]:
        """Empty every slot but those of forwards that are under way."""
        over = [unit for unit in sorted(self._holder.values()) if not self.open[unit]]
        self._waiting.clear()
        return [event for unit in over for event in self.release(unit)]

    def last_holders(self, order: Sequence[int]) -> set[int]:
        """The units that hold their slots when all of `order` was gathered once."""
        last = {self._slots[unit]: unit for unit in order}
        return {unit for slot, unit in last.items() if slot is not None}

    def _take(self, slot: Slot, unit: int, events: list[Event]) -> None:
        self._waiting.discard(self._holder.get(slot, -1))
        self._holder[slot] = unit
        events.append(event_of(EventKind.GATHER, unit, self._gather_bytes[unit]))
