"""Tensors that a unit's modules keep as attributes, such as a loss that no output returns.

    def forward(self, x):
        self.aux_loss = balance(self.router(x))     # read by the code that sums the losses

The gradient of such a tensor enters the unit like the gradient of an output, so it is watched
([Note: watched outputs] in engine/step.py). Attributes that may hold tensors or small containers
are scanned; the list is cached until a module gets another attribute. An attribute that is None or
a number may hold a tensor later (`self.aux_loss = 0.0` in an evaluation), unless its class lists it
as a constant.
"""

from __future__ import annotations

import copyreg
import gc
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from fullshard.errors import EngineError

MAX_DEPTH = 16  # containers in containers
MAX_ITEMS = 64  # of a container that is looked into: a longer one is a history
# Holder, key, old value, new value.
Undo = list[tuple[Any, Any, Any, Any]]
_Container = list | tuple | dict | deque | set | frozenset
_Held = torch.Tensor | _Container | types.FunctionType | partial
_Method = types.MethodType | types.BuiltinMethodType | types.MethodWrapperType
_NUMBERS = {bool, int, float}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# A function that wraps a module (functools.wraps, torch.compile) leads to the engine's hooks.
_OURS = "fullshard.engine."


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

    def named(self) -> dict[str, Any]:
        """Current attributes of a single module, by name."""
        return {name: table[name] for table, name in self._places()}

    def change(self, change: Callable[[torch.Tensor], torch.Tensor], of: str) -> Undo:
        """Replace the tensors in the attributes; returns what `put_back` needs to undo it."""
        walk = Walk(of)
        for table, name in self._places():
            _set(table, name, table[name], _change(table[name], change, walk), walk)
        return walk.undo

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
                and (value is None or isinstance(value, int | float | _Held))
            ]
        found: list[tuple[dict[str, Any], str]] = []
        for table, name in self._candidates:
            value = table.get(name)
            if type(value) in _NUMBERS or value is None:
                continue
            if isinstance(value, _Held) and (
                not isinstance(value, _Container) or 0 < len(value) <= MAX_ITEMS
            ):
                found.append((table, name))
        return found


def own_modules(module: nn.Module, others: set[int]) -> list[nn.Module]:
    """A module and its descendants, without the modules with these ids and their descendants.

    Scripted modules are skipped, because they cannot have hooks, and weakref.proxy objects, which
    `children()` cannot hash: something else holds the module.
    """
    found = [module]
    for child in {id(child): child for child in module._modules.values()}.values():
        skipped = isinstance(child, (torch.jit.ScriptModule, *weakref.ProxyTypes))
        if child is not None and id(child) not in others and not skipped:
            found += own_modules(child, others)
    return found


@dataclass
class Walk:
    """State of one traversal of an output.

    Attributes:
        of: Name of the unit, for errors.
        seen: Objects visited so far and what replaces them, by id. Shared objects stay shared.
        undo: The changes so far.
        depth: Number of containers around the current object.
    """

    of: str
    seen: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    undo: Undo = field(default_factory=list[tuple[Any, Any, Any, Any]])
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

    change_tensors(value, note, "")
    return found


def change_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], of: str) -> Any:
    """Replace the tensors of an output in place; tuples, sets and bound methods are rebuilt.

    Visits tuples, lists, sets, mappings (ModelOutput), objects with attributes or slots
    (dataclasses, torch.distributions), functions (closures, defaults), functools.partial, bound
    methods and objects to which iterators and generators refer, each once, down to a depth of
    MAX_DEPTH. Skips a container of more than MAX_ITEMS items unless its first item is a tensor or
    a container.

    Args:
        value: The output of a unit's forward.
        change: Returns the replacement of a tensor, or the tensor.
        of: Name of the unit.

    Raises:
        EngineError: A tensor to replace is in an object that cannot be written.
    """
    return _change(value, change, Walk(of))


def put_back(undo: Undo) -> None:
    """Undo changes of `ModuleTensors.change`, except those that were overwritten since."""
    for holder, key, was, now in reversed(undo):
        if _get(holder, key) is now:
            _set(holder, key, now, was, Walk(""))


def _change(value: Any, change: Callable[[torch.Tensor], torch.Tensor], walk: Walk) -> Any:
    if value is None or isinstance(value, _LEAVES):
        return value
    if id(value) in walk.seen:
        return walk.seen[id(value)][1]
    changed = value
    if isinstance(value, torch.Tensor):
        changed = change(value)
    elif walk.depth == MAX_DEPTH or _is_long(value) or type(value).__module__.startswith(_OURS):
        return value
    else:
        walk.seen[id(value)] = value, value  # a cycle ends here
        walk.depth += 1
        if isinstance(value, tuple | set | frozenset | _Method):
            changed = _rebuilt(value, change, walk)
        else:
            for key, item in _items(value):
                _set(value, key, item, _change(item, change, walk), walk)
        walk.depth -= 1
    walk.seen[id(value)] = value, changed
    return changed


def _rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor], walk: Walk) -> Any:
    """The same tuple, set or bound method of changed items."""
    parts: Any = value
    if isinstance(value, _Method):
        parts = [value.__self__, getattr(value, "__func__", None)]
    items = [_change(item, change, walk) for item in parts]
    if all(map(is_, items, parts)):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(items[1], items[0])
    if isinstance(value, _Method):
        return getattr(items[0], value.__name__)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


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
    if isinstance(value, types.CellType):  # an empty one has no contents to ask for
        return [("cell_contents", item) for item in gc.get_referents(value)]
    found = dict(getattr(value, "__dict__", None) or {})
    if found.keys() >= _OF_EVERY_MODULE:  # of functools.wraps(module), with the module's own tables
        found = {name: item for name, item in found.items() if name not in _OF_EVERY_MODULE}
    for name in _NAMES.get(type(value)) or copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  in all bases
        if name not in found and hasattr(value, name):
            found[name] = getattr(value, name)
    return list(found.items()) or [(None, item) for item in gc.get_referents(value)]


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, list | deque):
        return holder[key] if key < len(holder) else None
    return holder.get(key) if isinstance(holder, dict) else getattr(holder, key, None)


def _set(holder: Any, key: Any, was: Any, value: Any, walk: Walk) -> None:
    if was is value:
        return
    walk.undo.append((holder, key, was, value))
    if isinstance(holder, list | dict | deque):
        holder[key] = value
    elif isinstance(holder, partial) and key in _NAMES[partial]:
        parts = {name: getattr(holder, name) for name in _NAMES[partial]} | {key: value}
        holder.__setstate__((*parts.values(), holder.__dict__))  # type: ignore[attr-defined]
    else:
        try:
            object.__setattr__(holder, key, value)  # also of a frozen dataclass
        except (AttributeError, TypeError) as error:
            raise EngineError(
                f"{walk.of}: expected a forward that returns tensors; got a "
                f"{type(holder).__name__} that would read a view of the unit's weights when the "
                "slot contains another unit. Return tensors or a list of tensors, or give the "
                "iterator a copy (weight.clone())."
            ) from error


_NAMES: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__closure__"),
    partial: ("func", "args", "keywords"),
}
_LEAVES = (
    *(str, int, float, complex, bytes, type, torch.dtype, torch.device, torch.Generator),
    *(nn.Module, types.ModuleType, logging.Logger, *weakref.ProxyTypes),
    *(types.CodeType, types.FrameType, types.TracebackType),
)
