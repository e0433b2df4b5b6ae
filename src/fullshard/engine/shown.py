"""The trained parameters of all units and what a step shows of each as `p.grad`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.engine.norms import Squares
from fullshard.engine.unit import Member, Unit


@dataclass(frozen=True)
class Shown:
    """Trained parameters and what belongs to each, looked up once.

    Attributes:
        squares: This rank's shares of the gradients' squared norms.
    """

    members: list[Member]
    grads: list[Any]
    by_id: dict[int, Any]
    squares: Squares
    hooks: list[Any]

    @classmethod
    def of(cls, units: Iterable[Unit], device: torch.device) -> Shown:
        """Of all units; sums are made on the device that ranks send from."""
        members = [member for unit in units for member in unit.trainees]
        grads = [member.grad for member in members if member.grad is not None]
        records = [member.param.record for member in members]
        hooks = [record.post_accumulate for record in records]
        squares = Squares([grad.to_local() for grad in grads], records, device)
        return cls(members, grads, {id(grad): grad for grad in grads}, squares, hooks)

    def hooked(self) -> list[tuple[Member, Any]]:
        """Those whose parameter has hooks of the user's now."""
        if not any(self.hooks):
            return []
        return [pair for pair in zip(self.members, self.hooks, strict=True) if pair[1]]
