"""Changes to modules by settings: recomputed blocks; dtypes of inputs, outputs and buffers.

[Note: where recompute is applied]
With activation checkpointing a block's forward runs again in backward, so activations are not kept.
The block instance's `forward` is replaced, so that hooks (ours and the user's) stay outside. The
recomputed forward finds its parameters, because its unit is gathered from the first gradient of its
outputs to the end of backward. Units inside a block are entered again and gather on demand.

[Note: caches of keys and values]
Models of transformers create a cache in each forward unless `use_cache=False`, and a recomputed
block would add its keys a second time. Blocks therefore get no cache, as with transformers' own
checkpointing. A cache that has keys already is an input, and raises an error.

[Note: modules in float32]
Parameters of `fp32_modules` are gathered in float32, in a separate buffer of the same collective as
the rest of their unit. Such a module receives float32 inputs and returns `param_dtype`, so that
later modules compute in the usual dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.config.schema import ShardConfig
from fullshard.config.values import RecomputeKind
from fullshard.engine._torch_compat import storage_key, tree_map_only
from fullshard.errors import ConfigError, EngineError
from fullshard.planner.spec import matches, parent_name
from fullshard.transport.base import torch_dtype

logger = logging.getLogger(__name__)


# ---- recompute

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
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        make_recompute(module, partial(checkpoint, **options))


def make_recompute(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace a module's forward; `run` calls it with arguments, now and again in backward."""
    only_reads = getattr(module, "_can_checkpoint_with_cache", False)
    change = (lambda value: value) if only_reads else _without_cache
    forward = module.forward

    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = {name: change(value) for name, value in kwargs.items()}
        kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
        again = partial(forward, **kwargs)  # their names may equal checkpoint's arguments
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
        changed = partial(function.func, *function.args, **settings)
        object.__setattr__(module, "_gradient_checkpointing_func", changed)
        converted = True
    if converted:
        logger.warning(
            "gradient_checkpointing_enable: use_reentrant=True was changed to False; reentrant "
            "checkpointing hides which gradients a sharded model will get. Call it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )


# ---- dtypes


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors in nested lists, tuples, mappings and model outputs."""
    return tree_map_only(torch.Tensor, partial(_cast, dtype), value)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def fp32_roots(model: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """The outermost modules that match the globs."""
    found = [name for name, _ in model.named_modules() if name and matches(name, globs)]
    return [name for name in found if parent_name(name) not in found]


def apply_dtypes(model: nn.Module, config: ShardConfig) -> None:
    """Cast buffers, and the inputs and outputs of float32 modules."""
    roots = fp32_roots(model, config.fp32_modules)
    if config.buffer_dtype is not None:
        whole: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for name, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and not matches(name, config.fp32_modules):
                    dtype = torch_dtype(config.buffer_dtype)
                    module._buffers[leaf] = _cast_alike(dtype, buffer, whole)
    compute = config.param_dtype or config.master_dtype
    if compute is None:
        return
    low = torch_dtype(compute)
    if low.itemsize < 4:
        for name in roots:
            module = model.get_submodule(name)
            # The user's hooks see float32; a hook that replaces the output gives its own dtype.
            module.register_forward_pre_hook(_to_float32, prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(cast_output, low))
            hooks, follows = module._forward_hooks, False
            for key, hook in [*hooks.items()][:-1]:
                follows |= getattr(getattr(hook, "__self__", None), "replaces_output", False)
                if follows:  # and so does the unit's own hook, which frees the weights
                    hooks[key] = hooks.pop(key)


def _cast_alike(
    dtype: torch.dtype, buffer: torch.Tensor, whole: dict[tuple[int, torch.dtype], torch.Tensor]
) -> torch.Tensor:
    """Cast a buffer; buffers that are views of one memory stay so. `whole`: the memories cast."""
    if not buffer.is_floating_point() or buffer.dtype is dtype:
        return buffer
    key = storage_key(buffer), buffer.dtype
    if key not in whole:
        size = buffer.untyped_storage().nbytes() // buffer.itemsize
        whole[key] = buffer.as_strided((size,), (1,), 0).to(dtype)
    return whole[key].as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())


def _to_float32(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_tensors(args, torch.float32), cast_tensors(kwargs, torch.float32)


def cast_output(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    """A forward hook, as `partial(cast_output, dtype)`."""
    return cast_tensors(output, dtype)
