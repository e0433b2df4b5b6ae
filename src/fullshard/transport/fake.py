"""A single process simulates one rank of any world, without communication.

Simulated peers have zeros as their parts of the weights, and this rank's gradients. A reduction is
therefore a sum of equal values in rank order, with the bits that equal ranks would get. It serves
tests of bookkeeping and host time at large world sizes; training is meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fullshard.transport.base import Fetch, Reduction, Transport, Works, sum_in_order


class FakeTransport(Transport):
    """A transport without peers."""

    name = "fake"

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Fetch:  # noqa: ARG002
        for full in fulls:
            for index, part in enumerate(full.chunk(self.axes.mesh.shard)):
                if index != self.axes.shard_index:
                    part.zero_()
        return Works(())

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        shard, index = self.axes.mesh.shard, self.axes.shard_index
        return Reduction(lambda: [[full.chunk(shard)[index]] * shard for full in fulls])

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        sum_in_order([values.clone()] * self.axes.mesh.replicate, values)
        yield

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if not maximum:
            values.mul_(self.axes.mesh.world_size)
