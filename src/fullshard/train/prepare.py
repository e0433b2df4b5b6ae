"""Everything that can be checked and made before a rank starts.

    configuration ---> model config, steps        ConfigError
    text          ---> tokenizer, sequences       DataError
    both          ---> plan                       ConfigError, WillNotFitError

It runs in the command's own process (or on rank 0 under torchrun), so a mistake costs seconds and
is said once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import fullshard as fs
from fullshard.config.schema import RunConfig, TrainingConfig
from fullshard.config.values import IntervalStrategy
from fullshard.errors import ConfigError
from fullshard.train.dataset import Dataset, DatasetFacts, DatasetSettings, make_dataset
from fullshard.train.model import (
    build_on_meta,
    check_length,
    check_model_folder,
    config_from_folder,
    config_from_settings,
    fit_to_tokenizer,
    freeze,
    quiet_libraries,
    require_transformers,
)
from fullshard.train.order import BatchShape, SampleOrder
from fullshard.train.schedule import warmup_steps
from fullshard.train.text import read_corpus
from fullshard.train.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from fullshard.planner.plan import Plan

DEFAULT_VOCAB_SIZE = 8192  # of a tokenizer trained on the data, where nothing says how large


@dataclass(frozen=True)
class StepPlan:
    """Counts of steps, with shares and epochs resolved.

    Attributes:
        num_steps: Updates of the run.
        num_warmup_steps: Of the learning rate.
        log_every: Steps between printed lines.
        eval_every: Steps between evaluations; 0: at the end alone.
        order: Which samples each step sees.
    """

    num_steps: int
    num_warmup_steps: int
    log_every: int
    eval_every: int
    order: SampleOrder

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.order.steps_per_epoch


@dataclass(frozen=True)
class Prepared:
    """What the checks found and made."""

    config: RunConfig
    model_config: PretrainedConfig
    dataset: Dataset
    steps: StepPlan


def prepare(config: RunConfig, world_size: int) -> Prepared:
    """Reads, checks and tokenizes; writes nothing.

    Raises:
        ConfigError: The model or the numbers of the run cannot be used.
        DataError: The data cannot be used.
    """
    require_transformers()
    quiet_libraries()
    given, tokenizer = _given_model_config(config), _given_tokenizer(config)
    check_length(given, config.training.max_seq_length)
    corpus = read_corpus(
        Path(config.data.path) if config.data.path else None, config.data.text_column
    )
    settings = DatasetSettings(
        sequence_length=config.training.max_seq_length,
        held_out_fraction=config.data.validation_fraction,
        vocab_size=_vocab_size(config, given),
    )
    dataset = make_dataset(corpus, settings, tokenizer)
    return Prepared(
        config,
        model_config_of(config, dataset.tokenizer),
        dataset,
        plan_steps(config.training, dataset.facts, world_size),
    )


def model_config_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The model's configuration, fitted to the run's tokenizer; the same in every process."""
    model_config = _given_model_config(config)
    if config.model.config is not None:
        given = tuple(config.model.config)
    elif _given_tokenizer(config) is None:
        given = ("vocab_size",)  # a new tokenizer, whose special tokens the model must know
    else:
        given = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    fit_to_tokenizer(model_config, tokenizer, given)
    return model_config


def weights_folder(config: RunConfig) -> Path | None:
    """Where the initial weights come from; None: random ones."""
    folder = _model_folder(config)
    if folder is None:
        return None
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    return folder if has_weights else None


def plan_run(prepared: Prepared, world_size: int) -> Plan:
    """The plan of the run, from the model on meta.

    Raises:
        ConfigError: The mesh, the units or a `freeze` glob are impossible for this model.
    """
    model = build_on_meta(prepared.model_config)
    freeze(model, prepared.config.freeze)
    return fs.plan(model, prepared.config.sharding, world_size=world_size)


def plan_steps(training: TrainingConfig, facts: DatasetFacts, world_size: int) -> StepPlan:
    """Resolves epochs and shares of steps to counts.

    Raises:
        DataError: Fewer sequences than one step needs.
    """
    shape = BatchShape(
        training.per_device_train_batch_size, training.gradient_accumulation_steps, world_size
    )
    order = SampleOrder(facts.num_train_sequences, shape, training.seed)
    num_steps = training.max_steps
    if num_steps <= 0:
        num_steps = max(1, math.ceil(training.num_train_epochs * order.steps_per_epoch))
    match training.evaluates:
        case IntervalStrategy.NO:
            eval_every = 0
        case IntervalStrategy.EPOCH:
            eval_every = order.steps_per_epoch
        case IntervalStrategy.STEPS:
            eval_every = _steps(training.eval_steps or training.logging_steps, num_steps)
    return StepPlan(
        num_steps,
        warmup_steps(training.warmup_steps, training.warmup_ratio, num_steps),
        _steps(training.logging_steps, num_steps),
        eval_every,
        order,
    )


def _steps(value: float, num_steps: int) -> int:
    """A count of steps, or a share of all of them below 1."""
    return int(value) if value >= 1 else max(1, math.ceil(value * num_steps))


def _model_folder(config: RunConfig) -> Path | None:
    return Path(config.model.name_or_path) if config.model.name_or_path else None


def _given_model_config(config: RunConfig) -> PretrainedConfig:
    folder = _model_folder(config)
    if folder is not None:
        return config_from_folder(folder)
    assert config.model.config is not None, "the schema demands one of the two"
    return config_from_settings(config.model.config)


def _given_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase | None:
    if config.data.tokenizer is not None:
        folder = Path(config.data.tokenizer)
        tokenizer = load_tokenizer(folder) if folder.is_dir() else None
        if tokenizer is None:
            raise ConfigError(
                f"data.tokenizer: expected a local folder with a tokenizer, got '{folder}'. "
                "Name the folder that holds tokenizer.json."
            )
        return tokenizer
    folder = _model_folder(config)
    if folder is None:
        return None
    check_model_folder(folder)
    return load_tokenizer(folder)


def _vocab_size(config: RunConfig, model_config: PretrainedConfig) -> int:
    """Most entries of a tokenizer that is trained on the data."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    if config.model.config is not None and "vocab_size" not in config.model.config:
        return DEFAULT_VOCAB_SIZE
    return model_config.get_text_config().vocab_size
