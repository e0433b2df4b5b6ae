"""Casts: a model's inputs and outputs, its buffers, modules that compute in float32.

[Note: modules in float32]
Parameters of `fp32_modules` are gathered in float32, in a separate buffer of the same collective as
the rest of their unit. Such a module receives float32 inputs and returns `param_dtype`, so that
later modules compute in the usual dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import storage_key, tree_map_only
from fullshard.planner.spec import matches, parent_name
from fullshard.transport.base import torch_dtype


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
            hooks = module._forward_hooks
            for key, hook in [*hooks.items()]:
                if getattr(getattr(hook, "__self__", None), "replaces_output", False):
                    hooks[key] = hooks.pop(key)  # now the last one


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
