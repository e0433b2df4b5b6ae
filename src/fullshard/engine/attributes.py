"""Tensors that a unit's modules keep as attributes, such as a loss that no output returns.

    def forward(self, x):
        self.aux_loss = balance(self.router(x))     # whoever sums the losses finds it there

The gradient of such a tensor enters the unit like the gradient of an output, so it is watched (see
[Note: watched outputs]). Attributes that may hold tensors or small containers are scanned; the list
is cached until a module gets another attribute. An attribute that is None or a number may hold a
tensor later (`self.aux_loss = 0.0` in an evaluation), unless its class lists it as a constant.
"""

from __future__ import annotations

import copyreg
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

MAX_DEPTH = 8  # containers in containers
MAX_ITEMS = 64  # of a container that is looked into: a longer one is a history
# Holder, key, what was there, what is there now.
Undo = list[tuple[Any, Any, Any, Any]]
_Container = list | tuple | dict | deque | set | frozenset
_NUMBERS = {bool, int, float}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModuleTensors:
    """Tensors that the modules of one unit keep as attributes.

    Args:
        modules: Modules of the unit, without the modules of inner units.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [vars(module) for module in modules]
        self._constants = [getattr(module, "__constants__", ()) for module in modules]
        self._sizes: list[int] = []
        self._candidates: list[tuple[dict[str, Any], str]] = []

    def values(self) -> list[Any]:
        """Current attributes: tensors, and containers of at most MAX_ITEMS items."""
        return [table[name] for table, name in self._places()]

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
        """Replace the tensors in the attributes; returns what `put_back` needs to undo it."""
        undo: Undo = []
        for table, name in self._places():
            _set(table, name, _change(table[name], change, Walk(undo=undo)), undo)
        return undo

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        sizes = list(map(len, self._tables))
        if sizes != self._sizes:
            self._sizes = sizes
            self._candidates = [
                (table, name)
                for table, constants in zip(self._tables, self._constants, strict=True)
                for name, value in table.items()
                if name not in _OF_EVERY_MODULE
                and name not in constants
                and (value is None or isinstance(value, int | float | torch.Tensor | _Container))
            ]
        found: list[tuple[dict[str, Any], str]] = []
        for table, name in self._candidates:
            value = table.get(name)
            if type(value) in _NUMBERS or value is None:
                continue
            if isinstance(value, torch.Tensor) or (
                isinstance(value, _Container) and 0 < len(value) <= MAX_ITEMS
            ):
                found.append((table, name))
        return found


def own_modules(module: nn.Module, others: set[int]) -> list[nn.Module]:
    """A module and its descendants, without the modules with these ids and their descendants."""
    found = [module]
    for child in module.children():
        if id(child) not in others:
            found += own_modules(child, others)
    return found


@dataclass
class Walk:
    """State of one traversal of an output.

    Attributes:
        seen: Ids of the objects visited so far.
        undo: List that each change is appended to; None if changes are permanent.
        depth: Number of containers around the current object.
    """

    seen: set[int] = field(default_factory=set[int])
    undo: Undo | None = None
    depth: int = 0


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an output, as `change_tensors` finds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (list, tuple) and all(isinstance(x, torch.Tensor) for x in value):
        return list(value)
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    change_tensors(value, note)
    return found


def change_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors of an output in place; tuples and sets are rebuilt.

    Visits tuples, lists, sets, mappings (ModelOutput) and objects with attributes or slots
    (dataclasses, torch.distributions), each once, down to a depth of MAX_DEPTH. Skips a container
    of more than MAX_ITEMS items unless its first item is a tensor or a container.
    """
    return _change(value, change, Walk())


def put_back(undo: Undo) -> None:
    """Undo changes of `ModuleTensors.change` that nobody has overwritten."""
    for holder, key, was, now in reversed(undo):
        if _get(holder, key) is now:
            _set(holder, key, was, None)


def _change(value: Any, change: Callable[[torch.Tensor], torch.Tensor], walk: Walk) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, _LEAVES) or id(value) in walk.seen:
        return value
    if walk.depth == MAX_DEPTH or _is_long(value):
        return value
    walk.seen.add(id(value))
    walk.depth += 1
    try:
        if isinstance(value, tuple | set | frozenset):
            items = [_change(item, change, walk) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
        for key, item in _items(value):
            changed = _change(item, change, walk)
            if changed is not item:
                _set(value, key, changed, walk.undo)
    finally:
        walk.depth -= 1
    return value


def _is_long(value: Any) -> bool:
    if not isinstance(value, _Container) or len(value) <= MAX_ITEMS:
        return False
    first = next(iter(value.values() if isinstance(value, dict) else value))
    return not isinstance(first, torch.Tensor | _Container)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a list, a mapping or an object; no property is asked."""
    if isinstance(value, list | deque):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    found = dict(getattr(value, "__dict__", None) or {})
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  in all bases
        if name not in found and hasattr(value, name):
            found[name] = getattr(value, name)
    return list(found.items())


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, list | deque):
        return holder[key] if key < len(holder) else None
    return holder.get(key) if isinstance(holder, dict) else getattr(holder, key, None)


def _set(holder: Any, key: Any, value: Any, undo: Undo | None) -> None:
    was = _get(holder, key)
    if was is value:
        return
    if undo is not None:
        undo.append((holder, key, was, value))
    if isinstance(holder, list | dict | deque):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value)  # also of a frozen dataclass


_LEAVES = (
    *(str, int, float, complex, bytes, type, torch.dtype, torch.device, torch.Generator),
    *(nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger),
    *weakref.ProxyTypes,
)
