"""Optimizers by their Hugging Face names, averaged weights, loss scaling in fp16; steps and rates.

Learning rates follow the formulas of Hugging Face. They are a pure function of the number of
finished steps, so a resumed run needs no state for them.

References:
    transformers/optimization.py, whose LambdaLR multipliers these are.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fullshard as fs
from fullshard.checkpoint.format import AVERAGE
from fullshard.config.schema import TrainingConfig
from fullshard.config.values import IntervalStrategy, LrSchedule, Optimizer
from fullshard.data.dataset import DatasetFacts
from fullshard.data.order import BatchShape, SampleOrder
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
    groups, rate = parameter_groups(model, training.weight_decay), training.learning_rate
    betas, eps = (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    adamw = partial(torch.optim.AdamW, lr=rate, betas=betas, eps=eps, fused=True)
    match training.optim:
        case Optimizer.SGD:  # torch's fused one leaves out updates of 16-bit parameters on CPUs
            is_wide = all(p.dtype.itemsize > 2 for group in groups for p in group["params"])
            return torch.optim.SGD(groups, lr=rate, fused=is_wide)
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
    if kind is Optimizer.ADAMW_BNB_8BIT and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"training.optim: {kind} needs bitsandbytes, which is not installed. "
            "Run pip install 'fullshard[bnb]', or use adamw_torch."
        )


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
            "training.optim: muon needs trained matrices in numbered blocks; "
            f"{type(model).__name__} has none. Use adamw_torch."
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
    """Update the parameters, unless a scaled gradient overflowed on a rank.

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
            f"gradients of step {step}: expected finite numbers at some loss scale; got infinities "
            f"down to {factor:g}. Lower training.learning_rate, or use sharding.param_dtype: bf16."
        )


# ---- steps and learning rates --------------------------------------------------------------------


SAVE_STEPS = 500  # Hugging Face's default


@dataclass(frozen=True)
class Schedule:
    """A learning rate as a function of the step.

    Attributes:
        kind: Shape of the schedule after the warm-up.
        peak: Largest learning rate.
        num_warmup_steps: Steps from 0 to the peak, linearly.
        num_steps: Number of steps of the run.
    """

    kind: LrSchedule
    peak: float
    num_warmup_steps: int
    num_steps: int

    def learning_rate(self, finished: int) -> float:
        """The rate of the update that follows `finished` updates."""
        return self.peak * self.multiplier(finished)

    def multiplier(self, finished: int) -> float:
        """The share of the peak after `finished` updates."""
        if self.kind is LrSchedule.CONSTANT:
            return 1.0
        if finished < self.num_warmup_steps:
            return finished / max(1, self.num_warmup_steps)
        left = max(1, self.num_steps - self.num_warmup_steps)
        match self.kind:
            case LrSchedule.CONSTANT_WITH_WARMUP:
                return 1.0
            case LrSchedule.LINEAR:
                return max(0.0, (self.num_steps - finished) / left)
            case LrSchedule.COSINE:
                progress = (finished - self.num_warmup_steps) / left
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def warmup_steps(warmup: float, warmup_ratio: float, num_steps: int) -> int:
    """Number of warm-up steps, as Hugging Face counts them.

    Args:
        warmup: `warmup_steps`: a number of steps; below 1, a share of all steps.
        warmup_ratio: A share of all steps, used if `warmup_steps` is 0.
        num_steps: Number of steps of the run.
    """
    if warmup >= 1:
        return int(warmup)
    return math.ceil(num_steps * (warmup or warmup_ratio))


@dataclass(frozen=True)
class StepPlan:
    """Counts of steps, with shares and epochs resolved.

    Attributes:
        num_steps: Number of updates of the run.
        num_warmup_steps: Warm-up steps of the learning rate.
        log_every: Steps between printed lines.
        eval_every: Steps between evaluations; 0: only at the end.
        save_every: Steps between checkpoints; None: no checkpoints.
        order: Samples of each step.
        data: Checksum of the tokens of these samples; empty if it is not known.
    """

    num_steps: int
    num_warmup_steps: int
    log_every: int
    eval_every: int
    save_every: int | None
    order: SampleOrder
    data: str = ""

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.order.steps_per_epoch


def plan_steps(
    training: TrainingConfig, facts: DatasetFacts, num_batches: int, global_batch: int | None = None
) -> StepPlan:
    """Resolves epochs and shares of steps to counts.

    Args:
        training: Training section of the run.
        facts: Facts about the run's data.
        num_batches: Number of ranks that see batches of their own.
        global_batch: Samples per step of the run that resumes, which are kept; None: a new run.

    Raises:
        DataError: There are fewer sequences than one step needs.
    """
    per_device = training.per_device_train_batch_size
    shape = BatchShape(per_device, training.gradient_accumulation_steps, num_batches)
    if global_batch is not None:
        shape = BatchShape.of_batch(global_batch, per_device, num_batches)
    order = SampleOrder(facts.num_train_sequences, shape, training.seed, facts.mixture)
    if facts.shuffle_buffer:
        order = order.streamed(facts.shuffle_buffer)
    num_steps = training.max_steps
    if num_steps <= 0:
        num_steps = max(1, math.ceil(training.num_train_epochs * order.steps_per_epoch))
    eval_every = _interval(
        training.evaluates, training.eval_steps or training.logging_steps, order, num_steps
    )
    save_every = _interval(training.saves, training.save_steps or SAVE_STEPS, order, num_steps)
    warmup = warmup_steps(training.warmup_steps, training.warmup_ratio, num_steps)
    return StepPlan(
        num_steps,
        0 if training.lr_scheduler_type is LrSchedule.CONSTANT else warmup,
        _steps(training.logging_steps, num_steps),
        eval_every or 0,
        save_every,
        order,
        facts.fingerprint,
    )


def schedule_of(training: TrainingConfig, steps: StepPlan) -> Schedule:
    """The learning rate over a run's steps."""
    return Schedule(
        training.lr_scheduler_type, training.learning_rate, steps.num_warmup_steps, steps.num_steps
    )


def _interval(
    strategy: IntervalStrategy, every: float, order: SampleOrder, num_steps: int
) -> int | None:
    if strategy is IntervalStrategy.NO:
        return None
    is_epoch = strategy is IntervalStrategy.EPOCH
    return order.steps_per_epoch if is_epoch else _steps(every, num_steps)


def _steps(value: float, num_steps: int) -> int:
    """A count of steps, or a share of all of them below 1."""
    return int(value) if value >= 1 else max(1, math.ceil(value * num_steps))
