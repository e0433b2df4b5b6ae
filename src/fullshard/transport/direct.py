"""Direct exchange: each rank sends every peer just the part that it needs.

gloo's own all-gather and reduce-scatter clone whole buffers and send twice what is needed
(docs/log.md); point-to-point messages on the same process group write straight into place.

[Note: places]
gloo ends the process when a message is longer than its receiver expects, and mixes up messages of
equal length. A rank that left out a backward would send one where another rank expects its forward.
So ranks compare their places (a forward, a backward, a sum) before the first message of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import EngineError, HangError
from fullshard.transport._torch_compat import all_gather_single
from fullshard.transport.base import TAGS_A_MODEL, Axes, Fetch, Home, OwnHome, Reduction, Scratch

PLACE_TAG = 0  # of all models: ranks may be in different ones
FETCH_TAG, REDUCE_TAG, OUTER_TAG, SPREAD_TAG = 1, 2, 3, 4  # from the model's first tag
PLACE_BYTES = 96
CHUNK = 64  # elements; parts are multiples of it


class DirectTransport:
    """Point-to-point messages on gloo. Without peers nothing travels, on any device."""

    name = "direct"

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.home: Home = OwnHome()
        self.rank = axes.rank
        self.scratch = Scratch()
        number = axes.first_tag // TAGS_A_MODEL
        self._model = f" (sharded model {number})" if number > 1 else ""
        self._apart = ""  # what was said when ranks were at several places

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        ranks, index = self.axes.shard_ranks, self.axes.shard_index
        self._meet(ranks)
        works: list[Any] = []
        for full in fulls:
            parts = _as_bytes(full).chunk(len(ranks))
            works += _spread(parts, ranks, index, _channel(self.axes, FETCH_TAG))
        return _Works(works)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        self._meet(self.axes.shard_ranks)
        return _DirectReduction(self.axes, fulls, self.scratch)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Each replica sums one chunk in rank order, then sends it to the others."""
        self._meet(self.axes.replicate_ranks)
        ranks, index = self.axes.replicate_ranks, self.axes.replicate_index
        chunks = _even_chunks(values, len(ranks))
        parts = _received(chunks, index, self.scratch)
        channel = _channel(self.axes, OUTER_TAG)
        works = _Works(_collect(chunks, parts, (ranks, index), channel))
        yield
        works.wait()
        own = self.scratch.take(values, chunks[index].numel())
        sum_in_order(parts, own)
        chunks[index].copy_(own)
        _give_back([*parts, own], index, self.scratch)
        byte_chunks = [_as_bytes(chunk) for chunk in chunks]
        works = _Works(_spread(byte_chunks, ranks, index, _channel(self.axes, SPREAD_TAG)))
        yield
        works.wait()

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        size = self.axes.mesh.world_size
        if size == 1:
            return
        self._meet(range(size))
        flat = values.view(-1)
        everyone = flat.new_empty(size * flat.numel())
        all_gather_single(everyone, flat, group=self.axes.world_group)
        combine_in_order(list(everyone.chunk(size)), flat, maximum=maximum)

    def _meet(self, ranks: Sequence[int]) -> None:
        """Before anything is sent to these ranks: all are at one place. See [Note: places].

        Raises:
            EngineError: They are not, now or at an earlier place.
        """
        if len(ranks) == 1 or not (self.home.place or self._apart):
            return
        if self._apart:
            raise EngineError(self._apart)
        own, self.home.place = f"{self.home.place}{self._model}", ""
        size = self.axes.mesh.world_size
        text = bytearray(own.encode()[:PLACE_BYTES].ljust(PLACE_BYTES) * size)
        told = torch.frombuffer(text, dtype=torch.uint8).view(size, PLACE_BYTES)
        channel = self.axes.world_group, PLACE_TAG
        _Works(_spread(told, tuple(range(size)), self.rank, channel)).wait()
        places = [bytes(place).decode(errors="replace").strip() for place in told.tolist()]
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


class _Works:
    """Messages under way."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        self._works = []


def _lost(error: RuntimeError) -> EngineError | HangError:
    """What is said where a message does not come."""
    if "imed out" in str(error):
        return HangError(
            "a message: expected one from every rank within the process group's timeout; none "
            "came. Another rank computes, or waits for something else."
        )
    return EngineError(
        "a message: expected every rank to take part; one has ended or closed its connection. "
        "Its own output says why."
    )


class _DirectReduction:
    """Parts from all peers of the shard axis, summed in rank order."""

    __slots__ = ("_axes", "_parts", "_scratch", "_works")

    def __init__(self, axes: Axes, fulls: Sequence[torch.Tensor], scratch: Scratch) -> None:
        self._axes, self._scratch = axes, scratch
        self._parts: list[list[torch.Tensor]] = []
        channel = _channel(axes, REDUCE_TAG)
        works: list[Any] = []
        for full in fulls:
            parts = full.chunk(len(axes.shard_ranks))
            received = _received(parts, axes.shard_index, scratch)
            works += _collect(parts, received, (axes.shard_ranks, axes.shard_index), channel)
            self._parts.append(received)
        self._works = _Works(works)

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        self._works.wait()
        for out, parts in zip(outs, self._parts, strict=True):
            sum_in_order(parts, out)
            _give_back(parts, self._axes.shard_index, self._scratch)
        self._parts = []


def sum_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Sum equal parts into `out` in its dtype, the first rank's first.

    Args:
        parts: (numel,) each, reduce dtype.
        out: (numel,), accumulate dtype; not among the parts.
    """
    if len(parts) > 1 and parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)


def combine_in_order(vectors: Sequence[torch.Tensor], out: torch.Tensor, *, maximum: bool) -> None:
    """Every rank's vector summed, or the maximum of each element, into `out`.

    Args:
        vectors: (numel,) each, of all ranks in order.
        out: (numel,), of their dtype; not among them.
    """
    out.copy_(vectors[0])
    for vector in vectors[1:]:
        if maximum:
            torch.maximum(out, vector, out=out)
        else:
            out.add_(vector)


def _even_chunks(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    """As even as multiples of 64 elements allow; the last ones may be empty."""
    blocks = values.numel() // CHUNK
    bounds = [CHUNK * (blocks * i // count) for i in range(count + 1)]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _channel(axes: Axes, tag: int) -> tuple[Any, int]:
    """The group and the tag of one kind of message of one model."""
    return axes.world_group, axes.first_tag + tag


def _spread(parts: Any, ranks: tuple[int, ...], index: int, channel: tuple[Any, int]) -> list[Any]:
    """Send the own part to every peer and receive theirs in place."""
    group, tag = channel
    works = []
    for i, rank in enumerate(ranks):
        if i == index:
            continue
        if parts[index].numel():
            works.append(dist.isend(parts[index], rank, group=group, tag=tag))
        if parts[i].numel():
            works.append(dist.irecv(parts[i], rank, group=group, tag=tag))
    return works


def _received(parts: Any, index: int, scratch: Scratch) -> list[torch.Tensor]:
    """Room for the own part of every rank, in rank order; the own rank's is in place."""
    own = parts[index]
    return [own if i == index else scratch.take(own, own.numel()) for i in range(len(parts))]


def _give_back(received: list[torch.Tensor], index: int, scratch: Scratch) -> None:
    for i, part in enumerate(received):
        if i != index:
            scratch.give(part)


def _collect(
    parts: Any,
    received: list[torch.Tensor],
    place: tuple[tuple[int, ...], int],
    channel: tuple[Any, int],
) -> list[Any]:
    """Send every peer its part and receive the own part from each."""
    (ranks, index), (group, tag) = place, channel
    works = []
    for i, rank in enumerate(ranks):
        if i == index:
            continue
        if parts[i].numel():
            works.append(dist.isend(_as_bytes(parts[i]), rank, group=group, tag=tag))
        if parts[index].numel():
            works.append(dist.irecv(_as_bytes(received[i]), rank, group=group, tag=tag))
    return works


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: gloo then need not know the dtype."""
    return tensor.view(torch.uint8)
