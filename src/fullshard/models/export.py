"""Exporting the trained model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from fullshard.config.schema import LoraConfig
from fullshard.engine.agreement import agree
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.hugging_face import build_on_meta
from fullshard.formats.export import export_together, live_source
from fullshard.models.lora import adapters_of, merged, save_adapters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fullshard.formats.source import Source

MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Adapters:
    """Adapters of a run.

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
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Writes configuration, weights, tokenizer and generation settings. A collective.

    Weights are gathered tensor by tensor. The ranks take turns in writing files.

    Args:
        model: The sharded model.
        config: Configuration of the model.
        tokenizer: Tokenizer of the run.
        folder: Folder to write; an existing one is replaced as a whole.
        adapters: Adapters to save on their own and to merge into the weights.
        max_file_bytes: Largest size of a weight file, unless one tensor is larger.

    Returns:
        Names of the weight files that this rank wrote.
    """
    engine = engine_of(model)
    source = live_source(model)
    if adapters is not None:
        _save_adapters(engine, source, adapters)
        source = merged(source, adapters.lora)
    # config.json names the dtype of the weights, in which readers load them.
    shell = cast("PreTrainedModel", build_on_meta(config, next(model.parameters()).dtype))
    aside, old = (folder.with_name(f".{folder.name}.{what}") for what in ("new", "old"))

    def begin() -> None:
        if engine.rank == 0:
            for left in (aside, old):
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
            shell.config.save_pretrained(aside)
            tokenizer.save_pretrained(aside)

    def put_in_place() -> None:
        if engine.rank == 0:
            if folder.exists():  # the run was continued
                folder.rename(old)
            aside.rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    agree(engine, begin)
    written = export_together(engine, source, shell, aside, max_file_bytes)
    agree(engine, put_in_place)
    return written


def _save_adapters(engine: Engine, source: Source, adapters: Adapters) -> None:
    values = {name: entry.read() for name, entry in adapters_of(source).items()}

    def write() -> None:
        if engine.rank == 0:
            save_adapters(values, adapters.lora, adapters.base, adapters.folder)

    agree(engine, write)


def write_folder(
    state: dict[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Writes the same folder from full weights in one process, through transformers.

    Args:
        state: Full weights by the model's names.
        config: Configuration of the model.
        tokenizer: Tokenizer of the run.
        folder: Folder to write.
    """
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    shell = cast("PreTrainedModel", build_on_meta(config, dtype))
    first_names = {name for name, _ in shell.named_parameters()}
    every_name = (name for name, _ in shell.named_parameters(remove_duplicate=False))
    tied = {name for name in every_name if name not in first_names}  # written once
    shell.save_pretrained(folder, state_dict={n: v for n, v in state.items() if n not in tied})
    tokenizer.save_pretrained(folder)
