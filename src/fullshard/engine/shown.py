"""The trained parameters of all units and what a step shows of each as `p.grad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.engine._torch_compat import no_guard, storage_use_count
from fullshard.engine.unit import Group, Member, Unit


def num_holders(group: Group) -> list[int]:
    """How many objects hold the memory of a group's gradients, and each of the gradients."""
    assert group.grads is not None
    memory = storage_use_count(group.grads.memory._cdata)
    return [memory, *map(sys.getrefcount, group.views)]


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
    def of(cls, units: Sequence[Unit]) -> Shown:
        """Of all units."""
        members = [member for unit in units for member in unit.trainees]
        grads = [member.grad for member in members if member.grad is not None]
        records = [member.param.record for member in members]
        hooks = [record.post_accumulate for record in records]
        plain = [grad.to_local() for grad in grads]
        by_id = {id(grad): grad for grad in grads}
        shown = cls(members, grads, by_id, plain, records, hooks)
        for group in (group for unit in units for group in unit.trained):
            assert group.grads is not None
            group.grads.holders = group.grads.holders or num_holders(group)
        return shown

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
                if bit > 0 or member.param.grad is not None:
                    member.param.grad = grad
                    shown[id(grad)] = grad
        return shown

    def hooked(self) -> list[tuple[Member, Any]]:
        """Those whose parameter has hooks of the user's now."""
        if not any(self.hooks):
            return []
        return [pair for pair in zip(self.members, self.hooks, strict=True) if pair[1]]
