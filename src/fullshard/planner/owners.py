"""The owners of whole tensors, for optimizers that need all of a tensor at once.

Every sharded parameter has one owner among the ranks that share it. Tensors are assigned in
descending size, each to the rank with the fewest elements so far (LPT), so that states are spread
evenly. A step then processes rounds of consecutive parameters. In a round no owner has more
elements than the largest parameter, which bounds the memory of a rank beyond its shards.

    parameters   a(9)  b(4)  c(4)  d(9)
    2 ranks      0     0     1     1
    rounds       |-1-| |---2---|   |-3-|      rank 0 may not have a and b at the same time
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from fullshard.planner.optimizers import OptimizerStates
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.units import GroupPlan


@dataclass(frozen=True, slots=True)
class Owners:
    """The owner of every parameter.

    Attributes:
        of: The owner's index on the shard axis, for each parameter.
        rounds: Indices of the parameters of each round; every parameter is in one round.
    """

    of: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @classmethod
    def choose(cls, numels: Sequence[int], num_parts: int) -> Owners:
        """Returns the owners of parameters of these sizes, in the order of the plan."""
        of = [0] * len(numels)
        loads = [(0, part) for part in range(num_parts)]  # a heap: the least loaded is first
        for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
            load, of[index] = loads[0]
            heapreplace(loads, (load + numels[index], of[index]))
        most = max(numels, default=0)
        rounds: list[list[int]] = []
        held = [0] * num_parts
        for index, numel in enumerate(numels):
            if not rounds or held[of[index]] + numel > most:
                rounds.append([])
                held = [0] * num_parts
            rounds[-1].append(index)
            held[of[index]] += numel
        return cls(tuple(of), tuple(map(tuple, rounds)))


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A parameter, its owner among `num_parts` ranks, and its round."""

    shape: tuple[int, ...]
    itemsize: int
    num_parts: int
    owner: int
    turn: int


def owned_tensors(
    trained: Sequence[GroupPlan], optimizer: OptimizerStates
) -> Iterator[OwnedTensor]:
    """Yields the owned tensors of a plan; every rank owns the tensors that are not sharded."""
    if optimizer.owned is None:
        return
    found = [
        (placement.shape, ITEMSIZE[group.dtypes.master], group.layout.num_parts)
        for group in trained
        for placement in group.layout.placements
        if optimizer.owns(placement.name, placement.shape)
    ]
    cut = [entry for entry in found if entry[2] > 1]
    yield from (OwnedTensor(*entry, 0, 0) for entry in found if entry[2] == 1)
    owners = Owners.choose([math.prod(shape) for shape, _, _ in cut], cut[0][2] if cut else 1)
    for turn, indices in enumerate(owners.rounds):
        yield from (OwnedTensor(*cut[index], owners.of[index], turn) for index in indices)
