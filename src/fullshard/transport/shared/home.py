"""Weights and gradient slots in memory that all ranks of a host map.

    segment of weights      group 0: | part 0 | part 1 |   group 1: | part 0 | part 1 |  ...
    segment of gradients    rank 0: | where | slots | overflow |    rank 1: | where | slots | ...

[Note: who may write when]
A rank's part of the weights is written by that rank alone (optimizer, loading), and read by all in
their forwards and backwards. Two waits keep them apart:

    begun   A forward begins when every rank has come to it: what was written before is there.
    done    A rank's first write after a forward waits until no rank reads the weights of that
            forward any more. After a synchronised backward all know that already.

A backward that begins after such a write (weights swapped for an evaluation, and back) publishes
again, as it would gather again.

A gradient slot is filled by its own rank and read by all. `ready` tells which reductions a rank has
collected, `pulled` which it has read from everyone; a slot is filled again when all have pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import PAGESIZE

import torch

from fullshard.planner.layout import align
from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan
from fullshard.transport.base import Slots, Weights, torch_dtype
from fullshard.transport.shared.board import Board, Mark
from fullshard.transport.shared.segment import Exchange, share_segment
from fullshard.transport.shared.slots import GradientSlots


class SharedHome:
    """Memory of all ranks of one host. See [Note: who may write when].

    Args:
        board: Tells how far the ranks are.
        num_parts: How many they are.
        exchange: Lets them hear each other while segments are made.
    """

    def __init__(self, board: Board, num_parts: int, exchange: Exchange) -> None:
        self._board, self._num_parts, self._exchange = board, num_parts, exchange
        self._part = board.part
        self._weights: dict[tuple[int, int], Weights] = {}
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forward = 0
        self._reading = False
        self._pulled = 0
        self.wrote = False
        self.num_writes, self.place = 0, ""
        self._gradients: GradientSlots | None = None
        self._shown = 0

    # ---- weights

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        places: dict[tuple[int, int], tuple[int, int]] = {}
        own: list[tuple[int, int]] = []
        end = 0

        def place(numel: int, itemsize: int) -> int:
            nonlocal end
            start, part_bytes = end, numel // self._num_parts * itemsize
            own.append((start + self._part * part_bytes, part_bytes))
            end = align(start + numel * itemsize, PAGESIZE)
            return start

        shared = [
            (unit.index, at, group)
            for unit in units
            for at, group in enumerate(unit.groups)
            if group.shared
        ]
        for unit, at, group in shared:
            numel, dtypes = group.layout.numel, group.dtypes
            master = full = place(numel, torch_dtype(dtypes.master).itemsize)
            if dtypes.compute is not dtypes.master:
                full = place(numel, torch_dtype(dtypes.compute).itemsize)
            places[unit, at] = master, full
        segment = share_segment(self._part, max(end, PAGESIZE), own, self._exchange)
        for unit, at, group in shared:
            (master_at, full_at), dtypes = places[unit, at], group.dtypes
            numel = group.layout.numel
            part_numel, dtype = numel // self._num_parts, torch_dtype(dtypes.master)
            own_at = master_at + self._part * part_numel * dtype.itemsize
            master = segment.view(own_at, part_numel, dtype)
            full = segment.view(full_at, numel, torch_dtype(dtypes.compute))
            if full_at != master_at:
                self._casts.append((full.chunk(self._num_parts)[self._part], master))
            self._weights[unit, at] = Weights(master, full)

    def weights(self, unit: int, group: int) -> Weights | None:
        return self._weights.get((unit, group))

    def publish(self) -> None:
        if self._casts:
            self._await_readers()
            for part, master in self._casts:
                part.copy_(master)
        if self._gradients is not None:
            self._gradients.give_back_overflows()
        self._board.tell(Mark.DONE, self._forward)
        self._forward += 1
        self._board.tell(Mark.BEGUN, self._forward)
        self._board.await_all(Mark.BEGUN, self._forward, "the beginning of a forward")
        self._reading, self.wrote = True, False

    def leave(self, *, settled: bool) -> None:
        self._board.tell(Mark.DONE, self._forward)
        if settled:
            self._reading = False
            if self._gradients is not None:
                self._gradients.give_back_overflows()

    def before_write(self) -> None:
        self.wrote = True
        self.num_writes += 1
        self._await_readers()

    def _await_readers(self) -> None:
        if self._reading:
            self._reading = False
            self._board.tell(Mark.DONE, self._forward)
            self._board.await_all(Mark.DONE, self._forward, "a write into parameters")

    # ---- gradients

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:
        most = max([1, *(len(unit.groups) for unit in units)])  # all may be left out of sharding
        self._gradients = GradientSlots(self._board, self._num_parts, most, rings, self._exchange)
        return self._gradients.slots

    def claim(self, slot: torch.Tensor) -> None:
        assert self._gradients is not None
        self._gradients.claim(slot)

    def show(self, fulls: Sequence[torch.Tensor]) -> int:
        """Tell the others where this rank's gradients are.

        Args:
            fulls: (numel,) each; what is not in a slot is copied to where all can read it.

        Returns:
            The reduction's number.
        """
        assert self._gradients is not None
        self._shown += 1
        self._gradients.show(self._shown, fulls)
        return self._shown

    def pull(self, number: int, fulls: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """This rank's part of every rank's gradients, in rank order, for each buffer."""
        assert self._gradients is not None
        return self._gradients.pull(number, fulls)

    def let_go(self, number: int) -> None:
        """This rank has read what it needs of a reduction."""
        self._pulled = max(self._pulled, number)  # a reset lands them in no order
        self._board.tell(Mark.PULLED, self._pulled)
