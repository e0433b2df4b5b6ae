"""Tensors that a unit's modules keep: losses that leave a forward by no output.

    def forward(self, x):
        self.aux_loss = balance(self.router(x))     # whoever sums the losses finds it there

A gradient that comes by such a tensor enters the unit as one of an output does, so it is watched
as outputs are (see [Note: watched outputs]). Looked at is what may hold a tensor: attributes that
are tensors, None, or small lists, tuples and mappings; which these are is asked once, and again
when a module gets another attribute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MOST_ITEMS = 64  # of a container that is looked into: a longer one is a history
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Kept:
    """What the modules of one unit keep.

    Args:
        modules: The unit's own, without those of units in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._sizes = [-1] * len(self._tables)
        self._names: list[list[str]] = [[] for _ in self._tables]

    def values(self) -> list[Any]:
        """Tensors, and containers of at most MOST_ITEMS items, that are there now."""
        found: list[Any] = []
        for at, table in enumerate(self._tables):
            if len(table) != self._sizes[at]:
                self._sizes[at] = len(table)
                self._names[at] = [name for name, value in table.items() if _may_hold(name, value)]
            for name in self._names[at]:
                value = table.get(name)
                if isinstance(value, torch.Tensor) or (
                    isinstance(value, list | tuple | dict) and 0 < len(value) <= MOST_ITEMS
                ):
                    found.append(value)
        return found


def _may_hold(name: str, value: object) -> bool:
    if name in _OF_EVERY_MODULE:
        return False
    return value is None or isinstance(value, torch.Tensor | list | tuple | dict)


def own_modules(module: nn.Module, others: set[int]) -> list[nn.Module]:
    """The module and all in it, without those whose id is among the others and what is in these."""
    found = [module]
    for child in module.children():
        if id(child) not in others:
            found += own_modules(child, others)
    return found
