"""All calls of transformers' loaders. Code of a folder runs only if a key allows it.

A folder may contain code (`auto_map`), which transformers offers to run. `read_config` removes this
entry unless the folder is trusted. A configuration with the entry therefore has permission to run
code.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.regular_files import open_regular
from fullshard.errors import ConfigError, ran_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRUST = "trust_remote_code"  # transformers' name and ours


def read_config(folder: Path, key: str, *, trust: bool = False) -> PretrainedConfig:
    """Reads the configuration of a local folder.

    Args:
        folder: Folder with config.json.
        key: The configuration key or argument that names the folder, for errors.
        trust: Whether code of the folder may run.

    Raises:
        ConfigError: transformers cannot read it, or needs code of the folder that is not allowed.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        raise _refused(error, folder, key, "a config.json that transformers reads") from error
    for part in [] if trust else _parts(config):
        vars(part).pop("auto_map", None)
    return config


def read_tokenizer(folder: Path, key: str, *, trust: bool = False) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a local folder; arguments and errors as for `read_config`."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust
        )
    except Exception as error:
        raise _refused(error, folder, key, "a tokenizer that loads") from error
    model: Any = getattr(getattr(found, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        _say_dropout(folder)
        model.dropout = None
    return found


@cache
def _say_dropout(folder: Path) -> None:
    what = "tokenizer.json drops merges at random (model.dropout); it is off here"
    logger.warning("%s: %s, so that a text has the same tokens every time", folder, what)


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Size of a vocabulary with all ids of a tokenizer, which may leave out numbers."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def start_of(tokenizer: Any) -> tuple[int, ...]:
    """Tokens with which a tokenizer begins every text, as those of Llama and Gemma do."""
    bare, whole = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
    places = range(len(whole) - len(bare) + 1)
    return tuple(whole[: next((at for at in places if whole[at : at + len(bare)] == bare), 0)])


def lacking(folder: str | Path, missing: list[str]) -> ConfigError:
    """The error for a folder without some of a model's parameters."""
    return ConfigError(
        f"weights: expected every parameter of config.json in '{folder}'; its files lack "
        f"{some(missing)}. Copy or download the folder again, or correct its config.json."
    )


def read_model(folder: Path, config: PretrainedConfig, **settings: Any) -> nn.Module:
    """Loads a causal language model with the weights of a local folder.

    Raises:
        ConfigError: The files lack parameters of the model, or have codes that transformers
            would take for numbers.
    """
    from transformers import AutoModelForCausalLM

    from fullshard.engine.folder import INDEX, ONE_FILE, FolderWeights

    for file in folder.glob("*.safetensors"):
        os.close(open_regular(file))  # transformers says of an unreadable file that there is none
    trust = _is_trusted(config)
    settings |= {"local_files_only": True, "trust_remote_code": trust, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, **settings)
    model, info = loaded
    missing = sorted({name for name, _ in model.named_parameters()} & set(info["missing_keys"]))
    if missing:
        raise lacking(folder, missing)
    has_headers = any((folder / name).is_file() for name in (ONE_FILE, INDEX))
    if has_headers and not getattr(config, "quantization_config", None):
        names = (name for name, _ in model.named_parameters())
        FolderWeights(folder, getattr(model, "base_model_prefix", "")).check_numbers(names)
    if unused := sorted(info["unexpected_keys"]):
        logger.warning("%s has weights that its config.json does not: %s", folder, some(unused))
    return model


def build(config: PretrainedConfig, **settings: Any) -> nn.Module:
    """Builds a causal language model on torch's default device."""
    from transformers import AutoModelForCausalLM

    trust = _is_trusted(config)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust, **settings)


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """Builds a causal language model on meta, without storage.

    Raises:
        ConfigError: transformers cannot build a causal model from these values.
    """
    import torch

    try:
        with torch.device("meta"):
            model: Any = build(config, dtype=dtype or torch.float32)
    except Exception as error:
        if isinstance(error, ConfigError) or ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"model: expected a configuration of a causal language model, got one of type "
            f"'{config.model_type}' from which transformers cannot build a model "
            f"({type(error).__name__}: {last_line(error)}). Correct model.config or config.json."
        ) from error
    asked = inspect.unwrap(type(model).__init__).__code__.co_names
    if "is_decoder" in asked and not model.config.is_decoder:  # transformers only warns
        raise ConfigError(
            f"model.config.is_decoder: expected true, got false, with which '{config.model_type}' "
            "reads the tokens that it predicts. Set it to true, in config.json for a folder."
        )
    return model


def import_code(config: PretrainedConfig) -> None:
    """Imports the model class that `build` needs, from transformers or from an allowed folder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        build_on_meta(config)


def some(names: list[str]) -> str:
    """Formats the first few names and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def last_line(error: Exception) -> str:
    """The last line of a validation error, which states the problem."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _is_trusted(config: PretrainedConfig) -> bool:
    """Whether code of the configuration's folder is allowed, or has already run.

    Raises:
        ConfigError: The attention implementation is code from a hub.
    """
    for part in _parts(config):
        kernel = getattr(part, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            raise ConfigError(
                f"model.config.attn_implementation: expected sdpa, eager or another that is "
                f"installed, got '{kernel}', whose code would be downloaded from a hub and run. "
                "Remove _attn_implementation from config.json, or choose another."
            )
    return hasattr(config, "auto_map") or type(config).__module__.startswith("transformers_modules")


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and its nested configurations."""
    from transformers import PretrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _refused(error: Exception, folder: Path, key: str, expected: str) -> ConfigError:
    if TRUST in str(error):
        owner = "teacher" if key.startswith("teacher") else "model"
        flag = "--trust-remote-code" if key == "FOLDER" else f"{owner}.{TRUST}=true"
        return ConfigError(
            f"{key}: expected a model and tokenizer that transformers implements, got '{folder}', "
            "which contains Python code (auto_map). The code was not run. Read it, then allow it "
            f"with {flag}."
        )
    return ConfigError(
        f"{key}: expected {expected}, got '{folder}', which transformers refuses "
        f"({type(error).__name__}: {last_line(error)}). Correct the folder's files."
    )
