"""One process plays one rank of any world: nothing travels.

Peers are taken to hold zeros as their parts of the weights and this rank's own gradients, so that
a reduction is the world-fold sum in rank order, bit for bit what equal ranks would get. For tests
of bookkeeping and host time at sizes that no test machine has; what it trains is meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fullshard.transport.base import Axes, Fetch, Home, OwnHome, Reduction, Scratch
from fullshard.transport.direct import sum_in_order


class FakeTransport:
    """A transport without peers."""

    name = "fake"

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self.rank = axes.rank
        self.scratch = Scratch()
        self.home: Home = OwnHome()

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        for full in fulls:
            for index, part in enumerate(full.chunk(self._axes.mesh.shard)):
                if index != self._axes.shard_index:
                    part.zero_()
        return _Landed(self._axes, fulls)

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        return _Landed(self._axes, fulls)

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        sum_in_order([values.clone()] * self._axes.mesh.replicate, values)
        yield

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if not maximum:
            values.mul_(self._axes.mesh.world_size)


class _Landed:
    """A collective of equal ranks."""

    __slots__ = ("_axes", "_fulls")

    def __init__(self, axes: Axes, fulls: Sequence[torch.Tensor]) -> None:
        self._axes, self._fulls = axes, fulls

    def wait(self) -> None:
        """Return at once."""

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        mesh = self._axes.mesh
        for full, out in zip(self._fulls, outs, strict=True):
            own = full.chunk(mesh.shard)[self._axes.shard_index]
            sum_in_order([own] * mesh.shard, out)
