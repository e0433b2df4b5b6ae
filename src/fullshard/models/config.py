"""The model of a run: from a Hugging Face configuration, or from a local folder."""

from __future__ import annotations

import fnmatch
import inspect
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.format import COMPLETE, CONFIG
from fullshard.config.regular_files import did_you_mean_path
from fullshard.config.schema import ModelConfig
from fullshard.config.values import nearest
from fullshard.data.arrays import sample_of
from fullshard.engine.hugging_face import build, last_line, num_ids, read_config, read_model
from fullshard.errors import ConfigError, untrusted
from fullshard.planner.spec import check_any_trained

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Keyword arguments of every configuration class that are not its fields.
EXTRA_CONFIG_KEYS = frozenset(
    {"attn_implementation", "experts_implementation", "name_or_path", "num_labels", "model_type"}
    | {"output_attentions", "rope_scaling", "rope_theta", "torch_dtype", "partial_rotary_factor"}
)

MOST_LAYERS = 1_000


def quiet_libraries() -> None:
    """Turns off transformers' progress bars and warnings.

    Raises:
        ConfigError: transformers or tokenizers is missing; names what to install.
    """
    import importlib.util

    for package in ("transformers", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"model: Hugging Face models need {package}, which is not installed. "
                "Run pip install 'fullshard[hf]'."
            )
    if sys.flags.optimize > 1:
        raise ConfigError(
            "PYTHONOPTIMIZE: expected at most 1, because transformers builds its models from "
            "docstrings; got 2, which removes them (python -OO)."
        )

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def config_from_settings(settings: Mapping[str, Any]) -> PretrainedConfig:
    """A Hugging Face configuration from `model.config`.

    Args:
        settings: `model_type`, and fields of its configuration class.

    Raises:
        ConfigError: An unknown type, a type without a causal language model, a key that the class
            does not have (it would ignore it silently), or a value that it refuses.
    """
    quiet_libraries()
    from transformers import CONFIG_MAPPING

    settings = dict(settings)
    model_type = settings.pop("model_type", None)
    known_types = list(CONFIG_MAPPING.keys())
    if model_type not in known_types:
        raise ConfigError(_unknown("model.config.model_type", model_type, known_types))
    config_class = CONFIG_MAPPING[model_type]
    _check_has_causal_lm(model_type, config_class, "model.config.model_type")
    accepted = accepted_keys(config_class)
    for key in settings:
        if key not in accepted and not _reads(config_class, key):
            guess = nearest(key, sorted(accepted))
            known = f"Known keys: {', '.join(sorted(accepted))}."
            hint = f"Did you mean '{guess}'?" if guess else known
            raise ConfigError(
                f"model.config.{key}: expected a key of {config_class.__name__}, got an unknown "
                f"one. {hint}"
            )
    try:
        config = config_class(**settings)
    except Exception as error:
        raise ConfigError(
            f"model.config: {config_class.__name__} refuses these values: {last_line(error)}"
        ) from error
    _check_sizes(config)
    return config


def accepted_keys(config_class: type) -> set[str]:
    """Every key that a configuration class reads."""
    keys = set(EXTRA_CONFIG_KEYS) | set(getattr(config_class, "attribute_map", {}))
    for ancestor in config_class.__mro__:
        if "__init__" in vars(ancestor):
            keys.update(inspect.signature(ancestor.__init__).parameters)
    return keys - {"self", "args", "kwargs"}


def _reads(config_class: Any, key: str) -> bool:
    """Whether the code of a model reads a key that its configuration class does not declare."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    module: Any = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    code = ""
    for part in vars(module).values():  # parts of other models may be in the same file
        if inspect.isclass(part) and part.__module__ == module.__name__:
            given = inspect.signature(part.__init__).parameters.get("config")
            if given is not None and config_class.__name__ in str(given.annotation):
                code += inspect.getsource(part)
    found = re.search(rf'\bconfig(\.|, "){re.escape(key)}\b', code)
    return found is not None and not hasattr(config_class, key)


def config_from_folder(model: ModelConfig, section: str = "model") -> PretrainedConfig:
    """The configuration of a local model folder.

    Args:
        model: Model section, with the folder and whether the folder's code may run.
        section: `model` or `teacher`, for errors.

    Raises:
        ConfigError: The folder, its config.json or a causal language model for it is missing.
    """
    folder, key = Path(model.name_or_path or ""), f"{section}.name_or_path"
    quiet_libraries()
    check_model_folder(folder, key)
    config = read_config(folder, key, trust=model.trust_remote_code)
    if not hasattr(config, "auto_map"):
        _check_has_causal_lm(config.model_type, type(config), key)
        names = tuple(map(str, config.architectures or ()))
        _tell_of_family(type(config), names, folder / CONFIG)
    _check_sizes(config)
    return config


def check_model_folder(folder: Path, key: str = "model.name_or_path") -> None:
    """Raises ConfigError if a folder is not a local Hugging Face model."""
    if not folder.is_dir():
        near = did_you_mean_path(folder) or "Check the path."
        raise ConfigError(
            f"{key}: expected a local model folder, got '{folder}', which is not a folder here. "
            f"{near} Nothing is downloaded during a run: to use a model of a hub, download it "
            "first (hf download NAME --local-dir FOLDER) and set the folder."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: expected a Hugging Face model folder, got '{folder}' without config.json. Set "
            "the folder that contains config.json and the weights."
        )


def check_no_checkpoint(folder: Path, key: str) -> None:
    """Raises ConfigError for a checkpoint of ours, which has a config.json and no weights of it."""
    if (folder / COMPLETE).is_file():
        raise ConfigError(
            f"{key}: expected a Hugging Face model folder, got the checkpoint '{folder}'. Convert "
            f"it with `fullshard ckpt export {folder} MODEL`, and set MODEL."
        )


def sample_of_model(model: ModelConfig | None) -> str | None:
    """Checksum of a sample of a folder's weights and its config.json; None if it has none."""
    folder = Path((model and model.name_or_path) or os.devnull)
    files = [*folder.glob("*.safetensors"), *folder.glob("config.json")]
    return sample_of(files) if files else None


def fit_to_tokenizer(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, given: Sequence[str] = ()
) -> None:
    """Makes the vocabulary and the special tokens of a configuration those of the tokenizer.

    Args:
        config: Changed in place.
        tokenizer: Tokenizer of this run.
        given: Keys that the user set, which stay as they are.

    Raises:
        ConfigError: The tokenizer has more entries than the user's `vocab_size`.
    """
    text_config = config.get_text_config()
    if "vocab_size" not in given:
        text_config.vocab_size = num_ids(tokenizer)
    check_vocabulary("model", text_config.vocab_size, tokenizer)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key not in given:
            setattr(text_config, key, getattr(tokenizer, key))


def check_vocabulary(key: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError if a tokenizer has more entries than a model has embeddings."""
    if vocab_size < (least := num_ids(tokenizer)):
        raise ConfigError(
            f"{key}.config.vocab_size: expected at least {least} (the tokenizer's ids), got "
            f"{vocab_size}. Set {key}.config.vocab_size to {least} or leave it out; with existing "
            "weights, set data.tokenizer to their own tokenizer, or lower data.vocab_size."
        )


def num_positions(config: PretrainedConfig) -> int | None:
    """Number of positions of a model, which limits its sequences; None: no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def build_model(
    config: PretrainedConfig, folder: Path | None, dtype: torch.dtype, seed: int
) -> nn.Module:
    """The model with its weights, the same on every rank.

    Args:
        config: Configuration of the model.
        folder: Folder of the weights; None: the model's own initialisation from `seed`.
        dtype: Dtype of the parameters (the master dtype).
        seed: Seed of the initialisation.
    """
    import torch

    torch.manual_seed(seed)
    if folder is None:
        return build(config, dtype=dtype)
    return read_model(folder, config, dtype=dtype)


def freeze(model: nn.Module, globs: Sequence[str]) -> int:
    """Freezes the parameters whose names match a glob; returns their number.

    Raises:
        ConfigError: A glob matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise ConfigError(_unmatched_glob(glob, names))
    frozen = 0
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            parameter.requires_grad_(False)
            frozen += 1
    check_any_trained(globs, len(names) - frozen)
    return frozen


def _unmatched_glob(glob: str, names: list[str]) -> str:
    words = {word for name in names for word in name.split(".")}
    meant = ".".join(w if w in words else nearest(w, words) or w for w in glob.split("."))
    found = fnmatch.filter(names, meant)
    hint = f"Did you mean '{meant}'?" if found else f"Names look like '{names[0]}'."
    return f"freeze: expected globs of parameter names, got '{glob}', which matches none. {hint}"


RANDOM = re.compile("dropout|pdrop|layerdrop|drop_rate")  # keys of shares that are dropped
# Values with which transformers trains a model to copy the tokens that it predicts; it then also
# reads other documents and padding. Models of these types have no other attention.
_READS_AHEAD = [("use_bidirectional_attention", value) for value in (True, "all")]
_READS_AHEAD += [("is_causal", False), ("causal", False)]
_READ_AHEAD = ("cpmant", "xlnet")


@untrusted(
    "the model's configuration",
    "the sizes of one text model, equal in all layers",
    ConfigError,
    "Use another type, such as llama, qwen3 or gpt2.",
)
def _check_sizes(config: PretrainedConfig) -> None:
    """Raise ConfigError for impossible sizes, of which building 10M layers would take hours, or for
    attention that reads ahead.
    """
    names = "num_attention_heads", "num_key_value_heads"
    heads, shared = (getattr(config.get_text_config(), name, None) for name in names)
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise ConfigError(f"model.config.{names[1]}: expected a divisor of {heads}, got {shared}.")
    for key, share in config.get_text_config().to_dict().items():
        is_number = RANDOM.search(key) and isinstance(share, int | float)
        if is_number and not 0 <= share <= 1:
            raise ConfigError(f"model.config.{key}: expected a number from 0 to 1, got {share}.")
    for key, value in _READS_AHEAD:
        if getattr(config.get_text_config(), key, None) == value:
            raise ConfigError(
                f"model.config.{key}: expected attention to earlier tokens only; got {value}, with "
                f"which the model reads the tokens that it predicts. Set it to {value is False}, "
                "in config.json for a folder."
            )
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        size = getattr(config.get_text_config(), key, None)
        most = MOST_LAYERS if key == "num_hidden_layers" else None
        if isinstance(size, int) and (size < 1 or (most is not None and size > most)):
            expected = f"between 1 and {most:,}" if most else "at least 1"
            raise ConfigError(f"model.config.{key}: expected {expected}, got {size:,}.")


def _check_has_causal_lm(model_type: str, config_class: type, key: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING or model_type in _READ_AHEAD:
        raise ConfigError(
            f"{key}: expected a type with a causal language model, got '{model_type}', for which "
            "transformers has none. Use another type, such as llama, qwen3 or gpt2."
        )


@lru_cache
def _tell_of_family(own: type, architectures: tuple[str, ...], file: Path) -> None:
    """Warns if a file names a model of another type than its own, which counts."""
    import transformers

    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[own]
    packages = {one.__module__.rpartition(".")[0] for one in (own, model)}  # another type's model
    for name in architectures:
        package = getattr(getattr(transformers, name, None), "__module__", "").rpartition(".")[0]
        if package.startswith("transformers.models.") and package not in packages:
            logger.warning(
                "'%s' names a model of another type (architectures: %s) than its model_type, as "
                "which it is read: %s. If that is wrong, correct model_type",
                file,
                name,
                model.__name__,
            )


def _unknown(key: str, value: object, choices: list[str]) -> str:
    guess = nearest(str(value), choices) if value else None
    hint = f"Did you mean '{guess}'?" if guess else "Use one such as llama, qwen3 or gpt2."
    got = "none" if value is None else f"'{value}'"
    return f"{key}: expected a model type of transformers, got {got}. {hint}"
