"""The gradient slots of all ranks of a host, and where each rank's last reductions lie.

lane of rank 0: | where | slots of ring 0 | slots of ring 1 | overflow |   lane of rank 1: ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from mmap import PAGESIZE

import torch

from fullshard.planner.layout import align
from fullshard.planner.slots import Ring
from fullshard.transport.base import Slots, torch_dtype
from fullshard.transport.shared.board import Board, Mark
from fullshard.transport.shared.segment import Exchange, share_segment

OVERFLOWS = 2  # one reduction is under way while the next is begun
DEPTH = 8  # reductions whose places a rank remembers for its peers
WORD_BYTES = 8  # of a place


class GradientSlots:
    """Slots that every rank fills for itself and all read. Making them is a collective.

    The overflow takes what is in no slot: gradients that came out of order, or were summed up over
    micro-batches. It costs memory only while it is used.
    """

    def __init__(
        self,
        board: Board,
        num_parts: int,
        most_groups: int,
        rings: Sequence[Ring],
        exchange: Exchange,
    ) -> None:
        self._board = board
        ours = [ring for ring in rings if ring.name.endswith(".grad")]
        header = align(DEPTH * most_groups * WORD_BYTES, PAGESIZE)
        starts, end = {}, header
        for ring in ours:
            starts[ring.name] = end
            end = align(end + ring.num_bytes, PAGESIZE)
        self._overflow_at = end
        most_bytes = sum(ring.num_bytes // ring.count for ring in ours)
        self._overflow_bytes = align(most_bytes + PAGESIZE * most_groups, PAGESIZE)
        self._lane_bytes = end + OVERFLOWS * self._overflow_bytes
        base = board.part * self._lane_bytes
        self._segment = share_segment(
            board.part, num_parts * self._lane_bytes, [(base, end)], exchange
        )
        self._base, self._address = base, self._segment.memory.data_ptr() + base
        self.slots: Slots = {ring.name: self._cut(ring, base + starts[ring.name]) for ring in ours}
        self._where = [
            self._segment.view(i * self._lane_bytes, DEPTH * most_groups, torch.int64).view(
                DEPTH, most_groups
            )
            for i in range(num_parts)
        ]
        self._starts = sorted(
            starts[ring.name] + i * ring.num_bytes // ring.count
            for ring in ours
            for i in range(ring.count)
        )
        self._last: dict[int, int] = {}  # a slot's start -> the last reduction from it
        self._overflows = [[0, 0] for _ in range(OVERFLOWS)]  # the last reduction, bytes in use
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def _cut(self, ring: Ring, start: int) -> list[torch.Tensor]:
        dtype = torch_dtype(ring.dtype)
        whole = self._segment.view(start, ring.count * ring.numel, dtype)
        return list(whole.split(ring.numel))

    def claim(self, slot: torch.Tensor) -> None:
        number = self._last.get(self._slot_at(slot.data_ptr() - self._address), 0)
        self._board.await_all(Mark.PULLED, number, "a gradient slot")

    def _slot_at(self, place: int) -> int:
        """Where the slot begins that a place lies in."""
        return self._starts[bisect_right(self._starts, place) - 1]

    def show(self, number: int, fulls: Sequence[torch.Tensor]) -> None:
        if number > DEPTH:
            self._board.await_all(Mark.PULLED, number - DEPTH, "a reduction")
        places = []
        for full in fulls:
            place = full.data_ptr() - self._address
            if not 0 <= place < self._overflow_at:
                place = self._overflow(number, full)
            else:
                self._last[self._slot_at(place)] = number
            places.append(place)
        self._where[self._board.part][number % DEPTH, : len(places)] = torch.tensor(places)
        self._board.tell(Mark.READY, number)

    def pull(self, number: int, fulls: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        self._board.await_all(Mark.READY, number, "a reduction")
        places = [where[number % DEPTH].tolist() for where in self._where]
        return [
            [self._view(i, at[group], full) for i, at in enumerate(places)]
            for group, full in enumerate(fulls)
        ]

    def _view(self, part: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """(part_numel,): what this rank needs of a buffer of another."""
        key = part, place, like.numel(), like.dtype
        found = self._views.get(key)
        if found is None:
            start = part * self._lane_bytes + place
            whole = self._segment.view(start, like.numel(), like.dtype)
            found = whole.chunk(len(self._where))[self._board.part]
            self._views[key] = found
        return found

    def _overflow(self, number: int, full: torch.Tensor) -> int:
        """Copy a buffer to where all can read it."""
        lane = number % OVERFLOWS
        if self._overflows[lane][0] != number:
            self._free_overflow(lane)
        used = self._overflows[lane][1]
        start = self._overflow_at + lane * self._overflow_bytes + used
        self._overflows[lane] = [number, used + align(full.nbytes, PAGESIZE)]
        assert self._overflows[lane][1] <= self._overflow_bytes, self._overflows
        self._segment.populate(self._base + start, full.nbytes)
        self._segment.view(self._base + start, full.numel(), full.dtype).copy_(full)
        return start

    def give_back_overflows(self) -> None:
        """Free their memory, when all have read them."""
        for lane in range(OVERFLOWS):
            self._free_overflow(lane)

    def _free_overflow(self, lane: int) -> None:
        number, used = self._overflows[lane]
        if used:
            self._board.await_all(Mark.PULLED, number, "a reduction")
            start = self._base + self._overflow_at + lane * self._overflow_bytes
            self._segment.give_back(start, used)
            self._overflows[lane] = [number, 0]
