"""The transport of ranks on one host, with weights and slots in memory that all map.

Weights in memory are not gathered. All ranks map one copy of them, and each rank updates its own
part. Each rank collects gradients in its own slots, which the other ranks map too, and sums its
part of all ranks' slots in place, in rank order. Offloaded weights are gathered: each rank loads
its part into its own slot, from which the other ranks copy it. Everything else (full state dicts,
whole tensors, sums over the replicate axis) is sent in messages.

    segment of weights      group 0: | part 0 | part 1 |   group 1: | part 0 | part 1 |  ...
    segment of gradients    rank 0: | where | slots | overflow |    rank 1: | where | slots | ...
    segment of slots        the same, for offloaded weights

[Note: who may write when]
A rank's part of the weights is written by that rank alone (optimizer, loading) and read by all
ranks in forward and backward. Two counters separate writes from reads:

    begun   A forward waits until every rank has begun it; earlier writes are then visible.
            (Where weights are gathered: compared phases.)
    done    A rank's first write after a forward waits until no rank reads the weights of that
            forward. After a synchronised backward, or an evaluation, this is already known,
            unless a live graph will read the weights again.

If a rank wrote after the forward (weights swapped for an evaluation, and back), the backward
publishes again, as other transports would gather again.

A slot is written by its own rank and read by all ranks. The counter `ready` is the last reduction
that a rank has collected, `pulled` the last one that it has read from all ranks. A slot is written
again when all ranks have pulled it. `placed` and `fetched` are the same for gathers.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from mmap import PAGESIZE
from typing import Any

import torch

from fullshard.errors import EngineError
from fullshard.planner.layout import align
from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan
from fullshard.transport.base import (
    Axes,
    Home,
    Reduction,
    Slots,
    Weights,
    Works,
    combine_in_order,
    torch_dtype,
)
from fullshard.transport.c10d import DirectTransport
from fullshard.transport.segment import (
    CACHE_LINE,
    AllValues,
    Board,
    Mark,
    share_segment,
    typed,
)

# ---- the home


class SharedHome(Home):
    """Memory of all ranks of one host. See [Note: who may write when].

    Args:
        board: Progress of the ranks.
        num_parts: Number of ranks that share memory.
        all_values: Returns the values of all parts while segments are created.
    """

    def __init__(self, board: Board, num_parts: int, all_values: AllValues) -> None:
        super().__init__()
        self._board, self._num_parts, self._all_values = board, num_parts, all_values
        self._part = board.part
        self._weights: dict[tuple[int, int], Weights] = {}
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forward = 0
        self._reading = False
        self.wrote = False
        self.gradients: PeerSlots | None = None
        self.gathered: PeerSlots | None = None  # of offloaded weights

    # ---- weights

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        groups = [(u.index, at, group) for u in units for at, group in enumerate(u.groups)]
        shared = {(unit, at): group for unit, at, group in groups if group.shared}
        starts: dict[Any, int] = {}
        own: list[tuple[int, int]] = []
        end = 0
        for key, group in shared.items():
            for dtype in dict.fromkeys((group.dtypes.master, group.dtypes.compute)):
                part_bytes = group.layout.part_numel * torch_dtype(dtype).itemsize
                starts[key, dtype] = end
                own.append((end + self._part * part_bytes, part_bytes))
                end = align(end + self._num_parts * part_bytes, PAGESIZE)
        segment = share_segment(self._part, max(end, PAGESIZE), own, self._all_values)
        for key, group in shared.items():
            layout, dtypes = group.layout, group.dtypes
            dtype = torch_dtype(dtypes.master)
            own_at = starts[key, dtypes.master] + self._part * layout.part_numel * dtype.itemsize
            master = segment.view(own_at, layout.part_numel, dtype)
            full_at, compute = starts[key, dtypes.compute], torch_dtype(dtypes.compute)
            full = segment.view(full_at, layout.numel, compute)
            if compute is not dtype:
                self._casts.append((full.chunk(self._num_parts)[self._part], master))
            self._weights[key] = Weights(master, full)

    def weights(self, unit: int, group: int) -> Weights | None:
        return self._weights.get((unit, group))

    def publish(self) -> None:
        self._board.check_process()
        if self._casts:
            self._await_readers()
            for part, master in self._casts:
                part.copy_(master)
        if self.gradients is not None:
            self.gradients.free_overflows()
        self._board.advance(Mark.DONE, self._forward)  # of a forward without a backward
        self._forward += 1
        self._board.advance(Mark.BEGUN, self._forward)
        self._board.await_all(Mark.BEGUN, self._forward, "the beginning of a forward")
        self._reading, self.wrote = True, False

    def finish_reading(self, *, settled: bool) -> None:
        self._board.advance(Mark.DONE, self._forward)
        if settled:
            self._reading = False
            if self.gradients is not None:
                self.gradients.free_overflows()

    def before_write(self) -> int:
        self._board.check_process()
        self.wrote = True
        self.num_writes += 1
        self._await_readers()
        return self.num_writes

    def _await_readers(self) -> None:
        if self._reading:
            self._reading = False
            self._board.advance(Mark.DONE, self._forward)
            self._board.await_all(Mark.DONE, self._forward, "a write into parameters")

    # ---- gradients

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:
        most = max([1, *(len(unit.groups) for unit in units)])  # all may be left out of sharding
        make = partial(PeerSlots, self._board, self._num_parts, most, self._all_values)
        reduced = [ring for ring in rings if ring.name.endswith(".grad")]
        others = [ring for ring in rings if ring not in reduced]
        if self.gradients is not None and self.gradients.rings != reduced:
            self.gradients = None  # frees them before new ones are allocated
        if self.gathered is not None and self.gathered.rings != others:
            self.gathered = None
        self.gradients = self.gradients or make(reduced, (Mark.READY, Mark.PULLED))
        if not others:
            return self.gradients.slots
        self.gathered = self.gathered or make(others, (Mark.PLACED, Mark.FETCHED))
        return self.gradients.slots | self.gathered.slots

    def claim(self, slot: torch.Tensor) -> None:
        for slots in (self.gradients, self.gathered):
            if slots is not None and slot in slots:
                slots.claim(slot)

    def is_read(self, slot: torch.Tensor) -> bool:
        return self.gathered is not None and self.gathered.is_read(slot)


# ---- slots, and the addresses of each rank's last reductions or gathers

OVERFLOWS = 2  # one reduction runs while the next one starts
DEPTH = 8  # reductions whose places peers can look up
WORD_BYTES = 8  # size of a place


class PeerSlots:
    """Slots that each rank writes and all ranks read. Creating them is a collective.

    Gradients outside the slots (that arrived out of order, or were summed over micro-batches) are
    copied into the overflow, which uses memory only while it is needed.

    Args:
        board: Progress of the ranks.
        num_parts: Number of ranks that share memory.
        most_groups: Most buffers of a reduction or gather.
        all_values: Returns the values of all parts.
        ours: Rings of the slots.
        marks: The counters of reductions (or of gathers) that a rank has published, and has read.
    """

    def __init__(
        self,
        board: Board,
        num_parts: int,
        most_groups: int,
        all_values: AllValues,
        ours: Sequence[Ring],
        marks: tuple[Mark, Mark],
    ) -> None:
        self._board, self.rings = board, ours
        self._ready, self._done = marks
        self.number, self._pulled = map(board.value, marks)  # the last reductions or gathers
        starts, end = {}, align(DEPTH * most_groups * WORD_BYTES, PAGESIZE)
        for ring in ours:
            starts[ring.name] = end
            end = align(end + ring.num_bytes, PAGESIZE)
        self._overflow_at = end
        most_bytes = sum(ring.num_bytes // ring.count for ring in ours)
        self._overflow_bytes = align(most_bytes + PAGESIZE * most_groups, PAGESIZE)
        self._lane_bytes = end + OVERFLOWS * self._overflow_bytes
        base = board.part * self._lane_bytes
        self._segment = share_segment(
            board.part, num_parts * self._lane_bytes, [(base, end)], all_values
        )
        self._base, self._address = base, self._segment.memory.data_ptr() + base
        self.slots: Slots = {ring.name: self._cut(ring, base + starts[ring.name]) for ring in ours}
        heads = (i * self._lane_bytes for i in range(num_parts))
        found = [self._segment.view(at, DEPTH * most_groups, torch.int64) for at in heads]
        self._where = [places.view(DEPTH, most_groups) for places in found]
        self._starts = sorted(
            starts[ring.name] + i * ring.num_bytes // ring.count
            for ring in ours
            for i in range(ring.count)
        )
        self._last: dict[int, int] = {}  # last reduction of a slot, by its start
        self._overflows = [[0, 0] for _ in range(OVERFLOWS)]  # last reduction, bytes in use
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def _cut(self, ring: Ring, start: int) -> list[torch.Tensor]:
        dtype, size = torch_dtype(ring.dtype), ring.num_bytes // ring.count
        return [self._segment.view(start + i * size, ring.numel, dtype) for i in range(ring.count)]

    def __contains__(self, full: torch.Tensor) -> bool:
        return 0 <= full.data_ptr() - self._address < self._overflow_at

    def claim(self, slot: torch.Tensor) -> None:
        self._board.await_all(self._done, self._last_of(slot), "a slot")

    def is_read(self, slot: torch.Tensor) -> bool:
        return not self._board.has_all(self._done, self._last_of(slot))

    def _last_of(self, slot: torch.Tensor) -> int:
        return self._last.get(self._slot_at(slot.data_ptr() - self._address), 0)

    def _slot_at(self, place: int) -> int:
        """The start of the slot that contains a place."""
        return self._starts[bisect_right(self._starts, place) - 1]

    def show(self, fulls: Sequence[torch.Tensor]) -> int:
        """Publish the places of this rank's buffers.

        Args:
            fulls: Buffers, (numel,) each; one outside the slots is copied to the overflow.

        Returns:
            The number of the reduction or gather.
        """
        number = self.number = self.number + 1
        if number > DEPTH:
            self._board.await_all(self._done, number - DEPTH, "a slot")
        places = []
        for full in fulls:
            place = full.data_ptr() - self._address
            if full not in self:
                place = self._overflow(number, full)
            else:
                self._last[self._slot_at(place)] = number
            places.append(place)
        self._where[self._board.part][number % DEPTH, : len(places)] = torch.tensor(places)
        self._board.advance(self._ready, number)
        return number

    def pull(self, number: int, fulls: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """A part of every rank's buffers, in rank order: this rank's to sum, or its own to copy."""
        what = "a reduction" if self._ready is Mark.READY else "a gather"
        self._board.await_all(self._ready, number, what)
        places = [where[number % DEPTH].tolist() for where in self._where]
        by_group = zip(fulls, zip(*places, strict=True), strict=False)
        return [[self._view(i, at, full) for i, at in enumerate(ats)] for full, ats in by_group]

    def release(self, number: int) -> None:
        """Note that this rank has read the buffers of a reduction or gather."""
        self._pulled = max(self._pulled, number)  # a reset finishes reductions in any order
        self._board.advance(self._done, self._pulled)

    def _view(self, rank: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """(part_numel,): a part of a peer's buffer."""
        key = rank, place, like.numel(), like.dtype
        found = self._views.get(key)
        if found is None:
            whole = self._segment.view(rank * self._lane_bytes + place, like.numel(), like.dtype)
            part = self._board.part if self._ready is Mark.READY else rank
            found = self._views[key] = whole.chunk(len(self._where))[part]
        return found

    def _overflow(self, number: int, full: torch.Tensor) -> int:
        """Copy a buffer to the overflow; returns its place."""
        lane = number % OVERFLOWS
        if self._overflows[lane][0] != number:
            self._free_overflow(lane)
        used = self._overflows[lane][1]
        start = self._overflow_at + lane * self._overflow_bytes + used
        self._overflows[lane] = [number, used + align(full.nbytes, PAGESIZE)]
        assert self._overflows[lane][1] <= self._overflow_bytes, self._overflows
        at, nbytes = self._base + start, full.nbytes
        typed(nbytes, self._board.part, self._segment.populate, at, nbytes)
        self._segment.view(at, full.numel(), full.dtype).copy_(full)
        return start

    def free_overflows(self) -> None:
        """Free the memory of the overflow, once all ranks have read it."""
        for lane in range(OVERFLOWS):
            self._free_overflow(lane)

    def _free_overflow(self, lane: int) -> None:
        number, used = self._overflows[lane]
        if used:
            self._board.await_all(self._done, number, "a reduction")
            start = self._base + self._overflow_at + lane * self._overflow_bytes
            self._segment.give_back(start, used)
            self._overflows[lane] = [number, 0]


# ---- the transport

LANE_BYTES = 65536  # most bytes of a small sum, an address or an error in one exchange


class SharedTransport(DirectTransport):
    """Reads peers' slots; sends messages for everything outside shared memory.

    Args:
        axes: This rank's coordinates; all ranks of the shard axis are on one host.
        pids: Process ids of the shard axis.
        all_values: Exchanges values between the ranks of the shard axis until they share memory.
        gathers: Whether weights are gathered, whose ranks compare every gather by messages.
    """

    name = "shared"

    def __init__(
        self, axes: Axes, pids: Sequence[int], all_values: AllValues, *, gathers: bool
    ) -> None:
        super().__init__(axes)
        parts, part = axes.mesh.shard, axes.shard_index
        lanes = align(Board.bytes_of(parts), CACHE_LINE)
        size = 2 * LANE_BYTES
        own = [(lanes + part * size, size), (0, lanes)][: 2 - bool(part)]
        segment = share_segment(part, lanes + parts * size, own, all_values)
        self._board = Board(segment, part, axes.shard_ranks, pids)
        found = (segment.view(lanes + i * size, size, torch.uint8) for i in range(parts))
        self._lanes = [lane.view(2, -1) for lane in found]
        self._summed = 0
        self._gathers = gathers
        # Whether all ranks wait on the board: they share this memory and gather nothing.
        self._has_all = parts == axes.mesh.world_size and not gathers
        self._fetches: deque[tuple[int, Callable[[], None]]] = deque()  # not yet copied
        self.home = self._shared = SharedHome(self._board, parts, self._all_values)

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:
        slots = self._shared.gathered
        if slots is None or not all(full in slots for full in fulls):
            return super().fetch(fulls, unit)
        compare = self._compare_units(f"{unit} (number {slots.number + 1})")
        if len(self._fetches) == DEPTH:  # peers wait for this rank before they show as many more
            self._finish(self._fetches[0][0])
        number = slots.show(fulls)

        def copy() -> None:
            try:
                compare()
                pulled = self._await(slots.pull, number, fulls)
                for full, parts in zip(fulls, pulled, strict=True):
                    for mine, part in zip(full.chunk(len(parts)), parts, strict=True):
                        if mine.data_ptr() != part.data_ptr():
                            mine.copy_(part)
            finally:  # peers wait for it, also after an interrupt here
                slots.release(number)

        self._fetches.append((number, copy))
        return Works((), first=partial(self._finish, number))

    def _finish(self, last: int) -> None:
        """Copy all gathers up to one, in order, since `fetched` is a count; each once."""
        while self._fetches and self._fetches[0][0] <= last:
            self._fetches.popleft()[1]()

    def claim(self, slot: torch.Tensor) -> None:
        if self._gathers:
            self._compare_phases(self.axes.shard_ranks)
        self._await(super().claim, slot)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """Sums this rank's part of every rank's slot, read in place."""
        # Not first in `sum_replicas`, where a rank without gradients of experts comes later.
        self._compare_phases(self.axes.shard_ranks if self._gathers else self.axes.replicate_ranks)
        slots = self._shared.gradients
        assert slots is not None
        number = self._await(slots.show, fulls)
        receive = partial(self._await, slots.pull, number, fulls)
        return Reduction(receive, partial(slots.release, number))

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if not self._has_all:
            self._summed += 1
            self._board.advance(Mark.SUMMED, self._summed)  # for ranks that wait elsewhere
            super().all_reduce(values, maximum=maximum)
            return
        for chunk in values.view(-1).split(LANE_BYTES // values.element_size()):
            vectors = [lane.view(chunk.dtype) for lane in self._all_lanes(chunk.view(torch.uint8))]
            combine_in_order(vectors, chunk, maximum=maximum)

    def _compare_phases(self, ranks: Sequence[int]) -> None:
        """Compare before messages to other ranks; in shared memory the board finds other phases."""
        if self._gathers and self.phase.next:  # found by those who wait on the board
            self._board.advance(Mark.BEGUN, self._board.value(Mark.BEGUN) + 1)
        if not self._has_all:
            super()._compare_phases(ranks)

    def _await(self, wait: Callable[..., Any], *args: Any) -> Any:
        """Wait on the board; a peer that is elsewhere waits for this rank's message."""
        try:
            return wait(*args)
        except EngineError:
            if self._gathers:
                self._start_comparison(f"{self.phase.running}, a slot", self._everyone)()
            raise

    def _all_values(self, value: Any) -> list[Any]:
        """Returns the values of all parts, while segments are created."""
        said = pickle.dumps(value).ljust(LANE_BYTES)
        assert len(said) == LANE_BYTES, value
        lanes = self._all_lanes(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        return [pickle.loads(lane.numpy().tobytes()) for lane in lanes]

    def _all_lanes(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Returns every part's bytes, in order; they are valid until the next call.

        Each rank has two lanes, used in turn: a rank that writes its second vector has read the
        first ones of all ranks.
        """
        self._board.check_process()
        self._summed += 1
        turn, part = self._summed % 2, self._board.part
        lanes = [lanes[turn, : own.numel()] for lanes in self._lanes]
        lanes[part].copy_(own)
        self._board.advance(Mark.SUMMED, self._summed)
        self._board.await_all(Mark.SUMMED, self._summed, "a sum over all ranks")
        return lanes
