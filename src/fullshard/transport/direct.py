"""Direct exchange: each rank sends every peer only the part that the peer needs.

gloo's all-gather and reduce-scatter clone whole buffers and send twice as much as necessary
(docs/log.md). Point-to-point messages on the same process group write directly to their
destination.

[Note: places]
gloo aborts the process if a message is longer than its receiver expects, and confuses messages of
equal length. A rank that skips a backward would send messages of its forward to ranks in backward.
Ranks therefore compare their phases (a forward, a backward, a sum) before the first message of
each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import EngineError
from fullshard.transport._torch_compat import all_gather_single
from fullshard.transport.base import (
    TAGS_A_MODEL,
    Axes,
    Fetch,
    Reduction,
    Transport,
    Works,
    combine_in_order,
)

PLACE_TAG = 0  # over all models, since ranks may run different ones
FETCH_TAG, REDUCE_TAG, OUTER_TAG, SPREAD_TAG = 1, 2, 3, 4  # relative to the model's first tag
PLACE_BYTES = 96
CHUNK = 64  # parts are multiples of this number of elements
Tensors = Sequence[torch.Tensor]


class DirectTransport(Transport):
    """Point-to-point messages on gloo. A single rank sends nothing, on any device."""

    name = "direct"

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        number = axes.first_tag // TAGS_A_MODEL
        self._model = f" (sharded model {number})" if number > 1 else ""
        self._apart = ""  # the error that ranks in different phases raised
        self._phase = ""  # the phase of the running messages

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        ranks, index = self.axes.shard_ranks, self.axes.shard_index
        self._compare_places(ranks)
        works: list[Any] = []
        for full in fulls:
            parts = full.chunk(len(ranks))
            works += self._exchange([parts[index]] * len(ranks), parts, ranks, FETCH_TAG)
        return Works(works, self._phase)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        ranks = self.axes.shard_ranks
        self._compare_places(ranks)
        chunks = [full.chunk(len(ranks)) for full in fulls]
        return self._sum_chunks(chunks, ranks, self.axes.shard_index, REDUCE_TAG)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Sum in place: each replica sums one chunk in rank order and sends it to the others."""
        ranks, index = self.axes.replicate_ranks, self.axes.replicate_index
        self._compare_places(ranks)
        chunks = _even_chunks(values, len(ranks))
        reduction = self._sum_chunks([chunks], ranks, index, OUTER_TAG)
        yield
        own = self.scratch.take(values, chunks[index].numel())
        reduction.sum_into([own])
        chunks[index].copy_(own)
        self.scratch.give(own)
        spread = self._exchange([chunks[index]] * len(ranks), chunks, ranks, SPREAD_TAG)
        works = Works(spread, self._phase)
        yield
        works.wait()

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        size = self.axes.mesh.world_size
        if size == 1:
            return
        self._compare_places(range(size))
        flat = values.view(-1)
        everyone = flat.new_empty(size * flat.numel())
        work = all_gather_single(everyone, flat, group=self.axes.world_group, async_op=True)
        Works([work], self._phase).wait()
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
            own = parts[index]
            room = [
                own if i == index else self.scratch.take(own, own.numel())
                for i in range(len(ranks))
            ]
            works += self._exchange(parts, room, ranks, tag)
            received.append(room)
            lent += [part for part in room if part is not own]

        def receive() -> list[Tensors]:
            Works(works, self._phase).wait()
            return received

        return Reduction(receive, partial(self.scratch.give, *lent))

    def _exchange(
        self, sends: Tensors, receives: Tensors, ranks: Sequence[int], tag: int
    ) -> list[Any]:
        """Exchange a tensor with each of the other ranks."""
        group, works = self.axes.world_group, []
        tag = tag + self.axes.first_tag if tag != PLACE_TAG else tag
        for rank, send, receive in zip(ranks, sends, receives, strict=True):
            if rank != self.rank and send.numel():
                works.append(dist.isend(_as_bytes(send), rank, group=group, tag=tag))
            if rank != self.rank and receive.numel():
                works.append(dist.irecv(_as_bytes(receive), rank, group=group, tag=tag))
        return works

    def _compare_places(self, ranks: Sequence[int]) -> None:
        """Check that all ranks are in the same phase. See [Note: places].

        Raises:
            EngineError: Ranks are, or were, in different phases.
        """
        if len(ranks) == 1 or not (self.home.place or self._apart):
            return
        if self._apart:
            raise EngineError(self._apart)
        own = self._phase = f"{self.home.place}{self._model}"
        self.home.place = ""
        size = self.axes.mesh.world_size
        text = bytearray(own.encode()[:PLACE_BYTES].ljust(PLACE_BYTES) * size)
        texts = torch.frombuffer(text, dtype=torch.uint8).view(size, PLACE_BYTES)
        works = self._exchange([texts[self.rank]] * size, list(texts), range(size), PLACE_TAG)
        Works(works, own).wait()
        places = [bytes(place).decode(errors="replace").strip() for place in texts.tolist()]
        here = places[self.rank]
        found = [f"rank {rank} is at {it}" for rank, it in enumerate(places) if it != here]
        if found:
            self._apart = (
                f"{here}: expected every rank to come here; {', '.join(found)}. One of them left "
                "out or added a forward, a backward or a question that spans all ranks (p.norm(), "
                "p.grad.mean()), or raised an error that it caught: all ranks must make the same "
                "calls. Where a rank has no loss, multiply one by zero."
            )
            raise EngineError(self._apart)


def _even_chunks(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Splits into equal multiples of 64 elements; the last chunks may be smaller or empty."""
    blocks = values.numel() // CHUNK
    bounds = [CHUNK * (blocks * i // count) for i in range(count + 1)]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views memory as bytes, so that gloo need not support the dtype."""
    return tensor.view(torch.uint8)
