"""Modules and parameters that are put into a model after it was sharded.

The plan knows the parameters of its day. One that comes later would train on each rank by itself.
The objects in all modules' tables are compared at every step; where they differ from the last look,
every parameter that stands in a place unknown to the plan is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, cast

from torch import nn

from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import EngineError


class Inventory:
    """What a model holds.

    Args:
        model: Just sharded.
        tables: The `_parameters` and names under which the plan's parameters stand.
    """

    def __init__(self, model: nn.Module, tables: Iterable[tuple[dict[str, Any], str]]) -> None:
        known = [(table, name) for table, name in tables]
        self._places = {(id(table), name) for table, name in known}
        self._own = {id(table[name]) for table, name in known}
        self._left_out = {id(p): p for p in model.parameters() if id(p) not in self._own}
        self._frozen: list[nn.Parameter] = []  # came later, and need no reduction
        self._tables: list[dict[str, Any]] = []
        self._objects: list[Any] = []

    def check(self, model: nn.Module) -> None:
        """Look for parameters that came later.

        Raises:
            EngineError: One is trained, or is one of the plan's in a second place.
        """
        now = list(chain.from_iterable(map(dict.values, self._tables)))
        same = len(now) == len(self._objects) and all(map(is_, now, self._objects))
        if same and self._objects and not any(param.requires_grad for param in self._frozen):
            return
        self._frozen = []
        for path, module in model.named_modules():
            for name, param in module._parameters.items():
                if param is not None and (id(module._parameters), name) not in self._places:
                    self._check(f"{path}.{name}" if path else name, param)
        modules = list(model.modules())
        self._tables = [t for m in modules for t in (m._modules, m._parameters)]
        self._objects = list(chain.from_iterable(map(dict.values, self._tables)))

    def _check(self, name: str, param: Any) -> None:
        if id(param) in self._own:
            first = cast("ShardedParameter", param).record.piece.name
            raise EngineError(
                f"{name}: expected the parameters where fs.shard found them; {first} was put in "
                "here, too, where the forward would see a shard. Tie parameters before fs.shard."
            )
        if id(param) in self._left_out or isinstance(param, ShardedParameter):
            return
        if param.requires_grad:
            raise EngineError(
                f"{name}: expected the parameters that the model had when it was sharded; this one "
                "was put in afterwards, and its gradient would not be reduced over ranks. Put it "
                "in before fs.shard, with the weights of fs.full_state_dict(model) if the model "
                "has trained; or freeze it (requires_grad=False)."
            )
        self._frozen.append(param)
