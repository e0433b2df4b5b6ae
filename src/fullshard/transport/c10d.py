"""Transports on process groups: torch.distributed's collectives, and direct exchange on gloo.

In direct exchange each rank sends every peer only the part that the peer needs. gloo's
all-gather and reduce-scatter clone whole buffers and send twice as much as necessary (docs/log.md,
Step time and transports). Point-to-point messages on the same process group write directly to their
destination.

On NCCL, `SymmetricHome` allocates slots in memory that all ranks may access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.values import ReductionKind
from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan
from fullshard.transport._torch_compat import (
    all_gather_many,
    all_gather_single,
    reduce_scatter_many,
    symmetric_memory,
)
from fullshard.transport.base import (
    Axes,
    Home,
    MessageTransport,
    Reduction,
    Slots,
    Works,
    combine_in_order,
    sum_in_order,
    torch_dtype,
)

# ---- torch.distributed's collectives


class C10dTransport(MessageTransport):
    """In-place all-gather and reduce-scatter on the process groups' backend.

    Args:
        axes: This rank's coordinates in the mesh.
        kind: Method of summing gradients.
        symmetric: Allocate slots in NCCL's symmetric memory.
    """

    name = "c10d"

    def __init__(self, axes: Axes, kind: ReductionKind, *, symmetric: bool = False) -> None:
        super().__init__(axes)
        self._is_ordered = cache(kind.is_ordered)  # asked for every buffer of a step
        # About the root of the number of ranks, as in torch's fully_shard: sums in float16
        # overflow later, and small gradients do not vanish.
        self._divisor = 1 << ((axes.mesh.shard - 1).bit_length() + 1) // 2
        if symmetric:
            self.home = SymmetricHome(axes)

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:
        if self.axes.mesh.shard == 1:
            return Works(())
        self._compare_units(unit)()  # starts the comparison and waits for it
        owns = [full.chunk(self.axes.mesh.shard)[self.axes.shard_index] for full in fulls]
        return self._works(all_gather_many(fulls, owns, self.axes.gather_group))

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """A reduce-scatter in place; for ordered sums an all-to-all, and a sum in rank order."""
        num_parts, group = self.axes.mesh.shard, self.axes.reduce_group
        if num_parts == 1:
            return Reduction(lambda: [[full] for full in fulls])
        self._compare_phases(self.axes.shard_ranks)
        works: list[Any] = []
        lent: list[torch.Tensor] = []
        received: list[Sequence[torch.Tensor]] = []
        native: tuple[list[Any], list[Any]] = [], []
        for full in fulls:
            if self._is_ordered(full.itemsize, num_parts):
                parts = self.scratch.take(full, full.numel())
                works.append(dist.all_to_all_single(parts, full, group=group, async_op=True))
                lent.append(parts)
                received.append(parts.chunk(num_parts))
            else:
                if full.dtype is torch.float16:
                    full.div_(self._divisor)
                received.append([full.chunk(num_parts)[self.axes.shard_index]])
                native[0].append(received[-1][0])
                native[1].append(full)
        works += reduce_scatter_many(*native, group)

        def receive() -> list[Sequence[torch.Tensor]]:
            self._works(*works).wait()
            return received

        # All float16 buffers are ordered (lent, not divided), or all are divided.
        return Reduction(receive, partial(self.scratch.give, *lent), 1 if lent else self._divisor)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        replicas, group = self.axes.mesh.replicate, self.axes.replicate_group
        self._compare_phases(self.axes.replicate_ranks)
        if not self._is_ordered(values.itemsize, replicas):
            works = self._works(dist.all_reduce(values, group=group, async_op=True))
            yield
            works.wait()
            return
        everyone = self.scratch.take(values, replicas * values.numel())
        works = self._works(all_gather_single(everyone, values, group=group, async_op=True))
        yield
        works.wait()
        sum_in_order(everyone.chunk(replicas), values)
        self.scratch.give(everyone)

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if self.axes.world_group is not None:
            self._compare_phases(self._everyone)
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            group = self.axes.world_group
            self._works(dist.all_reduce(values, op=op, group=group, async_op=True)).wait()

    def _works(self, *works: Any) -> Works:
        return Works(works, self.phase.running or self.phase.next)


class SymmetricHome(Home):
    """A home whose slots NCCL may access on all ranks, so that it uses its copy engines or kernels.

    NCCL knows such memory by its address, and expects the same slots on all ranks. All ranks
    therefore allocate and register slots in the plan's order, each with the group of its
    collectives. Slots stay allocated, because NCCL would mistake later memory at their addresses
    for them; rings that differ are allocated again when the order of units is learned.

    Args:
        axes: The process groups of this rank.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self._axes, self._made = axes, dict[Ring, list[torch.Tensor]]()

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:  # noqa: ARG002
        axes, (memory, pool, device) = self._axes, symmetric_memory()
        for ring in rings:
            group = axes.reduce_group if ring.name.endswith(".grad") else axes.gather_group
            if ring in self._made or group is None:
                continue
            # Makes NCCL's communicator; a barrier may run on gloo if the group has both.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            kind: dict[str, Any] = {"dtype": torch_dtype(ring.dtype), "device": device}
            with torch.cuda.use_mem_pool(pool):
                self._made[ring] = [torch.zeros(ring.numel, **kind) for _ in range(ring.count)]
            for slot in self._made[ring]:
                memory.rendezvous(slot, group.group_name)
        return {ring.name: self._made[ring] for ring in rings if ring in self._made}


# ---- direct exchange

FETCH_TAG, REDUCE_TAG, OUTER_TAG, SPREAD_TAG = 1, 2, 3, 4  # relative to the model's first tag
SIZES, SIZE_SHIFT = 1021, 20  # tags have 31 bits
CHUNK = 64  # parts are multiples of this number of elements
Tensors = Sequence[torch.Tensor]


class DirectTransport(MessageTransport):
    """Point-to-point messages on gloo. A single rank sends nothing, on any device."""

    name = "direct"

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:
        ranks, index = self.axes.shard_ranks, self.axes.shard_index
        compare = self._compare_units(unit)
        works: list[Any] = []
        for full in fulls:
            parts = full.chunk(len(ranks))
            tag = FETCH_TAG + _tag_of(parts[index])
            works += self._exchange([parts[index]] * len(ranks), parts, ranks, tag)
        return Works(works, self.phase.running, compare)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        ranks = self.axes.shard_ranks
        self._compare_phases(ranks)
        chunks = [full.chunk(len(ranks)) for full in fulls]
        return self._sum_chunks(chunks, ranks, self.axes.shard_index, REDUCE_TAG)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Sum in place: each replica sums one chunk in rank order and sends it to the others."""
        ranks, index = self.axes.replicate_ranks, self.axes.replicate_index
        self._compare_phases(ranks)
        chunks = _even_chunks(values, len(ranks))
        reduction = self._sum_chunks([chunks], ranks, index, OUTER_TAG)
        yield
        own = self.scratch.take(values, chunks[index].numel())
        reduction.sum_into([own])
        chunks[index].copy_(own)
        self.scratch.give(own)
        spread = self._exchange([chunks[index]] * len(ranks), chunks, ranks, SPREAD_TAG)
        works = Works(spread, self.phase.running)
        yield
        works.wait()

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        size = self.axes.mesh.world_size
        if size == 1:
            return
        self._compare_phases(self._everyone)
        flat = values.view(-1)
        everyone = flat.new_empty(size * flat.numel())
        work = all_gather_single(everyone, flat, group=self.axes.world_group, async_op=True)
        Works([work], self.phase.running).wait()
        combine_in_order(everyone.chunk(size), flat, maximum=maximum)

    def _sum_chunks(
        self, chunks: Sequence[Tensors], ranks: tuple[int, ...], index: int, tag: int
    ) -> Reduction:
        """Send each rank its chunk of every buffer, and sum all contributions to this rank's chunk.

        Args:
            chunks: The chunks of each buffer, by rank.
            ranks: Global ranks that sum.
            index: Index of this rank in `ranks`.
            tag: Tag of the messages.
        """
        works: list[Any] = []
        received: list[Tensors] = []
        lent: list[torch.Tensor] = []
        for parts in chunks:
            own, take = parts[index], self.scratch.take
            room = [own if i == index else take(own, own.numel()) for i in range(len(ranks))]
            works += self._exchange(parts, room, ranks, tag)
            received.append(room)
            lent += [part for part in room if part is not own]

        def receive() -> list[Tensors]:
            Works(works, self.phase.running).wait()
            return received

        return Reduction(receive, partial(self.scratch.give, *lent))


def _tag_of(part: torch.Tensor) -> int:
    """A tag by size, so that a part of another unit never arrives in this one's place."""
    return (part.nbytes // CHUNK % SIZES) << SIZE_SHIFT


def _even_chunks(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Splits into equal multiples of 64 elements; the last chunks may be smaller or empty."""
    blocks = values.numel() // CHUNK
    bounds = [CHUNK * (blocks * i // count) for i in range(count + 1)]
    return [values[start:stop] for start, stop in pairwise(bounds)]
