"""Direct exchange: each rank sends every peer only the part that the peer needs.

gloo's all-gather and reduce-scatter clone whole buffers and send twice as much as necessary
(docs/log.md, Step time and transports). Point-to-point messages on the same process group write
directly to their destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fullshard.transport._torch_compat import all_gather_single
from fullshard.transport.base import MessageTransport, Reduction, Works, combine_in_order

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
