"""FSDP2 with a configuration object: `wrap_model_fsdp2(model, FSDP2Config(...))`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fullshard import api
from fullshard.compat import MisuseValueError
from fullshard.compat.checkpoint_wrapper import checkpoint_wrapper
from fullshard.compat.fsdp2.fully_shard import mark_unit
from fullshard.compat.wrapping import (
    copy_first_values,
    engine_for,
    marked,
    materialize,
    place,
    wrapped_of,
)
from fullshard.config.values import DType, Strategy, WrapKind, parse
from fullshard.engine.model_spec import NEVER_CALLED, spec_of
from fullshard.planner.wrap import choose_units, repeated_blocks
from fullshard.transport.base import torch_dtype

_BLOCK = re.compile(r"(Block|Layer)$")
_POLICIES = ("transformer", "size_based", None)
_PREFETCH = {"backward_pre": 1, "pre": 1, "backward_post": 0, "post": 0, None: 0}
GB = 1e9


@dataclass
class FSDP2Config:
    """Settings of `wrap_model_fsdp2`.

    Attributes:
        sharding_strategy: "full", "shard_grad_op", "hybrid_full" or "no_shard".
        mixed_precision: Whether compute_dtype and reduce_dtype apply.
        compute_dtype: Dtype in which units are gathered and computed.
        param_dtype: Dtype in which parameters are stored; None: unchanged. Note that elsewhere this
            is the compute dtype; here it is ShardConfig's master_dtype.
        reduce_dtype: Dtype in which gradients are reduced; None: float32.
        cpu_offload: Whether parameters, gradients and optimizer states are stored on the host.
        activation_checkpointing: Whether blocks recompute their activations in backward.
        auto_wrap_policy: "transformer" (blocks), "size_based", or None: one unit.
        auto_wrap_min_params: Minimum number of parameters per unit for "size_based".
        backward_prefetch: "backward_pre" or "pre" gathers one unit ahead, other values do not.
        forward_prefetch: No effect: forward always gathers one unit ahead.
        limit_all_gathers: No effect: the plan's slots bound the memory.
        sync_module_states: Whether to broadcast rank 0's values first.
    """

    sharding_strategy: str = "full"
    mixed_precision: bool = False
    compute_dtype: Any = torch.bfloat16
    param_dtype: Any = None
    reduce_dtype: Any = None
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    auto_wrap_policy: str | None = "transformer"
    auto_wrap_min_params: int = 100_000_000
    backward_prefetch: str | None = "backward_pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    sync_module_states: bool = False

    def __post_init__(self) -> None:
        """Raises an error for unknown values."""
        self.strategy  # noqa: B018  raises
        for name, known in ("auto_wrap_policy", _POLICIES), ("backward_prefetch", _PREFETCH):
            if getattr(self, name) not in known:
                raise MisuseValueError(
                    f"{name}: expected one of {', '.join(map(repr, known))}; got "
                    f"{getattr(self, name)!r}."
                )

    @property
    def strategy(self) -> Strategy:
        """The strategy, from any of its spellings."""
        return parse(Strategy, self.sharding_strategy, "sharding_strategy")


def wrap_model_fsdp2(model: nn.Module, config: FSDP2Config | None = None) -> nn.Module:
    """Shards a model in place, or a part of a model before the whole.

    Args:
        model: The model. Its parts may already be wrapped, with other strategies.
        config: Settings; None: the defaults.

    Returns:
        The model.
    """
    config = config or FSDP2Config()
    blocks = [block for block in _units(model, config) if wrapped_of(block) is None]
    modules = list(_unwrapped(model))
    materialize(modules, place(model, modules, None), None)
    if config.sync_module_states:
        copy_first_values(modules, set())
    if config.param_dtype is not None:
        _store_in(modules, _torch(config.param_dtype))
    if config.activation_checkpointing:
        for block in blocks or [model]:
            checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy()
    if config.mixed_precision:
        reduce = config.reduce_dtype if config.reduce_dtype is not None else torch.float32
        policy = MixedPrecisionPolicy(_torch(config.compute_dtype), _torch(reduce))
    options = {
        "offload": "cpu" if config.cpu_offload else None,
        "backward_prefetch": _PREFETCH[config.backward_prefetch],
    }
    for module in [*blocks, model]:
        mark_unit(module, config.strategy, options, policy, set())
    return model


def _torch(dtype: Any) -> torch.dtype:
    return torch_dtype(parse(DType, dtype, "dtype"))


def _store_in(modules: list[nn.Module], dtype: torch.dtype) -> None:
    for module in modules:
        for param in module._parameters.values():
            if param is not None and param.is_floating_point():
                param.data = param.data.to(dtype)


def _unwrapped(root: nn.Module) -> Iterator[nn.Module]:
    if wrapped_of(root) is None:
        yield root
        for child in root.children():
            yield from _unwrapped(child)


def _units(model: nn.Module, config: FSDP2Config) -> list[nn.Module]:
    """The modules that become units, inner ones first."""
    if config.auto_wrap_policy is None:
        return []
    if config.auto_wrap_policy == "size_based":
        chosen = choose_units(spec_of(model), WrapKind.SIZE, config.auto_wrap_min_params)
        return [model.get_submodule(name) for name in reversed(chosen) if name]
    return find_blocks(model)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Finds a model's blocks by class name (TransformerBlock, EncoderLayer), else by lists."""
    named = list(_outermost_blocks(model))
    return named or [model.get_submodule(name) for name in repeated_blocks(spec_of(model))]


def _outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        named = _BLOCK.search(type(child).__name__) and any(True for _ in child.children())
        if named and not isinstance(child, NEVER_CALLED):
            yield child
        else:
            yield from _outermost_blocks(child)


def apply_activation_checkpointing(model: nn.Module, **_: Any) -> nn.Module:
    """Makes blocks recompute their activations; call before or after `wrap_model_fsdp2`."""
    for block in find_blocks(model) or [model]:
        checkpoint_wrapper(block)
    return model


class FSDP2Wrapper:
    """An object that shards models with one configuration.

    Args:
        config: Settings of `wrap_model_fsdp2`.
    """

    def __init__(self, config: FSDP2Config | None = None) -> None:
        self.config = config or FSDP2Config()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard a model in place."""
        return wrap_model_fsdp2(model, self.config)

    def get_memory_stats(self, model: nn.Module) -> dict[str, float]:
        """Returns GB (1e9 bytes) of the device's allocator or, on CPUs, of the engine."""
        engine = engine_for(model)
        if engine.device.type == "cuda":
            now = torch.cuda.memory_allocated(engine.device)
            peak = torch.cuda.max_memory_allocated(engine.device)
            reserved = torch.cuda.memory_reserved(engine.device)
        else:
            total = engine.memory_stats()["total"]
            now, peak = total["now"], total["peak"]
            reserved = now
        return {
            "allocated_gb": now / GB,
            "max_allocated_gb": max(peak, now) / GB,
            "reserved_gb": reserved / GB,
        }


def save_fsdp2_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    rank: int = 0,  # noqa: ARG001
    **state: Any,
) -> Path:
    """Saves model and optimizer as a folder at exactly this path. A collective.

    Args:
        model: Model wrapped by `wrap_model_fsdp2` or `fully_shard`.
        optimizer: Optimizer of its parameters, or None.
        path: Name of the folder of safetensors, such as "checkpoint.pt".
        rank: No effect: every rank writes its own part.
        **state: Further values: JSON values, tensors, objects with state_dict().
    """
    _start(model)
    return Path(api.save(path, model, optimizer, **state))


def load_fsdp2_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    rank: int = 0,  # noqa: ARG001
) -> dict[str, Any]:
    """Loads a checkpoint of `save_fsdp2_checkpoint`, under any strategy and number of ranks.

    Returns:
        The further values that were saved.
    """
    _start(model)
    return api.load(path, model, optimizer)


def _start(model: nn.Module) -> None:
    for module, _ in marked(model):
        engine_for(module)
