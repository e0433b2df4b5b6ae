"""Which modules' outputs are watched beside those of units. See [Note: watched outputs].

Compiled code does without: it is one autograd node, and a hook would cut its graph in two. A module
with frozen parameters is watched nevertheless, because nothing would tell that these were read from
a slot that held another unit; trained ones have gradients, which do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from fullshard.engine._torch_compat import call_outside_compile, unless_compiling
from fullshard.engine.unit import Unit


def watch_exits(
    units: Sequence[Unit],
    owners: Mapping[int, int],
    left_out: Container[int],
    watch: Callable[..., None],
) -> list[Any]:
    """Let `watch(unit, module, args, output)` see what the modules that own parameters return.

    Args:
        units: In plan order.
        owners: By the id of a module, the unit that watches its output.
        left_out: Ids of modules that are watched in another way.
        watch: Is told.

    Returns:
        Handles that remove the hooks.
    """
    handles = []
    swaps = [swap for unit in units for swap in unit.swaps]
    frozen = {id(swap.module) for swap in swaps if swap.member.grad is None}
    for key, module in {id(swap.module): swap.module for swap in swaps}.items():
        if key not in left_out:
            hook: Callable[..., Any] = unless_compiling(watch, owners[key])
            if key in frozen:
                hook = partial(call_outside_compile, watch, owners[key])
            handles.append(module.register_forward_hook(hook))
    return handles
