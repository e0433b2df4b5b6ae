"""The model of a run on one rank: on meta, with adapters, with what is frozen, sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import fullshard as fs
from fullshard.config.schema import RunConfig
from fullshard.config.values import DistillLoss, DType
from fullshard.engine.hugging_face import build_on_meta
from fullshard.engine.initial import check_weights_of, has_weights_of
from fullshard.errors import ConfigError
from fullshard.outlook.memory import Source
from fullshard.train.head import PROJECTION
from fullshard.train.lora import AdaptedWeights, add_adapters
from fullshard.train.model import build_model, config_from_folder, freeze
from fullshard.train.prepare import given_model_config, weights_folder
from fullshard.train.student import is_cut

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_on_meta(config: RunConfig, model_config: PretrainedConfig) -> nn.Module:
    """The model as it will be trained, without storage.

    Raises:
        ConfigError: A glob or a layer's name matches nothing, or adapters have no weights.
    """
    return trainable(build_on_meta(model_config), config)


def build_sharded(
    config: RunConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    before: Callable[[nn.Module], None] = lambda _: None,
) -> nn.Module:
    """The sharded model, of which no rank ever holds the whole.

    Folders whose tensors have other names than the model's, which transformers converts as it
    loads them, are loaded whole on every rank and then cut.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the model.
        device: Device of this rank.
        before: Is shown the model before it is sharded.
    """
    dtype = getattr(torch, config.sharding.master_dtype or DType.FLOAT32)
    folder, seed = weights_folder(config), config.training.seed
    weights: object = folder
    model = build_on_meta(model_config, dtype)
    source = weights_source(config, lambda: model)
    if source is Source.WHOLE:
        model = build_model(model_config, folder, dtype, seed).to(device)
        weights = None
    elif folder is not None and _adds(config):
        weights = AdaptedWeights(folder, getattr(model, "base_model_prefix", ""), seed)
    torch.manual_seed(seed)
    before(trainable(model, config))
    return fs.shard(model, config.sharding, weights=weights)


def weights_source(config: RunConfig, bare: Callable[[], nn.Module]) -> Source:
    """Where the first weights come from.

    Args:
        config: Configuration of the run.
        bare: Gives the model without what the run adds to it, where there is a folder.
    """
    folder = weights_folder(config)
    if folder is None:
        return Source.WHOLE if _adds(config) else Source.INITIAL
    return Source.FOLDER if has_weights_of(bare(), folder) else Source.WHOLE


def check_weights(config: RunConfig) -> None:
    """Reads the headers of all files of weights that a run begins with: its own and the teacher's.

    Raises:
        ConfigError: A file is not whole, or a tensor has another shape than the model's.
    """
    own, teacher = weights_folder(config), config.teacher
    if own is not None and not (config.distill is not None and is_cut(config.distill)):
        check_weights_of(build_on_meta(given_model_config(config)), own)
    if teacher is not None and teacher.name_or_path:
        model = build_on_meta(config_from_folder(teacher, "teacher"))
        check_weights_of(model, Path(teacher.name_or_path))


def _adds(config: RunConfig) -> bool:
    """Whether the model has parameters that no folder has."""
    return config.lora is not None or _projects(config)


def trainable(model: nn.Module, config: RunConfig) -> nn.Module:
    """The model with what a run adds to it, and without gradients of what it freezes."""
    if config.lora is not None:
        if weights_folder(config) is None:
            raise ConfigError(
                "lora: expected a model with weights, to which adapters are added; got random ones."
                " Give model a folder with weights, or leave lora out."
            )
        add_adapters(model, config.lora)
    freeze(model, config.freeze)
    if _projects(config):
        assert config.teacher is not None, "the loss needs one"
        theirs = config_from_folder(config.teacher, "teacher").get_text_config().hidden_size
        like = next(model.parameters())
        own = model.config.get_text_config().hidden_size  # type: ignore[union-attr]
        if own != theirs:
            with torch.device(like.device):
                model.add_module(PROJECTION, nn.Linear(own, theirs, bias=False, dtype=like.dtype))
    return model


def _projects(config: RunConfig) -> bool:
    """Whether hidden states are compared, of widths that may differ."""
    return config.distill is not None and config.distill.loss is DistillLoss.HIDDEN
