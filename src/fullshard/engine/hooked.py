"""Reductions that the caller brings.

    hook(full)         where every rank keeps the whole: (numel,) becomes what is accumulated
    hook(full, part)   else: part, (part_numel,), becomes this rank's part of it

The hook divides as well; nothing is divided after it. It is called in the plan's order, which is
the same on all ranks, so that it may call collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fullshard.engine.engine import Engine

Hook = Callable[..., object]


def reduce_with(hook: Hook, engine: Engine) -> None:
    """Let a hook reduce this engine's gradients from the next backward on."""
    engine.gradients.divisor = 1
    for unit in engine.units:
        unit.reduce_hook = hook


class HookedReduction:
    """A reduction that a hook has made.

    Args:
        hook: The caller's.
        fulls: (numel,) each, reduce dtype, this rank's unreduced gradients.
        num_parts: Ranks that they are cut over.
    """

    def __init__(self, hook: Hook, fulls: Sequence[torch.Tensor], num_parts: int) -> None:
        self._made: list[torch.Tensor] = []
        for full in fulls:
            given = full.detach()  # its `.data` is the hook's to replace
            made = given
            if num_parts == 1:
                hook(given)
            else:
                made = given.new_zeros(given.numel() // num_parts)
                hook(given, made)
            self._made.append(made)

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        """Write what was made into the parts that accumulate."""
        for out, made in zip(outs, self._made, strict=True):
            out.copy_(made)
