"""Policies: torch's own run, on our class.

torch's machinery asks nothing of the wrapper but to be called; `_auto_wrap` is private (torch 2.1
to 2.13 have it), and also wraps what mixed precision leaves in float32 (BatchNorm). So is the enum
of states, which torch's own helpers ask about.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from fullshard.compat.errors import MisuseValueError
from fullshard.compat.wrapping import wrapped_of


def auto_wrap(
    root: nn.Module, policy: Any, ignored: set[int], given: dict[str, Any], wrapper: type
) -> None:
    """Wrap what a policy chooses inside `root`.

    Raises:
        MisuseValueError: Something inside is wrapped already.
    """
    for name, module in root.named_modules():
        if wrapped_of(module) is not None:
            raise MisuseValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )
    params = {param for param in root.parameters() if id(param) in ignored}
    modules = {
        module
        for module in root.modules()
        if any(True for _ in module.parameters())
        and all(id(param) in ignored for param in module.parameters())
    }
    _auto_wrap(root, policy, modules, params, {**given, "ignored_states": params}, wrapper)
