"""The model of a run on one rank: on meta, with adapters, with what is frozen, sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import fullshard as fs
from fullshard.config.schema import RunConfig
from fullshard.config.values import Backend, DistillLoss, DType
from fullshard.engine.initial import has_weights_of
from fullshard.errors import ConfigError
from fullshard.planner.optimizers import states_of
from fullshard.planner.phases import Source
from fullshard.train.head import PROJECTION
from fullshard.train.lora import AdaptedWeights, add_adapters
from fullshard.train.model import build_model, build_on_meta, config_from_folder, freeze
from fullshard.train.prepare import Prepared, weights_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fullshard.planner.arrays import ArraysPlan
    from fullshard.planner.plan import Plan


def model_on_meta(config: RunConfig, model_config: PretrainedConfig) -> nn.Module:
    """The model as it will be trained, without storage.

    Raises:
        ConfigError: A glob or a layer's name matches nothing, or adapters have no weights.
    """
    return trainable(build_on_meta(model_config), config)


def plan_run(prepared: Prepared, world_size: int) -> Plan | ArraysPlan:
    """The plan of the run, from the model on meta or from shapes.

    Raises:
        ConfigError: The mesh, the units, adapters or a `freeze` glob are impossible for this model.
    """
    config = prepared.config
    if config.backend is Backend.JAX:
        from fullshard.train.xla_teaching import check_teacher, projection_shapes
        from fullshard.xla.decoder import DecoderConfig, plan_table

        decoder = DecoderConfig.of(prepared.model_config)
        more = projection_shapes(config, decoder.hidden_size)
        table = plan_table(prepared.model_config, config, world_size, more)
        check_teacher(config, table)
        return table
    model = model_on_meta(config, prepared.model_config)
    plan = fs.plan(model, config.sharding, world_size=world_size)
    return plan.trained_by(states_of(config.training))


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
        config: Of the run.
        model_config: Of the model.
        device: Of this rank.
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
        config: Of the run.
        bare: Gives the model without what the run adds to it, where there is a folder.
    """
    folder = weights_folder(config)
    if folder is None:
        return Source.WHOLE if _adds(config) else Source.INITIAL
    return Source.FOLDER if has_weights_of(bare(), folder) else Source.WHOLE


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
        folder = Path(config.teacher.name_or_path or "")
        theirs = config_from_folder(folder).get_text_config().hidden_size
        like = next(model.parameters())
        own = model.config.get_text_config().hidden_size  # type: ignore[union-attr]
        if own != theirs:
            with torch.device(like.device):
                model.add_module(PROJECTION, nn.Linear(own, theirs, bias=False, dtype=like.dtype))
    return model


def _projects(config: RunConfig) -> bool:
    """Whether hidden states are compared, of widths that may differ."""
    return config.distill is not None and config.distill.loss is DistillLoss.HIDDEN
