"""Parameter groups and optimizers, by the names of Hugging Face."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fullshard as fs
from fullshard.config.schema import TrainingConfig
from fullshard.config.values import Optimizer
from fullshard.errors import ConfigError
from fullshard.planner.optimizers import takes_muon

# Hugging Face's Trainer leaves these names, and every LayerNorm, without weight decay.
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


Groups = list[dict[str, Any]]


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
    rate = settings.learning_rate
    betas, eps = (settings.adam_beta1, settings.adam_beta2), settings.adam_epsilon
    adamw = partial(torch.optim.AdamW, lr=rate, betas=betas, eps=eps, fused=True)
    match settings.kind:
        case Optimizer.SGD:
            return torch.optim.SGD(groups, lr=rate)
        case Optimizer.ADAMW_TORCH | Optimizer.ADAMW_TORCH_FUSED:
            return adamw(groups)
        case Optimizer.MUON:
            matrices, others = _split(model, groups)
            muon = partial(torch.optim.Muon, lr=rate, adjust_lr_fn="match_rms_adamw")
            return fs.owned(model, muon, matrices, beside=adamw(others) if others else None)
        case Optimizer.ADAFACTOR:  # as Hugging Face's Trainer calls it
            from transformers.optimization import Adafactor

            rigid = {"scale_parameter": False, "relative_step": False}
            return fs.owned(model, partial(Adafactor, lr=rate, **rigid), groups)
        case Optimizer.ADAMW_BNB_8BIT:
            library = importlib.import_module("bitsandbytes.optim")
            return fs.owned(
                model, partial(library.AdamW8bit, lr=rate, betas=betas, eps=eps), groups
            )


# As checkpoints name what `build_optimizer` makes.
KINDS = {
    Optimizer.SGD: "SGD",
    Optimizer.ADAMW_TORCH: "AdamW",
    Optimizer.ADAMW_TORCH_FUSED: "AdamW",
    Optimizer.MUON: "owned Muon, AdamW",
    Optimizer.ADAFACTOR: "owned Adafactor",
    Optimizer.ADAMW_BNB_8BIT: "owned AdamW8bit",
}


def check_optimizer(kind: Optimizer) -> None:
    """Whether what a run's optimizer is made of is there.

    Raises:
        ConfigError: It is not; says what to install.
    """
    got = ""
    if kind is Optimizer.ADAMW_BNB_8BIT and importlib.util.find_spec("bitsandbytes") is None:
        got = "bitsandbytes, which is not installed. Run pip install 'fullshard[bnb]'"
    if kind is Optimizer.MUON and not hasattr(torch.optim, "Muon"):
        got = f"torch 2.9 or newer; this is {torch.__version__}. Install a newer one"
    if got:
        raise ConfigError(f"training.optim: {kind} needs {got}, or use adamw_torch.")


def _split(model: nn.Module, groups: Groups) -> tuple[Groups, Groups]:
    """The same groups of what Muon trains, and of all else.

    Raises:
        ConfigError: There is nothing for it.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    found: tuple[Groups, Groups] = ([], [])
    for group in groups:
        parts: tuple[list[Any], list[Any]] = ([], [])
        for param in group["params"]:
            parts[not takes_muon(names[id(param)], tuple(param.shape))].append(param)
        for into, params in zip(found, parts, strict=True):
            into += [{**group, "params": params}] * bool(params)
    if not found[0]:
        raise ConfigError(
            f"training.optim: muon expects matrices in numbered blocks; {type(model).__name__} has "
            "none that are trained. Use adamw_torch."
        )
    return found


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
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
