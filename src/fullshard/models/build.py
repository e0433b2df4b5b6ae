"""The model of a run: configuration, vocabulary, added modules, sharding, its exported folder."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

import fullshard as fs
from fullshard.checkpoint.commit import Paths
from fullshard.checkpoint.format import CONFIG
from fullshard.config.schema import LoraConfig, RunConfig, ShardConfig
from fullshard.config.values import DistillLoss, DType
from fullshard.data.tokenize import load_tokenizer
from fullshard.engine.axes import has_experts
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.hugging_face import build_on_meta, num_ids, read_config
from fullshard.engine.initial import check_weights_of, has_weights_of
from fullshard.errors import ConfigError, untrusted
from fullshard.formats.hugging_face import GENERATION, export_together, live_source
from fullshard.formats.source import IN_RUN, whole_or_nothing
from fullshard.models.config import (
    build_model,
    check_no_checkpoint,
    check_vocabulary,
    config_from_folder,
    config_from_settings,
    fit_to_tokenizer,
    freeze,
    num_positions,
)
from fullshard.models.lora import (
    PROJECTION,
    AdaptedWeights,
    adapters_of,
    add_adapters,
    merged,
    save_adapters,
)
from fullshard.models.student import is_cut, student_config
from fullshard.outlook.memory import WeightsSource
from fullshard.planner.spec import matches

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fullshard.config.load import Resolved
    from fullshard.formats.source import Source


logger = logging.getLogger(__name__)

ADAPTERS = "adapter_config.json"
_OTHER_WEIGHTS = ("*.gguf", "*.msgpack", "*.h5", "consolidated*.pth")
DEFAULT_VOCAB_SIZE = 8192  # of a tokenizer trained on the data, if no size is given


def given_model_config(config: RunConfig) -> PretrainedConfig:
    """The model's configuration before it is fitted to a tokenizer.

    Raises:
        ConfigError: It cannot be read, or a student cannot be cut out of it.
    """
    if config.model.name_or_path is not None:
        whole = config_from_folder(config.model)
        if config.distill is not None and is_cut(config.distill):
            return student_config(whole, config.distill)
        return whole
    assert config.model.config is not None, "the schema demands one of the two"
    return config_from_settings(config.model.config)


def model_config_of(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> PretrainedConfig:
    """The model's configuration with the run's vocabulary; the same in every process.

    Without a tokenizer the vocabulary is that of the configuration or of a given tokenizer, else
    the largest one that a tokenizer trained on the data may have.

    Args:
        config: Configuration of the run.
        tokenizer: The run's tokenizer, whose special tokens the model gets; None: not known yet.

    Raises:
        ConfigError: The tokenizer has more entries than the model's or the teacher's vocabulary.
    """
    model_config, own = given_model_config(config), given_tokenizer(config)
    given = ("vocab_size",)  # the model gets the special tokens of a new tokenizer
    if config.model.config is not None:
        given = tuple(config.model.config)
    elif own is not None:
        given = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    if "vocab_size" not in given:
        entries = vocab_size(config, model_config) if own is None else num_ids(own)
        model_config.get_text_config().vocab_size = entries
    if tokenizer is not None:
        fit_to_tokenizer(model_config, tokenizer, (*given, "vocab_size"))
        if config.teacher is not None and config.teacher.name_or_path is not None:
            theirs = config_from_folder(config.teacher, "teacher").get_text_config()
            check_vocabulary("teacher", theirs.vocab_size, tokenizer)
    return model_config


def with_fitting_length(resolved: Resolved) -> Resolved:
    """Shortens a default `max_seq_length` to the positions of the model and its teacher.

    Raises:
        ConfigError: The user set it, and a model has fewer positions.
    """
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


def weights_folder(config: RunConfig) -> Path | None:
    """The folder of the initial weights; None: random weights."""
    if config.model.name_or_path is None:
        return None
    folder = Path(config.model.name_or_path)
    # An index without its files and adapters count as weights, which is an error later.
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.index.json", ADAPTERS)
    if any(path for pattern in patterns for path in folder.glob(pattern)):
        return folder
    if other := next((path for one in _OTHER_WEIGHTS for path in folder.glob(one)), None):
        raise ConfigError(
            "model.name_or_path: expected weights in safetensors, or none to start from random "
            f"ones; got '{other}'. Convert it with the tool that wrote it."
        )
    return None


def given_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of data.tokenizer, the model or the teacher; None: one is trained."""
    if config.data.tokenizer is not None:
        folder = Path(config.data.tokenizer)
        tokenizer = load_tokenizer(config.model, "data.tokenizer", folder)
        if tokenizer is None:
            raise ConfigError(
                f"data.tokenizer: expected a local folder with a tokenizer, got '{folder}'. Set "
                "the folder that contains tokenizer.json."
            )
        return tokenizer
    found = load_tokenizer(config.model) if config.model.name_or_path else None
    if found is None and config.teacher is not None and config.teacher.name_or_path:
        found = load_tokenizer(config.teacher, "teacher.name_or_path")
    return found


def vocab_size(config: RunConfig, model_config: PretrainedConfig) -> int:
    """Largest vocabulary of a tokenizer that is trained on the data."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    if config.model.config is not None and "vocab_size" not in config.model.config:
        return DEFAULT_VOCAB_SIZE
    return model_config.get_text_config().vocab_size


def model_on_meta(config: RunConfig, model_config: PretrainedConfig) -> nn.Module:
    """The model as it will be trained, on meta.

    Raises:
        ConfigError: A glob or a layer's name matches nothing, or adapters have no weights.
    """
    return trainable(build_on_meta(model_config), config)


def build_sharded(
    config: RunConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    before: Callable[[nn.Module], object] = lambda _: None,
) -> nn.Module:
    """The sharded model; no rank ever has the full model in memory.

    The exception are folders whose tensors have other names than the model's, which transformers
    converts as it loads them. They are loaded in full on every rank and then sharded.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the model.
        device: Device of this rank.
        before: Called with the model before it is sharded.
    """
    dtype = getattr(torch, config.sharding.master_dtype or DType.FLOAT32)
    folder, seed = weights_folder(config), config.training.seed
    weights: object = folder
    model = build_on_meta(model_config, dtype)
    source = weights_source(config, lambda: model)
    if source is WeightsSource.WHOLE:
        model = build_model(model_config, folder, dtype, seed).to(device)
        weights = None
    elif folder is not None and _adds(config):
        weights = AdaptedWeights(folder, getattr(model, "base_model_prefix", ""), seed)
    torch.manual_seed(seed)
    before(trainable(model, config))
    return fs.shard(model, sharding_for(config, model).without("context"), weights=weights)


def sharding_for(config: RunConfig, model: nn.Module) -> ShardConfig:
    """The sharding of a run's model or teacher, only one of which must have experts."""
    has_own = config.teacher is None or has_experts(model)
    return config.sharding if has_own else config.sharding.without("expert")


def weights_source(config: RunConfig, bare: Callable[[], nn.Module]) -> WeightsSource:
    """The origin of the initial weights.

    Args:
        config: Configuration of the run.
        bare: Returns the model without added modules; called only if there is a folder.
    """
    folder = weights_folder(config)
    if folder is None:
        return WeightsSource.WHOLE if _adds(config) else WeightsSource.INITIAL
    return WeightsSource.FOLDER if has_weights_of(bare(), folder) else WeightsSource.WHOLE


def check_weights(config: RunConfig) -> None:
    """Reads the headers of all weight files that a run loads: the model's and the teacher's.

    Raises:
        ConfigError: A file is incomplete, a tensor has another shape than the model's, or the
            weights are quantized.
    """
    own, teacher = weights_folder(config), config.teacher
    if own is not None and not (config.distill is not None and is_cut(config.distill)):
        _check_folder(given_model_config(config), own, "model")
    if teacher is not None and teacher.name_or_path:
        folder = Path(teacher.name_or_path)
        _check_folder(config_from_folder(teacher, "teacher"), folder, "teacher")


def _check_folder(config: PretrainedConfig, folder: Path, section: str) -> None:
    check_no_checkpoint(folder, f"{section}.name_or_path")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{section}.name_or_path: expected weights that are not quantized, got "
            f"quantization_config in '{folder / CONFIG}'. Save the model dequantized "
            "(transformers: model.dequantize()), and use that folder. If its weights are not "
            "quantized, remove the entry."
        )
    if (folder / ADAPTERS).is_file():  # transformers would add them as it loads the folder
        raise ConfigError(
            f"{section}.name_or_path: expected whole weights, got '{folder}' with {ADAPTERS}: "
            "its adapters would be left out. Merge them (peft: model.merge_and_unload()), and use "
            "that folder. If the weights are whole without them, remove the file."
        )
    check_weights_of(build_on_meta(config), folder)


def _adds(config: RunConfig) -> bool:
    """Whether the run adds parameters to the model that are in no folder."""
    return config.lora is not None or _projects(config)


def trainable(model: nn.Module, config: RunConfig) -> nn.Module:
    """Adds the run's modules to the model, and freezes parameters; returns the model."""
    if config.lora is not None:
        if weights_folder(config) is None:
            raise ConfigError(
                "lora: expected a model with weights, to which adapters are added; got random "
                "ones. Set model to a folder with weights, or leave lora out."
            )
        add_adapters(model, config.lora)
    freeze(model, config.freeze)
    trained = (name for name, param in model.named_parameters() if param.requires_grad)
    for name in (one for one in trained if matches(one, config.sharding.ignore)):
        raise ConfigError(
            "sharding.ignore: expected frozen parameters, because nothing sums gradients of those "
            f"that are not sharded; got '{name}'. Name it in freeze too, or leave it out."
        )
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
    """Whether hidden states are compared, whose widths may differ."""
    return config.distill is not None and config.distill.loss is DistillLoss.HIDDEN


# ---- the folder of a trained model ---------------------------------------------------------------


MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
        lora: Configuration of the adapters.
        base: Folder of the weights that the run began with.
        folder: Folder to save the adapters in.
    """

    lora: LoraConfig
    base: Path | None
    folder: Path


def save_model(
    model: nn.Module,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    adapters: Adapters | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Writes configuration, weights, tokenizer and generation settings. A collective.

    Weights are gathered tensor by tensor. The ranks take turns in writing files, of at most
    `MAX_FILE_BYTES` unless one tensor is larger.

    Args:
        model: The sharded model.
        config: Configuration of the model.
        tokenizer: Tokenizer of the run.
        folder: Folder to write; an existing one is replaced as a whole.
        adapters: Adapters to save on their own and to merge into the weights.
        texts: See `generation_text`.

    Returns:
        Names of the weight files that this rank wrote.
    """
    engine = engine_of(model)
    source = live_source(model)
    if adapters is not None:
        _save_adapters(engine, source, adapters)
        source = merged(source, adapters.lora, model)
    # config.json names the dtype of the weights, in which readers load them.
    shell = cast("PreTrainedModel", build_on_meta(config, next(model.parameters()).dtype))
    aside = Paths(folder, IN_RUN).aside
    with ExitStack() as writing:

        def begin() -> None:
            if engine.rank == 0:
                writing.enter_context(whole_or_nothing(folder, IN_RUN))
                shell.config.save_pretrained(aside)
                tokenizer.save_pretrained(aside)
                _write_generation(texts, aside)

        engine.agree(begin)
        written = export_together(engine, source, shell, aside, MAX_FILE_BYTES)
        engine.agree(writing.close)
        return written


def _save_adapters(engine: Engine, source: Source, adapters: Adapters) -> None:
    values = {name: entry.read() for name, entry in adapters_of(source).items()}

    def write() -> None:
        if engine.rank == 0:
            with whole_or_nothing(adapters.folder, IN_RUN) as aside:
                save_adapters(values, adapters.lora, adapters.base, aside)

    engine.agree(write)


def write_folder(
    state: dict[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the same folder from full weights in one process, through transformers.

    Args:
        state: Full weights by the model's names.
        config: Configuration of the model.
        tokenizer: Tokenizer of the run.
        folder: Folder to write; an existing one is replaced as a whole.
        texts: See `generation_text`.
    """
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    shell = cast("PreTrainedModel", build_on_meta(config, dtype))
    first_names = {name for name, _ in shell.named_parameters()}
    every_name = (name for name, _ in shell.named_parameters(remove_duplicate=False))
    tied = {name for name in every_name if name not in first_names}  # written once
    with whole_or_nothing(folder, IN_RUN) as aside:
        shell.save_pretrained(aside, state_dict={n: v for n, v in state.items() if n not in tied})
        tokenizer.save_pretrained(aside)
        _write_generation(texts, aside)


def generation_text(config: PretrainedConfig) -> dict[str, str]:
    """generation_config.json, by name, of the folder that a configuration was read from.

    Empty without the file, or if the special tokens are now those of a new tokenizer. A run reads
    it at its start, because the folder may be gone at its end.
    """
    folder = Path(config.name_or_path or os.devnull)
    if not (folder / GENERATION).is_file():
        return {}
    own = read_config(folder, "model.name_or_path", trust=hasattr(config, "auto_map"))
    texts = own.get_text_config(), config.get_text_config()
    ends = {str(getattr(text, "eos_token_id", None)) for text in texts}  # some classes have none
    return {GENERATION: (folder / GENERATION).read_text("utf-8")} if len(ends) == 1 else {}


def end_tokens(config: PretrainedConfig) -> list[int]:
    """Tokens that end generated text: those of generation_config.json, or of the configuration.

    Raises:
        ConfigError: generation_config.json, which every checkpoint copies, is no JSON object.
    """
    found: object = getattr(config.get_text_config(), "eos_token_id", None)
    advice = "Copy the file again, or remove it."
    folder = Path(config.name_or_path or os.devnull)
    with untrusted(folder / GENERATION, "a JSON object", ConfigError, advice):
        for text in generation_text(config).values():
            found = json.loads(text).get("eos_token_id", found)
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def _write_generation(texts: Mapping[str, str], folder: Path) -> None:
    if GENERATION in texts:
        (folder / GENERATION).write_text(texts[GENERATION], encoding="utf-8")
