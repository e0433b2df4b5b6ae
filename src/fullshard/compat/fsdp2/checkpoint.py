"""`save_fsdp2_checkpoint` and `load_fsdp2_checkpoint`: fs.save and fs.load under these names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard import api
from fullshard.compat.wrapping import engine_for, marked


def save_fsdp2_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    rank: int = 0,  # noqa: ARG001
    **state: Any,
) -> Path:
    """Save model and optimizer at exactly this path, a folder. A collective.

    Args:
        model: Wrapped by `wrap_model_fsdp2` or `fully_shard`.
        optimizer: Optimizer of its parameters, or None.
        path: Such as "checkpoint.pt": a folder of safetensors of this name.
        rank: No effect: every rank writes its own part, whatever rank was meant to write.
        **state: More to save: JSON values, tensors, objects with state_dict().
    """
    _start(model)
    return Path(api.save(path, model, optimizer, **state))


def load_fsdp2_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    rank: int = 0,  # noqa: ARG001
) -> dict[str, Any]:
    """Load what `save_fsdp2_checkpoint` wrote; into another strategy or number of ranks too.

    Returns:
        The further state that was saved.
    """
    _start(model)
    return api.load(path, model, optimizer)


def _start(model: nn.Module) -> None:
    for module, _ in marked(model):
        engine_for(module)
