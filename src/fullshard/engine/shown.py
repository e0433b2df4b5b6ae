"""The trained parameters of all units and what a step shows of each as `p.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.unit import Member, Unit


class Updates(Protocol):
    """Updates parameters while backward runs; see engine/step_in_backward.py."""

    def update(self, unit: Unit) -> None:
        """The unit's gradients have landed."""
        ...

    def squares(self, units: Iterable[Unit]) -> torch.Tensor:
        """(num_params,): this rank's shares of the squared norms of the gradients that landed."""
        ...

    def finish(self, members: Sequence[Member], squares: torch.Tensor) -> None:
        """Backward is done; these members have gradients and were not updated."""
        ...


@dataclass(frozen=True)
class Shown:
    """Trained parameters and what belongs to each, looked up once.

    Attributes:
        plain: (n_local,) each: `grads` without their class.
    """

    members: list[Member]
    grads: list[Any]
    by_id: dict[int, Any]
    plain: list[torch.Tensor]
    records: list[Any]
    hooks: list[Any]

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Shown:
        """Of all units."""
        members = [member for unit in units for member in unit.trainees]
        grads = [member.grad for member in members if member.grad is not None]
        records = [member.param.record for member in members]
        hooks = [record.post_accumulate for record in records]
        plain = [grad.to_local() for grad in grads]
        return cls(members, grads, {id(grad): grad for grad in grads}, plain, records, hooks)

    def show_all(self) -> dict[int, Any]:
        """Show every gradient; returns them by id."""
        with no_guard():
            for member, grad in zip(self.members, self.grads, strict=True):
                member.touched = False
                member.param.grad = grad
        return self.by_id

    def show_touched(self, bits: Sequence[float]) -> dict[int, Any]:
        """Show the gradients of parameters that some rank touched; returns them by id."""
        shown: dict[int, Any] = {}
        with no_guard():
            for member, grad, bit in zip(self.members, self.grads, bits, strict=True):
                member.touched = False
                if not member.updated and (bit > 0 or member.param.grad is not None):
                    member.param.grad = grad
                    shown[id(grad)] = grad
        return shown

    def finish(
        self, updates: Updates, bits: Sequence[float], squares: torch.Tensor
    ) -> dict[int, Any]:
        """Update what was not updated early; returns the gradients that are left, by id.

        Args:
            updates: Has updated some of what this rank touched.
            bits: Whether some rank touched it, by parameter.
            squares: (num_params,), squared norms of all gradients.
        """
        shown = self.show_touched(bits)
        updates.finish([m for m in self.members if id(m.grad) in shown], squares)
        for member in self.members:
            if member.updated:
                member.updated = False
                shown.pop(id(member.grad), None)
        return shown

    def hooked(self) -> list[tuple[Member, Any]]:
        """Those whose parameter has hooks of the user's now."""
        if not any(self.hooks):
            return []
        return [pair for pair in zip(self.members, self.hooks, strict=True) if pair[1]]
