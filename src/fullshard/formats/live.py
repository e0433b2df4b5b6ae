"""A sharded model as a source: what is read is gathered, by all ranks in one order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard.checkpoint.files import sync_folder
from fullshard.engine.agreement import agree, tell
from fullshard.engine.engine import Engine
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import tied_names
from fullshard.formats.source import Entry, Source
from fullshard.formats.to_hugging_face import (
    ExportSettings,
    as_files_have,
    complete_config,
    write_weights,
)


def live_source(model: nn.Module) -> Source:
    """What a sharded model holds. Reading an entry is a collective."""
    tied = tied_names(model)
    return Source(
        what="this model",
        tensors={
            name: _entry(value)
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in tied and isinstance(value, torch.Tensor)
        },
        tied=tied,
    )


def _entry(value: torch.Tensor) -> Entry:
    if not isinstance(value, ShardedParameter):
        return Entry(value.dtype, tuple(value.shape), lambda: value.detach().cpu())
    return Entry(value.dtype, tuple(value.record.piece.shape), partial(_gathered, value))


def _gathered(param: ShardedParameter) -> torch.Tensor:
    with torch.no_grad():
        return param.full_tensor().detach().cpu()


def export_together(
    engine: Engine, source: Source, shell: nn.Module, folder: Path, max_shard_bytes: int
) -> list[str]:
    """Write a live source's weights; the ranks that see the folder take turns, a file each.

    No rank holds more than one whole tensor. A collective.

    Args:
        engine: Engine of the model.
        source: What it holds.
        shell: A model of these tensors without storage.
        folder: Has config.json, where this rank sees it.
        max_shard_bytes: Largest file, unless one tensor is larger.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: On every rank, if any could not write.
    """
    named, _ = as_files_have(source, shell)
    sees = tell(engine, folder.is_dir())
    writers = [rank for rank, there in enumerate(sees) if there]
    settings = ExportSettings(
        max_shard_bytes=max_shard_bytes,
        writes=lambda file: writers[file % len(writers)] == engine.rank,
    )
    written = agree(engine, partial(write_weights, named, folder, settings))

    def complete() -> None:
        if engine.rank == writers[0]:
            complete_config(folder, shell, named)
            sync_folder(folder)

    agree(engine, complete)
    return written
