"""Initial values of modules: their device, modules on meta, values of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.compat.wrapping import own_rank, topology
from fullshard.engine.homes import default_device
from fullshard.errors import MisuseValueError
from fullshard.transport.groups import copy_from_first


def place(root: nn.Module, modules: list[nn.Module], device_id: Any) -> torch.device:
    """Returns the device of a unit and moves its modules there.

    Raises:
        MisuseValueError: The parameters are on another device of the same kind.
    """
    device = _device_of(device_id)
    have = next((p.device for p in root.parameters() if not p.is_meta), None)
    if device is None:
        return have or default_device()
    if have is not None and have.type == device.type and have != device:
        raise MisuseValueError(
            f"Inconsistent compute device and `device_id` on rank {own_rank()}: {have} vs {device}"
        )
    if have is not None and have != device:
        for module in modules:
            module._apply(
                lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False
            )
    return device


def _device_of(device_id: Any) -> torch.device | None:
    if device_id is None:
        return None
    if not torch.accelerator.is_available():
        return torch.device("cpu")  # scripts that ask for cuda on a machine without it
    device = torch.device(device_id)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def materialize(
    modules: list[nn.Module], device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Materializes modules on meta with `param_init_fn` or `reset_parameters`.

    Raises:
        MisuseValueError: `init` is not callable, or a module has no reset_parameters.
    """
    if init is not None and not callable(init):
        raise MisuseValueError(f"Expected {init} to be callable but got {type(init)}")
    for module in modules:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            continue
        if init is not None:
            init(module)
            continue
        module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise MisuseValueError(
                f"{type(module).__name__} on meta: expected reset_parameters() or param_init_fn; "
                "got neither. Pass param_init_fn."
            )
        with torch.no_grad():
            reset()


def copy_first_values(modules: list[nn.Module], ignored: set[int]) -> None:
    """Copies the values of rank 0 to all ranks, for `sync_module_states`. A collective."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in ignored:
                tensors[id(tensor)] = tensor.detach()
    copy_from_first(list(tensors.values()), [range(topology().world_size)])
