"""Parameter groups and optimizers, by the names of Hugging Face."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.config.schema import TrainingConfig
from fullshard.config.values import Optimizer

# Hugging Face's Trainer leaves these names, and every LayerNorm, without weight decay.
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True)
class OptimizerSettings:
    """What an optimizer is made from; names as in TrainingArguments."""

    kind: Optimizer
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float

    @classmethod
    def of(cls, training: TrainingConfig) -> OptimizerSettings:
        """Those of a run."""
        return cls(
            kind=training.optim,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_epsilon=training.adam_epsilon,
        )


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """An elementwise optimizer over the trainable parameters.

    Args:
        model: Sharded or not: its parameters are what the optimizer keeps state for.
        settings: Kind and numbers.
    """
    groups = parameter_groups(model, settings.weight_decay)
    match settings.kind:
        case Optimizer.SGD:
            return torch.optim.SGD(groups, lr=settings.learning_rate)
        case Optimizer.ADAMW_TORCH | Optimizer.ADAMW_TORCH_FUSED:
            return torch.optim.AdamW(
                groups,
                lr=settings.learning_rate,
                betas=(settings.adam_beta1, settings.adam_beta2),
                eps=settings.adam_epsilon,
                fused=True,
            )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: with and without weight decay; empty ones are left out."""
    without = _names_without_decay(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = (
        {"params": [p for name, p in trainable if name not in without], "decay": weight_decay},
        {"params": [p for name, p in trainable if name in without], "decay": 0.0},
    )
    return [
        {"params": group["params"], "weight_decay": group["decay"]}
        for group in groups
        if group["params"]
    ]


def _names_without_decay(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters() if NO_DECAY.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            names.update(f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False))
    return names
