"""torch.distributed's own collectives: NCCL, and gloo for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.values import Reduction as ReductionKind
from fullshard.transport._torch_compat import (
    all_gather_many,
    all_gather_single,
    reduce_scatter_many,
)
from fullshard.transport.base import Axes, Fetch, Home, OwnHome, Reduction, Scratch
from fullshard.transport.direct import sum_in_order


class C10dTransport:
    """In-place all-gather and reduce-scatter on the process groups' backend."""

    name = "c10d"

    def __init__(self, axes: Axes, kind: ReductionKind) -> None:
        self._axes, self._kind = axes, kind
        self.rank = axes.rank
        self.scratch = Scratch()
        self.home: Home = OwnHome()

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        axes = self._axes
        if axes.mesh.shard == 1:
            return _Done()
        owns = [full.chunk(axes.mesh.shard)[axes.shard_index] for full in fulls]
        return all_gather_many(fulls, owns, axes.gather_group)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        if self._kind is ReductionKind.ORDERED:
            return _OrderedReduction(self._axes, fulls, self.scratch)
        return _NativeReduction(self._axes, fulls, self.scratch)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        replicas, group = self._axes.mesh.replicate, self._axes.replicate_group
        if self._kind is ReductionKind.NATIVE:
            work: Any = dist.all_reduce(values, group=group, async_op=True)
            yield
            work.wait()
            return
        everyone = self.scratch.take(values, replicas * values.numel())
        work = all_gather_single(everyone, values, group=group, async_op=True)
        yield
        work.wait()
        sum_in_order(list(everyone.chunk(replicas)), values)
        self.scratch.give(everyone)

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if self._axes.world_group is not None:
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            dist.all_reduce(values, op=op, group=self._axes.world_group)


class _Done:
    """Nothing travels."""

    def wait(self) -> None:
        """Return at once."""


class _NativeReduction:
    """Reduce-scatter in the wire dtype."""

    __slots__ = ("_axes", "_parts", "_scratch", "_works")

    def __init__(self, axes: Axes, fulls: Sequence[torch.Tensor], scratch: Scratch) -> None:
        self._axes, self._scratch = axes, scratch
        self._works: list[Any] = []
        self._parts = list(fulls)
        if axes.mesh.shard > 1:
            self._parts = [scratch.take(full, full.numel() // axes.mesh.shard) for full in fulls]
            self._works = reduce_scatter_many(self._parts, fulls, axes.reduce_group)

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        for work in self._works:
            work.wait()
        for out, part in zip(outs, self._parts, strict=True):
            out.copy_(part)
            if self._axes.mesh.shard > 1:
                self._scratch.give(part)


class _OrderedReduction:
    """All-to-all, then a local sum in rank order. See [Note: sums have an order]."""

    __slots__ = ("_axes", "_received", "_scratch", "_works")

    def __init__(self, axes: Axes, fulls: Sequence[torch.Tensor], scratch: Scratch) -> None:
        self._axes, self._scratch = axes, scratch
        self._works: list[Any] = []
        self._received = list(fulls)
        if axes.mesh.shard > 1:
            self._received = [scratch.take(full, full.numel()) for full in fulls]
            self._works = [
                dist.all_to_all_single(received, full, group=axes.reduce_group, async_op=True)
                for received, full in zip(self._received, fulls, strict=True)
            ]

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        for work in self._works:
            work.wait()
        for out, received in zip(outs, self._received, strict=True):
            sum_in_order(list(received.chunk(self._axes.mesh.shard)), out)
            if self._axes.mesh.shard > 1:
                self._scratch.give(received)
