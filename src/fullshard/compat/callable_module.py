"""A module that can be called, where an interface has a function and a submodule of one name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(name: str, function: Callable[..., Any]) -> None:
    """Let `package.name(...)` call the function, and `package.name.other` be the module's.

    torch has `torch.distributed.fsdp.wrap`, the module, and `wrap`, the function in it: a package
    that offers the function too has one name for both.
    """

    class CallableModule(ModuleType):
        """A module that stands for a function in it."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
