"""Everything that can be checked and made before a rank starts.

    configuration ---> model config, steps        ConfigError
    text          ---> tokenizer, sequences       DataError
    both          ---> plan                       ConfigError, WillNotFitError

It runs in the command's own process (or on rank 0 under torchrun), so a mistake costs seconds and
is said once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.config.schema import RunConfig
from fullshard.data import dataset as data_facts
from fullshard.errors import ConfigError
from fullshard.models.build import (
    given_model_config,
    given_tokenizer,
    model_config_of,
    vocab_size,
    weights_folder,
)
from fullshard.models.config import (
    config_from_folder,
    num_positions,
    quiet_libraries,
    require_transformers,
)
from fullshard.models.small import check_documents
from fullshard.recipes.batches import make_data
from fullshard.recipes.registry import Command
from fullshard.run.optim import check_optimizer
from fullshard.run.schedule import StepPlan, plan_steps

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from fullshard.config.load import Resolved

logger = logging.getLogger(__name__)


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
    kind = command.kind
    kind.check(config, tokenizer)
    _check_trains_tokenizer(config, tokenizer)
    dataset = make_data(config, command, tokenizer, vocab_size(config, given))
    model_config = model_config_of(config, dataset.tokenizer)
    kind.check_data(config, dataset.facts)
    if config.sft is not None and config.sft.packing and kind.uses_chats(config):
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
