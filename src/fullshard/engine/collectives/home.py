"""Where weights and gradient slots live, and when they may be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan

Slots = dict[str, list[torch.Tensor]]  # (numel,) each, by ring


@dataclass(frozen=True)
class Weights:
    """One group's weights.

    Attributes:
        master: (part_numel,), master dtype: this rank's part.
        full: (numel,), compute dtype: all parts, the masters themselves where dtypes agree.
    """

    master: torch.Tensor
    full: torch.Tensor


class Home(Protocol):
    """Where masters and gradient slots are, and when they may be written.

    Attributes:
        wrote: Whether this rank has written weights that others compute with since `publish`.
        num_writes: How often this rank was about to write weights.
        place: What the next messages belong to, where ranks compare that. See [Note: places].
    """

    wrote: bool
    num_writes: int
    place: str

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Take the memory of the weights. A collective."""
        ...

    def weights(self, unit: int, group: int) -> Weights | None:
        """A group's weights; None where they are this rank's own business."""
        ...

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:
        """Take the memory of gradient slots, by ring; others are the caller's. A collective."""
        ...

    def publish(self) -> None:
        """A forward of the whole model begins: return when every rank's weights are there."""
        ...

    def leave(self, *, settled: bool) -> None:
        """This rank has read the weights; `settled`: so have all."""
        ...

    def before_write(self) -> None:
        """Return when no rank reads what this one is about to write."""
        ...

    def claim(self, slot: torch.Tensor) -> None:
        """Return when a gradient slot may be filled again."""
        ...


class OwnHome:
    """Every rank for itself: nothing is shared, and nothing is waited for."""

    wrote = False
    place = ""

    def __init__(self) -> None:
        self.num_writes = 0

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Nothing."""

    def weights(self, unit: int, group: int) -> Weights | None:  # noqa: ARG002 the protocol's
        return None

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:  # noqa: ARG002
        return {}

    def publish(self) -> None:
        """Nothing."""

    def leave(self, *, settled: bool) -> None:
        """Nothing."""

    def before_write(self) -> None:
        self.num_writes += 1

    def claim(self, slot: torch.Tensor) -> None:
        """Nothing."""
