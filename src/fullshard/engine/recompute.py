"""Activation checkpointing: a block's forward runs again in backward instead of being kept.

[Note: where recompute is applied]
`forward` of the block's instance is replaced, so that hooks (ours and the user's) stay outside: the
recomputed forward finds its parameters in place, because its unit is open from the first gradient
of its outputs to the end of backward. Units inside a block are entered again and gather on demand.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.config.values import RecomputeKind
from fullshard.errors import ConfigError

logger = logging.getLogger(__name__)

_aten: Any = torch.ops.aten
# What selective recompute keeps: the results that cost most time for the bytes that they take.
_KEPT = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ]
)


def apply_recompute(model: nn.Module, names: Sequence[str], kind: RecomputeKind) -> None:
    """Let the named modules recompute.

    Raises:
        ConfigError: The model recomputes already, by its own switch.
    """
    for name in names:
        module = model.get_submodule(name)
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(
                f"activation_checkpointing: expected one switch; {name} recomputes already "
                "(gradient_checkpointing_enable was called). Leave one of the two out."
            )
        options: dict[str, Any] = {"use_reentrant": False}
        if kind is RecomputeKind.SELECTIVE:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        object.__setattr__(module, "forward", _recomputing(module.forward, options))


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        again = functools.partial(forward, **kwargs)  # whose names may be checkpoint's own
        return checkpoint(again, *args, **options)

    return run


def _policy(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    keep = function in _KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def convert_reentrant(model: nn.Module) -> None:
    """Make Hugging Face's switch non-reentrant, and say so.

    Reentrant checkpointing runs a unit's forward without gradients and a second backward inside
    the first: which gradients will come cannot be known then (law 4).
    """
    converted = False
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        settings = getattr(function, "keywords", None)
        if function is None or settings is None or not settings.get("use_reentrant", False):
            continue
        settings = {**settings, "use_reentrant": False}
        changed = functools.partial(function.func, *function.args, **settings)
        object.__setattr__(module, "_gradient_checkpointing_func", changed)
        converted = True
    if converted:
        logger.warning(
            "gradient_checkpointing_enable: use_reentrant=True was changed to False; reentrant "
            "checkpointing hides from a sharded model which gradients will come. Call it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
