"""Writing the trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

import fullshard as fs
from fullshard.train.model import build_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    model: nn.Module,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rank: int,
) -> None:
    """Writes configuration, weights, tokenizer and generation settings; all ranks call it.

    The weights are streamed to rank 0, which alone writes. transformers does the writing, from a
    model of the same class without storage, so that tied weights and large files are its affair.

    Args:
        model: Sharded.
        config: Its configuration.
        tokenizer: Of the run.
        folder: Where; made if missing.
        rank: This rank.
    """
    state = fs.full_state_dict(model, rank0_only=True)
    if rank != 0:
        return
    # config.json names the dtype that a reader loads the weights in: the one that they have.
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    shell = cast("PreTrainedModel", build_on_meta(config, dtype))
    for name in _tied_names(shell):
        state.pop(name, None)
    shell.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


def _tied_names(shell: nn.Module) -> list[str]:
    """Further names of tied parameters, which a file must not hold twice."""
    first_names = {name for name, _ in shell.named_parameters()}
    every_name = [name for name, _ in shell.named_parameters(remove_duplicate=False)]
    return [name for name in every_name if name not in first_names]
