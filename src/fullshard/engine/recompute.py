"""Activation checkpointing: a block's forward runs again in backward, so activations are not kept.

[Note: where recompute is applied]
The block instance's `forward` is replaced, so that hooks (ours and the user's) stay outside. The
recomputed forward finds its parameters, because its unit is gathered from the first gradient of its
outputs to the end of backward. Units inside a block are entered again and gather on demand.

[Note: caches of keys and values]
Models of transformers create a cache in each forward unless `use_cache=False`, and a recomputed
block would add its keys a second time. Blocks therefore get no cache, as with transformers' own
checkpointing. A cache that has keys already is an input, and raises an error.
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
from fullshard.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

_aten: Any = torch.ops.aten
# Operations whose results selective recompute keeps: the most time per byte.
_ATTENTION = (
    "efficient_attention",
    "flash_attention",
    "flash_attention_for_cpu",
    "cudnn_attention",
)
_NAMES = ["mm", "addmm", "bmm", "baddbmm", "convolution"]
_NAMES += [f"_scaled_dot_product_{kind}" for kind in _ATTENTION]
_KEPT = frozenset(getattr(_aten, name).default for name in _NAMES)


def apply_recompute(model: nn.Module, names: Sequence[str], kind: RecomputeKind) -> None:
    """Make the named modules recompute.

    Raises:
        ConfigError: The model's own switch has enabled recomputation.
    """
    for name in names:
        module = model.get_submodule(name)
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(
                f"activation_checkpointing: expected one switch; {name} already recomputes "
                "(gradient_checkpointing_enable was called). Remove one of the two."
            )
        options: dict[str, Any] = {"use_reentrant": False}
        if kind is RecomputeKind.SELECTIVE:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        make_recompute(module, functools.partial(checkpoint, **options))


def make_recompute(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace a module's forward; `run` calls it with arguments, now and again in backward."""
    only_reads = getattr(module, "_can_checkpoint_with_cache", False)
    change = (lambda value: value) if only_reads else _without_cache
    forward = module.forward

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = {name: change(value) for name, value in kwargs.items()}
        kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
        again = functools.partial(forward, **kwargs)  # their names may equal checkpoint's arguments
        return run(again, *map(change, args))

    object.__setattr__(module, "forward", recomputing)


def _without_cache(value: Any) -> Any:
    """None in place of a cache without keys. See [Note: caches of keys and values].

    Raises:
        EngineError: The cache has keys.
    """
    if not hasattr(value, "get_seq_length"):
        return value
    if value.get_seq_length():
        raise EngineError(
            "activation_checkpointing: expected a forward without earlier keys (past_key_values), "
            "which the recompute would extend again; got some. Leave them out."
        )
    return None


def _policy(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    keep = function in _KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def convert_reentrant(model: nn.Module) -> None:
    """Make Hugging Face's checkpointing non-reentrant, with a warning.

    Reentrant checkpointing runs a unit's forward without a graph and a second backward inside the
    first, so autograd does not know which gradients will arrive (law 4).
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
            "checkpointing hides which gradients a sharded model will get. Call it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
