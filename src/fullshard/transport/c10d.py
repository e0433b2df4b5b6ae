"""torch.distributed's collectives: NCCL, and gloo for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.values import Reduction as ReductionKind
from fullshard.transport._torch_compat import (
    all_gather_many,
    all_gather_single,
    reduce_scatter_many,
)
from fullshard.transport.base import Axes, Fetch, Reduction, Works, sum_in_order
from fullshard.transport.messages import MessageTransport


class C10dTransport(MessageTransport):
    """In-place all-gather and reduce-scatter on the process groups' backend.

    Args:
        axes: This rank's place in the mesh.
        kind: Whether the backend sums, or sums are computed in rank order.
    """

    name = "c10d"

    def __init__(self, axes: Axes, kind: ReductionKind) -> None:
        super().__init__(axes)
        self._is_ordered = kind is ReductionKind.ORDERED

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Fetch:
        axes = self.axes
        if axes.mesh.shard == 1:
            return Works(())
        self._compare_places(axes.shard_ranks)
        self._compare_units(unit)()
        owns = [full.chunk(axes.mesh.shard)[axes.shard_index] for full in fulls]
        return self._works(all_gather_many(fulls, owns, axes.gather_group))

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """A reduce-scatter, or for ordered sums an all-to-all and a local sum in rank order."""
        num_parts, group = self.axes.mesh.shard, self.axes.reduce_group
        if num_parts == 1:
            return Reduction(lambda: [[full] for full in fulls])
        self._compare_places(self.axes.shard_ranks)
        share = 1 if self._is_ordered else num_parts
        received = [self.scratch.take(full, full.numel() // share) for full in fulls]
        works: list[Any]
        if self._is_ordered:
            works = [
                dist.all_to_all_single(parts, full, group=group, async_op=True)
                for parts, full in zip(received, fulls, strict=True)
            ]
        else:
            works = reduce_scatter_many(received, fulls, group)

        def receive() -> list[Sequence[torch.Tensor]]:
            self._works(*works).wait()
            return [parts.chunk(num_parts // share) for parts in received]

        return Reduction(receive, partial(self.scratch.give, *received))

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        replicas, group = self.axes.mesh.replicate, self.axes.replicate_group
        self._compare_places(self.axes.replicate_ranks)
        if not self._is_ordered:
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
            self._compare_places(range(self.axes.mesh.world_size))
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            group = self.axes.world_group
            self._works(dist.all_reduce(values, op=op, group=group, async_op=True)).wait()

    def _works(self, *works: Any) -> Works:
        return Works(works, self._phase or self.home.place)
