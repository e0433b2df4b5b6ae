"""The model of a run: from a Hugging Face configuration, or from a local folder."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.values import nearest
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Read from the keyword arguments of every configuration class without being fields of it.
EXTRA_CONFIG_KEYS = frozenset(
    {"attn_implementation", "experts_implementation", "name_or_path", "num_labels", "model_type"}
    | {"output_attentions", "rope_scaling", "rope_theta", "torch_dtype", "partial_rotary_factor"}
)


def require_transformers() -> None:
    """Raises ConfigError with what to install where transformers or tokenizers is missing."""
    import importlib.util

    for package in ("transformers", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"model: Hugging Face models need {package}, which is not installed. "
                "Run pip install 'fullshard[hf]'."
            )


def quiet_libraries() -> None:
    """Keeps transformers' progress bars and advice out of the run's output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def config_from_settings(settings: Mapping[str, Any]) -> PretrainedConfig:
    """A Hugging Face configuration from `model.config`.

    Args:
        settings: `model_type` and fields of its configuration class.

    Raises:
        ConfigError: An unknown type, a type without a causal language model, a key that the
            class does not have (it would take it in silence), or a value that it refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
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
        if key not in accepted:
            guess = nearest(key, sorted(accepted))
            known = f"Known keys: {', '.join(sorted(accepted))}."
            hint = f"Did you mean '{guess}'?" if guess else known
            raise ConfigError(
                f"model.config.{key}: expected a key of {config_class.__name__}, got an unknown "
                f"one. {hint}"
            )
    try:
        return config_class(**settings)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model.config: {config_class.__name__} refuses these values: {_last_line(error)}"
        ) from error


def accepted_keys(config_class: type) -> set[str]:
    """Every key that a configuration class reads."""
    keys = set(EXTRA_CONFIG_KEYS) | set(getattr(config_class, "attribute_map", {}))
    for ancestor in config_class.__mro__:
        if "__init__" in vars(ancestor):
            keys.update(inspect.signature(ancestor.__init__).parameters)
    return keys - {"self", "args", "kwargs"}


def config_from_folder(folder: Path) -> PretrainedConfig:
    """The configuration of a local model folder.

    Raises:
        ConfigError: The folder, its config.json or a causal language model for it is missing.
    """
    check_model_folder(folder)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.name_or_path: expected a config.json that transformers reads, got one in "
            f"'{folder}' that it refuses: {_last_line(error)}"
        ) from error
    _check_has_causal_lm(config.model_type, type(config), "model.name_or_path")
    return config


def check_model_folder(folder: Path, key: str = "model.name_or_path") -> None:
    """Raises ConfigError where a folder is not a local Hugging Face model."""
    if not folder.is_dir():
        siblings = list(folder.parent.iterdir()) if folder.parent.is_dir() else []
        guess = nearest(folder.name, [entry.name for entry in siblings if entry.is_dir()])
        hint = f"Did you mean '{folder.parent / guess}'? " if guess else ""
        raise ConfigError(
            f"{key}: expected a local model folder, got '{folder}', which is no folder here. "
            f"{hint}Nothing is downloaded during a run: to use a model of a hub, download it "
            "first (hf download NAME --local-dir FOLDER) and name the folder."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: expected a Hugging Face model folder, got '{folder}' without config.json. "
            "Name the folder that holds config.json and the weights."
        )


def fit_to_tokenizer(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, given: Sequence[str] = ()
) -> None:
    """Makes the vocabulary and the special tokens of a configuration those of the tokenizer.

    Args:
        config: Changed in place.
        tokenizer: Of this run.
        given: Keys that the user set, which stay as they are.

    Raises:
        ConfigError: The tokenizer has more entries than the user's `vocab_size`.
    """
    text_config = config.get_text_config()
    if "vocab_size" not in given:
        text_config.vocab_size = len(tokenizer)
    elif text_config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"model.config.vocab_size: expected at least {len(tokenizer)} (the tokenizer's "
            f"entries), got {text_config.vocab_size}. Raise it or leave it out."
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key not in given:
            setattr(text_config, key, getattr(tokenizer, key))


def check_length(config: PretrainedConfig, max_seq_length: int) -> None:
    """Raises ConfigError where sequences are longer than the model has positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_seq_length > positions:
        raise ConfigError(
            f"training.max_seq_length: expected at most {positions} (the model's "
            f"max_position_embeddings), got {max_seq_length}. Lower it or raise the model's."
        )


def build_model(
    config: PretrainedConfig, folder: Path | None, dtype: torch.dtype, seed: int
) -> nn.Module:
    """The model with its weights, the same on every rank.

    Args:
        config: What to build.
        folder: Whose weights to load; None: the model's own initialisation from `seed`.
        dtype: Of the parameters (the master dtype).
        seed: Of the initialisation.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    if folder is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, local_files_only=True
    )


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """The model without storage: names, shapes, dtypes."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)


def freeze(model: nn.Module, globs: Sequence[str]) -> int:
    """Takes the gradient from parameters whose name matches a glob; returns how many.

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
    if frozen == len(names):
        raise ConfigError(
            f"freeze: expected globs that leave something to train, got {list(globs)}, which "
            f"freeze all {frozen} parameters. Name fewer."
        )
    return frozen


def _unmatched_glob(glob: str, names: list[str]) -> str:
    guess = nearest(glob.replace("*", ""), names)
    hint = f"Did you mean '{guess}'?" if guess else f"Names look like '{names[0]}'."
    return f"freeze: expected globs of parameter names, got '{glob}', which matches none. {hint}"


def _check_has_causal_lm(model_type: str, config_class: type, key: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{key}: expected a type with a causal language model, got '{model_type}', for which "
            "transformers has none. Use another type, such as llama, qwen3 or gpt2."
        )


def _unknown(key: str, value: object, choices: list[str]) -> str:
    guess = nearest(str(value), choices) if value else None
    hint = f"Did you mean '{guess}'?" if guess else "Use one such as llama, qwen3 or gpt2."
    got = "none" if value is None else f"'{value}'"
    return f"{key}: expected a model type of transformers, got {got}. {hint}"


def _last_line(error: Exception) -> str:
    """The sentence of a validation error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
