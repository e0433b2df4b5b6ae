"""From any source to a folder of another format: what `ckpt export` does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch

from fullshard.config.values import DType, parse
from fullshard.errors import ConfigError
from fullshard.formats.dcp import write_dcp
from fullshard.formats.detect import open_source
from fullshard.formats.hugging_face import companions_of
from fullshard.formats.source import Source
from fullshard.formats.to_hugging_face import ExportSettings, export_folder, parse_size
from fullshard.transport.base import torch_dtype


class Format(StrEnum):
    """What an export is for."""

    HUGGING_FACE = "hf"
    DCP = "dcp"


@dataclass(frozen=True)
class Wanted:
    """What an export shall be.

    Attributes:
        format: Format of the folder.
        dtype: Dtype of floating point tensors; None: as they are.
        max_shard_bytes: Largest file.
    """

    format: Format
    dtype: torch.dtype | None
    max_shard_bytes: int

    @classmethod
    def of(cls, format_: str, dtype: str | None, max_shard_size: str) -> Wanted:
        """Read the words of a command line.

        Raises:
            ConfigError: One of them is not known.
        """
        known = None if dtype is None else torch_dtype(parse(DType, dtype, "--dtype"))
        if format_ not in list(Format):
            raise ConfigError(f"--format: expected {' or '.join(Format)}; got '{format_}'.")
        return cls(Format(format_), known, parse_size(max_shard_size))


@contextmanager
def opened(path: Path, config: Path | None) -> Generator[Source]:
    """Whatever lies at a path, with the configuration that shall go along.

    Args:
        path: Path of a checkpoint of any tool.
        config: Folder with config.json and tokenizer; None: those that lie with it.

    Raises:
        ConfigError: `config` has no config.json.
        CheckpointError: The path is nothing that is known.
    """
    if config is not None and not (config / "config.json").is_file():
        raise ConfigError(f"--config: expected a folder with config.json; got '{config}'.")
    with open_source(path) as source:
        yield source if config is None else replace(source, companions=companions_of(config))


def export(
    source: Source, folder: Path, wanted: Wanted, on_bytes: Callable[[int], None]
) -> list[str]:
    """Write a folder; returns what was left out."""
    if wanted.format is Format.DCP:
        return write_dcp(source, folder, wanted.dtype, on_bytes)
    settings = ExportSettings(wanted.dtype, wanted.max_shard_bytes, on_bytes)
    return export_folder(source, folder, settings)
