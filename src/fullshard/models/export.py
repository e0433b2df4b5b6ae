"""Exporting the trained model as a Hugging Face folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from fullshard.checkpoint.commit import Place
from fullshard.config.schema import LoraConfig
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.hugging_face import build_on_meta
from fullshard.formats.export import export_together, live_source
from fullshard.formats.source import whole_or_nothing
from fullshard.models.lora import adapters_of, merged, save_adapters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fullshard.formats.source import Source

MAX_FILE_BYTES = 5 * 10**9
IN_RUN = "0"  # token of folders that only the run itself writes


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
    aside = Place(folder, IN_RUN).aside
    with ExitStack() as writing:

        def begin() -> None:
            if engine.rank == 0:
                writing.enter_context(whole_or_nothing(folder, IN_RUN))
                shell.config.save_pretrained(aside)
                tokenizer.save_pretrained(aside)

        engine.agree(begin)
        written = export_together(engine, source, shell, aside, max_file_bytes)
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
) -> None:
    """Writes the same folder from full weights in one process, through transformers.

    Args:
        state: Full weights by the model's names.
        config: Configuration of the model.
        tokenizer: Tokenizer of the run.
        folder: Folder to write; an existing one is replaced as a whole.
    """
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    shell = cast("PreTrainedModel", build_on_meta(config, dtype))
    first_names = {name for name, _ in shell.named_parameters()}
    every_name = (name for name, _ in shell.named_parameters(remove_duplicate=False))
    tied = {name for name in every_name if name not in first_names}  # written once
    with whole_or_nothing(folder, IN_RUN) as aside:
        shell.save_pretrained(aside, state_dict={n: v for n, v in state.items() if n not in tied})
        tokenizer.save_pretrained(aside)
