"""Everything that can be checked and made before a rank starts.

    configuration ---> model config, steps        ConfigError
    text          ---> tokenizer, sequences       DataError
    both          ---> plan                       ConfigError, WillNotFitError

It runs in the command's own process (or on rank 0 under torchrun), so a mistake costs seconds and
is said once.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.config.schema import DistillConfig, ModelConfig, RunConfig, TrainingConfig
from fullshard.config.values import Command, DistillLoss, IntervalStrategy
from fullshard.data import dataset as data_facts
from fullshard.data.dataset import DatasetFacts
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.data.tokenizer import load_tokenizer
from fullshard.errors import ConfigError
from fullshard.models.build import (
    given_model_config,
    given_tokenizer,
    model_config_of,
    vocab_size,
    weights_folder,
)
from fullshard.models.config import (
    check_model_folder,
    config_from_folder,
    num_positions,
    quiet_libraries,
    require_transformers,
)
from fullshard.models.small import check_documents
from fullshard.recipes.distill.logits import check_facts
from fullshard.recipes.registry import make_data, uses_chats
from fullshard.run.optim import check_optimizer
from fullshard.run.schedule import Schedule, warmup_steps

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from fullshard.config.load import Resolved

logger = logging.getLogger(__name__)

SAVE_STEPS = 500  # Hugging Face's default


@dataclass(frozen=True)
class StepPlan:
    """Counts of steps, with shares and epochs resolved.

    Attributes:
        num_steps: Updates of the run.
        num_warmup_steps: Warm-up steps of the learning rate.
        log_every: Steps between printed lines.
        eval_every: Steps between evaluations; 0: at the end alone.
        save_every: Steps between checkpoints; None: there are none.
        order: Which samples each step sees.
    """

    num_steps: int
    num_warmup_steps: int
    log_every: int
    eval_every: int
    save_every: int | None
    order: SampleOrder

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.order.steps_per_epoch


@dataclass(frozen=True)
class Prepared:
    """What the checks found and made."""

    config: RunConfig
    model_config: PretrainedConfig
    dataset: data_facts.Prepared
    steps: StepPlan

    def with_batch(self, world_size: int, global_batch: int | None) -> Prepared:
        """The same with other steps."""
        facts = self.dataset.facts
        steps = plan_steps(self.config.training, facts, world_size, global_batch)
        return replace(self, steps=steps)


def prepare(
    config: RunConfig, command: Command, world_size: int, global_batch: int | None = None
) -> Prepared:
    """Reads, checks and tokenizes; writes nothing.

    Args:
        config: Configuration of the run.
        command: Which recipe it is for.
        world_size: All ranks.
        global_batch: See `plan_steps`.

    Raises:
        ConfigError: The model or the numbers of the run cannot be used.
        DataError: The data cannot be used.
    """
    check_optimizer(config.training.optim)
    given, tokenizer = given_model_config(config), given_tokenizer(config)
    if command is not Command.TRAIN and config.teacher is not None:
        check_teacher(config.teacher, tokenizer, config.distill or DistillConfig())
    _check_trains_tokenizer(config, tokenizer)
    dataset = make_data(config, command, tokenizer, vocab_size(config, given))
    model_config = model_config_of(config, dataset.tokenizer)
    if command is Command.DISTILL and config.distill is not None and config.distill.cache:
        check_facts(Path(config.distill.cache), dataset.facts)
    if config.sft is not None and config.sft.packing and uses_chats(config, command):
        check_documents(model_config)
    return Prepared(
        config,
        model_config,
        dataset,
        plan_steps(config.training, dataset.facts, world_size, global_batch),
    )


def with_fitting_length(resolved: Resolved) -> Resolved:
    """Shortens a `max_seq_length` that nobody set to the positions of the model and its teacher.

    Raises:
        ConfigError: Somebody set it, and a model has fewer positions.
    """
    require_transformers()
    quiet_libraries()
    config = resolved.config
    models = {"model": given_model_config(config)}
    if config.teacher is not None and config.teacher.name_or_path is not None:
        models["teacher"] = config_from_folder(config.teacher, "teacher")
    length = config.training.max_seq_length
    limits = {name: num_positions(found) or length for name, found in models.items()}
    name = min(limits, key=lambda name: limits[name])
    if limits[name] >= length:
        return resolved
    limit = f"{limits[name]} (the {name}'s max_position_embeddings)"
    if resolved.is_chosen("training.max_seq_length"):
        raise ConfigError(
            f"training.max_seq_length: expected at most {limit}, got {length}. Lower it or leave "
            "it out."
        )
    logger.info("max_seq_length: %s; the default is %d", limit, length)
    training = config.training.model_copy(update={"max_seq_length": limits[name]})
    return replace(resolved, config=config.model_copy(update={"training": training}))


def check_teacher(
    teacher: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, settings: DistillConfig
) -> None:
    """Raises ConfigError where a student cannot learn from this teacher."""
    folder = Path(teacher.name_or_path or "")
    if teacher.name_or_path is None:
        raise ConfigError(
            "teacher: expected a folder with weights, got a configuration, whose weights would be "
            "random. Train it first (fullshard train), and name RUN/model."
        )
    check_model_folder(folder, "teacher")
    theirs = load_tokenizer(teacher, "teacher")
    if tokenizer is None or theirs is None or settings.loss is DistillLoss.HIDDEN:
        return
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    if ours != other:
        word = next((w for w in sorted({*ours, *other}) if ours.get(w) != other.get(w)), "")
        raise ConfigError(
            f"teacher: expected the student's tokenizer, since token by token their predictions "
            f"are compared; got another one ({len(other):,} entries, the student's has "
            f"{len(ours):,}; they differ in {word!r}). Give the student the teacher's "
            "(data.tokenizer), or train on text that the teacher writes (fullshard sft)."
        )


def plan_steps(
    training: TrainingConfig,
    facts: DatasetFacts,
    world_size: int,
    global_batch: int | None = None,
) -> StepPlan:
    """Resolves epochs and shares of steps to counts.

    Args:
        training: Training section of the run.
        facts: Facts of its data.
        world_size: All ranks.
        global_batch: Samples of one step in the run that is gone on with; it is kept.

    Raises:
        DataError: Fewer sequences than one step needs.
    """
    per_device = training.per_device_train_batch_size
    shape = BatchShape(per_device, training.gradient_accumulation_steps, world_size)
    if global_batch is not None:
        shape = BatchShape.of_batch(global_batch, per_device, world_size)
    order = SampleOrder(facts.num_train_sequences, shape, training.seed)
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
    )


def schedule_of(training: TrainingConfig, steps: StepPlan) -> Schedule:
    """The learning rate over a run's steps."""
    return Schedule(
        training.lr_scheduler_type, training.learning_rate, steps.num_warmup_steps, steps.num_steps
    )


def _interval(
    strategy: IntervalStrategy, every: float, order: SampleOrder, num_steps: int
) -> int | None:
    match strategy:
        case IntervalStrategy.NO:
            return None
        case IntervalStrategy.EPOCH:
            return order.steps_per_epoch
        case IntervalStrategy.STEPS:
            return _steps(every, num_steps)


def _steps(value: float, num_steps: int) -> int:
    """A count of steps, or a share of all of them below 1."""
    return int(value) if value >= 1 else max(1, math.ceil(value * num_steps))


def _check_trains_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuses to train a tokenizer for weights that know another one's tokens, unless asked to."""
    teacher = (config.teacher and config.teacher.name_or_path) or None
    weights = weights_folder(config) or (Path(teacher) if teacher else None)
    if tokenizer is not None or weights is None or config.data.vocab_size is not None:
        return
    key = "model.name_or_path" if weights_folder(config) else "teacher.name_or_path"
    raise ConfigError(
        f"{key}: expected weights with their tokenizer, got '{weights}' without one. Put its files "
        "into the folder or name the folder that has them (data.tokenizer). Set data.vocab_size to "
        "train a new tokenizer on the data, whose tokens these weights have never seen."
    )
