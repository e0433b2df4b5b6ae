"""The trained parameters of all units and what a step shows of each as `p.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.norms import Squares
from fullshard.engine.unit import Member, Unit


class Updates(Protocol):
    """Updates parameters while backward runs; see engine/step_in_backward.py."""

    def update(self, unit: Unit) -> None:
        """The unit's gradients have landed."""
        ...

    def finish(self, members: Sequence[Member], squares: torch.Tensor) -> None:
        """Backward is done; these members were not updated."""
        ...


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

    def show(self, bits: Sequence[float]) -> dict[int, Any]:
        """Show the gradients of parameters that some rank touched; returns them by id."""
        shown: dict[int, Any] = {}
        with no_guard():
            for member, grad, bit in zip(self.members, self.grads, bits, strict=True):
                member.touched = False
                if bit > 0 or member.param.grad is not None:
                    member.param.grad = grad
                    shown[id(grad)] = grad
        return shown

    def update_rest(
        self, updates: Updates, bits: Sequence[float], squares: torch.Tensor
    ) -> dict[int, Any]:
        """Update what was not updated yet; returns the gradients that are left, by id."""
        shown = self.show(bits)
        left = [member for member in self.members if not member.updated]
        updates.finish([member for member in left if id(member.grad) in shown], squares)
        with no_guard():
            for member in self.members:
                if member.updated:
                    member.updated = False
                    member.param.grad = None
                    shown.pop(id(member.grad), None)
        return shown

    def hooked(self) -> list[tuple[Member, Any]]:
        """Those whose parameter has hooks of the user's now."""
        if not any(self.hooks):
            return []
        return [pair for pair in zip(self.members, self.hooks, strict=True) if pair[1]]
