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
from fullshard.transport.base import Axes, Fetch, Reduction, Transport, Works, sum_in_order


class C10dTransport(Transport):
    """In-place all-gather and reduce-scatter on the process groups' backend.

    Args:
        axes: This rank's place in the mesh.
        kind: Who sums.
    """

    name = "c10d"

    def __init__(self, axes: Axes, kind: ReductionKind) -> None:
        super().__init__(axes)
        self._kind = kind

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        axes = self.axes
        if axes.mesh.shard == 1:
            return Works(())
        owns = [full.chunk(axes.mesh.shard)[axes.shard_index] for full in fulls]
        return self._works(all_gather_many(fulls, owns, axes.gather_group))

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """A reduce-scatter, and for ordered sums an all-to-all and a local sum in rank order."""
        num_parts, group = self.axes.mesh.shard, self.axes.reduce_group
        if num_parts == 1:
            return Reduction(lambda: [[full] for full in fulls])
        works: list[Any] = []
        lent: list[torch.Tensor] = []
        received: list[Sequence[torch.Tensor]] = []
        native: list[int] = []
        for at, full in enumerate(fulls):
            count = num_parts if self._is_ordered(full, num_parts) else 1
            lent.append(self.scratch.take(full, full.numel() // num_parts * count))
            received.append(lent[at].chunk(count))
            if count == 1:
                native.append(at)
            else:
                works.append(dist.all_to_all_single(lent[at], full, group=group, async_op=True))
        works += reduce_scatter_many([lent[i] for i in native], [fulls[i] for i in native], group)

        def receive() -> list[Sequence[torch.Tensor]]:
            self._works(*works).wait()
            return received

        return Reduction(receive, partial(self.scratch.give, *lent))

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        replicas, group = self.axes.mesh.replicate, self.axes.replicate_group
        if not self._is_ordered(values, replicas):
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
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            group = self.axes.world_group
            self._works(dist.all_reduce(values, op=op, group=group, async_op=True)).wait()

    def _is_ordered(self, values: torch.Tensor, num_ranks: int) -> bool:
        return self._kind.is_ordered(values.itemsize, num_ranks)

    def _works(self, *works: Any) -> Works:
        return Works(works, self.home.place)
