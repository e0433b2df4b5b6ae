"""The ranks of a run as the loop sees them: a few numbers exchanged a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.engine.collectives import Transport


class RankTeam:
    """Exchanges numbers over the transport of a sharded model.

    Args:
        transport: Sums small vectors over all ranks.
        rank: This rank.
        world_size: All ranks.
        device: That the transport serves.
    """

    def __init__(
        self, transport: Transport, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._transport = transport
        self._device = device
        self.rank = rank
        self.world_size = world_size

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order; all ranks call it together.

        rank 0 fills row 0, rank 1 row 1, all else is zero: their sum is everybody's values
        """
        table = torch.zeros(self.world_size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(list(values), dtype=torch.float64)
        flat = table.reshape(-1).to(self._device)
        self._transport.all_reduce(flat)
        return flat.cpu().reshape(self.world_size, len(values)).tolist()
