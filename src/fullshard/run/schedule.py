"""The number of steps of a run, the steps with an evaluation or checkpoint, and learning rates.

Learning rates follow the formulas of Hugging Face. They are a pure function of the number of
finished steps, so a resumed run needs no state for them.

References:
    transformers/optimization.py, whose LambdaLR multipliers these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.config.schema import TrainingConfig
from fullshard.config.values import IntervalStrategy, LrSchedule
from fullshard.data.dataset import DatasetFacts
from fullshard.data.order import BatchShape, SampleOrder

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
    return StepPlan(
        num_steps,
        warmup_steps(training.warmup_steps, training.warmup_ratio, num_steps),
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
