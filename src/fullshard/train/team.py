"""The ranks of a run: this one's place, and a few numbers that all exchange a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.transport import Transport


@dataclass(frozen=True)
class Seat:
    """This rank's place."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class RankTeam:
    """Exchanges numbers over the transport of a sharded model.

    Args:
        transport: Sums small vectors over all ranks.
        seat: This rank's; its device is the one that the transport serves.
    """

    def __init__(self, transport: Transport, seat: Seat) -> None:
        self._transport, self._device = transport, seat.device
        self.rank, self.world_size = seat.rank, seat.world_size

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order; all ranks call it together.

        rank 0 fills row 0, rank 1 row 1, all else is zero: their sum is everybody's values
        """
        table = torch.zeros(self.world_size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(list(values), dtype=torch.float64)
        flat = table.reshape(-1).to(self._device)
        self._transport.all_reduce(flat)
        return flat.cpu().reshape(self.world_size, len(values)).tolist()
