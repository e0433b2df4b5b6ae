"""What the engine asks of a transport.

    fetch(fulls)    every rank's part of each flat buffer to every rank, in place
    reduce(fulls)   this rank's part of each sum over the shard axis
    sum_replicas(x) a part's sum over the replicate axis
    all_reduce(x)   small vectors: bits, squared norms

Buffers of one call differ in dtype or in what is trained; they travel in one collective.

[Note: sums have an order]
Gradients are summed in promote(float32, master dtype) and in rank order, so that `direct`,
`shared` and `fake` give the same bits as each other at any world size, and `c10d` too with
`reduction: ordered`. The native reduction of c10d is equal at two ranks and within rounding above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard.engine.collectives.home import Home
from fullshard.engine.collectives.scratch import Scratch
from fullshard.planner.mesh import Mesh

TAGS_A_MODEL = 8


@dataclass(frozen=True, slots=True)
class Axes:
    """This rank's place in the mesh and its process groups (None where the axis has size 1).

    Attributes:
        shard_ranks: Global ranks that share one copy, this one among them.
        replicate_ranks: Global ranks that hold the same part.
        gather_group: Carries all-gathers over the shard axis.
        reduce_group: Carries reductions over the shard axis, so that the order of the two kinds
            need not agree between ranks, and NCCL runs them side by side.
        replicate_group: Carries the outer reduction.
        world_group: All ranks of the mesh, for small vectors.
        first_tag: Messages between ranks are numbered from here: each model has tags of its own.
    """

    mesh: Mesh
    rank: int
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    gather_group: Any = None
    reduce_group: Any = None
    replicate_group: Any = None
    world_group: Any = None
    first_tag: int = 0

    @property
    def shard_index(self) -> int:
        return self.mesh.coordinates(self.rank)[1]

    @property
    def replicate_index(self) -> int:
        return self.mesh.coordinates(self.rank)[0]


class Fetch(Protocol):
    """An all-gather under way."""

    def wait(self) -> None:
        """Return when the buffers are whole and may be read, and this rank's parts rewritten."""
        ...


class Reduction(Protocol):
    """A reduction under way."""

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        """Write the sums over the shard axis of this rank's parts; the inputs are then free.

        Args:
            outs: (part_numel,) each, accumulate dtype.
        """
        ...


class Transport(Protocol):
    """Moves the parts of flat buffers.

    Attributes:
        home: Where weights and gradient slots are, and when they may be written.
    """

    name: str
    rank: int
    scratch: Scratch
    home: Home

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        """Fill the other ranks' parts of each (numel,); this rank's part is in place."""
        ...

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """Sum each (numel,), reduce dtype, over the shard axis. Unchanged until `land`."""
        ...

    def sum_replicas(self, values: torch.Tensor) -> None:
        """Sum (part_numel,), accumulate dtype, over the replicate axis, in place."""
        ...

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum (or take the maximum of) a small contiguous vector over all ranks, in place."""
        ...
