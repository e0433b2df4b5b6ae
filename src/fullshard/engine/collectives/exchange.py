"""Messages between the ranks of a shard axis that no flat buffer has a form for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.engine.collectives.groups import own_group
from fullshard.planner.mesh import Mesh


@dataclass(frozen=True)
class Exchange:
    """Slices of any length that travel between ranks which share a copy, straight into place.

    Attributes:
        ranks: Global ranks, by part.
        part: This rank's.
        group: Process group of these ranks.
    """

    ranks: tuple[int, ...]
    part: int
    group: Any

    @classmethod
    def over(cls, mesh: Mesh, rank: int) -> Exchange:
        """Between the ranks of this rank's shard axis. A collective the first time."""
        replica, part = mesh.coordinates(rank)
        groups = mesh.shard_groups()
        return cls(tuple(groups[replica]), part, own_group("reduce", groups, replica))

    def run(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Return when all have come. Two ranks must list their messages in one order.

        Args:
            sends: Parts, and contiguous (numel,) for each.
            receives: Likewise; written in place.
        """
        messages = [
            dist.P2POp(call, tensor.view(torch.uint8), self.ranks[part], self.group)
            for call, told in ((dist.isend, sends), (dist.irecv, receives))
            for part, tensor in told
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
