"""Optimizers by their Hugging Face names, averaged weights, and loss scaling in fp16."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import fullshard as fs
from fullshard.checkpoint.format import AVERAGE
from fullshard.config.schema import TrainingConfig
from fullshard.config.values import Optimizer
from fullshard.errors import ConfigError, DivergedError
from fullshard.planner.optimizers import takes_muon

# As in Hugging Face's Trainer, these names and every LayerNorm have no weight decay.
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters.

    Args:
        model: The model, sharded or not.
        training: Kind of the optimizer and its numbers, as in TrainingArguments.
    """
    groups = parameter_groups(model, training.weight_decay)
    rate = training.learning_rate
    betas, eps = (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    adamw = partial(torch.optim.AdamW, lr=rate, betas=betas, eps=eps, fused=True)
    match training.optim:
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


# Names in checkpoints of the optimizers that `build_optimizer` makes.
KINDS = {
    Optimizer.SGD: "SGD",
    Optimizer.ADAMW_TORCH: "AdamW",
    Optimizer.ADAMW_TORCH_FUSED: "AdamW",
    Optimizer.MUON: "owned Muon, AdamW",
    Optimizer.ADAFACTOR: "owned Adafactor",
    Optimizer.ADAMW_BNB_8BIT: "owned AdamW8bit",
}


def check_optimizer(kind: Optimizer) -> None:
    """Checks that the libraries of a run's optimizer are installed.

    Raises:
        ConfigError: One is not; names what to install.
    """
    got = ""
    if kind is Optimizer.ADAMW_BNB_8BIT and importlib.util.find_spec("bitsandbytes") is None:
        got = "bitsandbytes, which is not installed. Run pip install 'fullshard[bnb]'"
    if kind is Optimizer.MUON and not hasattr(torch.optim, "Muon"):
        got = f"torch 2.9 or newer; this is {torch.__version__}. Install a newer one"
    if got:
        raise ConfigError(f"training.optim: {kind} needs {got}, or use adamw_torch.")


def _split(model: nn.Module, groups: Groups) -> tuple[Groups, Groups]:
    """Splits the groups into what Muon trains and everything else.

    Raises:
        ConfigError: There is nothing for Muon to train.
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
    """Groups with and without weight decay; empty ones are left out."""
    without = _names_without_decay(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decaying = [p for name, p in trainable if name not in without]
    groups: Groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name in without], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _names_without_decay(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters() if NO_DECAY.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            names.update(f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False))
    return names


class Average:
    """An exponential moving average of the weights that an optimizer trains.

    It is an entry of the optimizer's state next to the moments, so it is sharded, saved, resharded
    and loaded like them.

    Args:
        optimizer: Optimizer of the sharded model.
        decay: Weight of the past in [0, 1).

    References:
        Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; with
        constant decay as in Tarvainen and Valpola, https://arxiv.org/abs/1703.01780.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Call it after an update of the weights, while they have gradients.

        A weight's average begins with its first update. Before that the optimizer has no state for
        it and must find none, because it initialises only missing states.
        """
        for param, state in self._states():
            if AVERAGE in state:
                state[AVERAGE].lerp_(param, 1.0 - self._decay)
            elif param.grad is not None:
                state[AVERAGE] = torch.zeros_like(param).copy_(param)  # on their device

    @contextmanager
    def applied(self) -> Generator[None]:
        """Inside, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, state in self._states():
            if AVERAGE in state:
                kept = param.detach().clone()
                param.copy_(state[AVERAGE])
                state[AVERAGE].copy_(kept)

    @staticmethod
    def forget(optimizer: torch.optim.Optimizer) -> bool:
        """Drops a checkpoint's average if this run keeps none; returns whether there was one."""
        found = [state.pop(AVERAGE, None) is not None for state in optimizer.state.values()]
        return any(found)

    def _states(self) -> Iterable[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                yield param, self._optimizer.state[param]


SMALLEST = 2.0**-14  # smallest factor: below it, overflows are not a matter of range


def apply_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Updates the parameters, unless a scaled gradient overflowed on a rank.

    fp16 has no numbers below 6e-8, so losses are multiplied before backward and gradients divided
    after it. The gradients' guard shares an infinity on one rank with all ranks, so they skip the
    same step and halve the factor together.

    Raises:
        DivergedError: Gradients overflow at every factor.
    """
    scaler.step(optimizer)
    scaler.update()
    if (factor := scaler.get_scale()) < SMALLEST:
        raise DivergedError(
            f"gradients of step {step}: expected finite numbers at some loss scale; got none down "
            f"to {factor:g}. Lower training.learning_rate, or use sharding.param_dtype: bf16."
        )
