"""torch's activation checkpointing by wrapper, acting in place.

A widespread helper calls `checkpoint_wrapper(layer)` and drops the result, which has no effect in
torch. Here `layer` itself recomputes, keeps its parameter names, and is returned.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    offload_wrapper,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as applied,
)
from torch.utils.checkpoint import checkpoint

from fullshard.compat import NotOfferedError
from fullshard.engine.modules import make_recompute

logger = logging.getLogger(__name__)

RECOMPUTES = "_fullshard_recomputes"


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    *,
    offload_to_cpu: bool = False,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Makes a module recompute its activations in backward; returns the module itself.

    Args:
        module: The module, before or after FSDP wraps it.
        checkpoint_impl: REENTRANT is changed to NO_REENTRANT with a warning: reentrant
            checkpointing hides which gradients will be computed.
        checkpoint_fn: Replacement for torch.utils.checkpoint.checkpoint.
        offload_to_cpu: Must be False. PyTorch's tutorial still passes it; since 1.13 torch has
            `offload_wrapper` instead.
        **checkpoint_fn_kwargs: Arguments of `checkpoint_fn`.
    """
    if offload_to_cpu:
        raise NotOfferedError(
            "checkpoint_wrapper: expected offload_to_cpu=False; got True. Use "
            "offload_wrapper(layer), which keeps the activations on the host."
        )
    if RECOMPUTES in vars(module):
        return module
    if checkpoint_impl is CheckpointImpl.REENTRANT:
        logger.warning(
            "checkpoint_wrapper: REENTRANT was changed to NO_REENTRANT; reentrant checkpointing "
            "hides which gradients a sharded model will get."
        )
    run = checkpoint_fn or functools.partial(checkpoint, use_reentrant=False)
    make_recompute(module, functools.partial(run, **checkpoint_fn_kwargs))
    object.__setattr__(module, RECOMPUTES, True)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Makes the modules that a check or policy selects recompute; never the model itself.

    Args:
        model: The model, before or after FSDP wraps it.
        checkpoint_wrapper_fn: Called on each chosen module.
        check_fn: Chooses modules.
        auto_wrap_policy: Policy of FSDP that chooses modules; takes precedence.
    """

    def wrap(
        module: nn.Module, **_: Any
    ) -> nn.Module:  # called with the marks that FSDP's policy sets on modules
        return checkpoint_wrapper_fn(module)

    applied(model, wrap, check_fn, auto_wrap_policy)


__all__ = [
    "CheckpointImpl",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]


def make_callable(name: str, function: Callable[..., Any]) -> None:
    """Makes a module callable: `package.name(...)` calls its function of that name.

    torch has the module `torch.distributed.fsdp.wrap` with a function `wrap`. A package that also
    exports the function has one name for both.
    """

    class CallableModule(ModuleType):
        """A module that can be called as one of its functions."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
