"""Exports a source, or a sharded model, as a Hugging Face folder that `from_pretrained` opens.

    tensors by the model's names ---> by the names of files ---> model-00001-of-00003.safetensors
                                      (experts one by one)      model.safetensors.index.json

transformers gives the names in files, from a model without storage. Files are written one tensor at
a time, in a temporary folder that is renamed once it is complete.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files import sync_folder, write_tensors, write_text
from fullshard.config.values import DType, nearest, parse
from fullshard.engine.engine import Engine
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import tied_names
from fullshard.errors import CheckpointError, ConfigError, untrusted
from fullshard.formats.detect import open_source
from fullshard.formats.hugging_face import (
    CONFIG,
    by_file_names,
    by_model_names,
    companions_of,
    model_of,
)
from fullshard.formats.ours import piece_of
from fullshard.formats.source import Entry, Source, check_empty, whole_or_nothing
from fullshard.transport.base import torch_dtype

GENERATION = "generation_config.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Format(StrEnum):
    """Format of an exported folder."""

    HUGGING_FACE = "hf"
    DCP = "dcp"


@dataclass(frozen=True)
class ExportSettings:
    """How a folder is written.

    Attributes:
        dtype: Dtype of floating point tensors; None keeps each tensor's own.
        max_shard_bytes: Maximum size of a file with more than one tensor.
        on_bytes: Called with the number of bytes after each write.
        writes: Whether this process writes the file of this number. It reads the tensors of the
            other files too, because reading may be a collective.
        format: Format of the folder.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 * 10**9
    on_bytes: Callable[[int], None] = lambda _count: None
    writes: Callable[[int], bool] = lambda _file: True
    format: Format = Format.HUGGING_FACE

    @classmethod
    def of(cls, format_: str, dtype: str | None, max_shard_size: str) -> ExportSettings:
        """Parses the options of `ckpt export`.

        Raises:
            ConfigError: An option is unknown.
        """
        known = None if dtype is None else torch_dtype(parse(DType, dtype, "--dtype"))
        if format_ not in list(Format):
            raise ConfigError(f"--format: expected {' or '.join(Format)}; got '{format_}'.")
        return cls(known, parse_size(max_shard_size), format=Format(format_))


def parse_size(text: str) -> int:
    """Parses "5GB" (5e9 bytes, as in Hugging Face), "500MiB" or "1000".

    Raises:
        ConfigError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size: expected a size such as 5GB or 500MiB; got '{text}'.")
    return size


def export_folder(source: Source, folder: Path, settings: ExportSettings) -> list[str]:
    """Write a source as a folder; return notes on contents that were left out.

    Raises:
        CheckpointError: The source has no config.json, its tensors differ from that model's, or the
            folder cannot be written.
    """
    if settings.format is Format.DCP:
        from fullshard.formats.dcp import write_dcp  # the import takes half a second

        return write_dcp(source, folder, settings.dtype, settings.on_bytes)
    if CONFIG not in source.companions:
        raise CheckpointError(
            f"export: expected {source.what} with {CONFIG}, which describes the model; it has "
            "none. Pass a folder with one: --config FOLDER."
        )
    check_empty(folder, "export")
    with whole_or_nothing(folder) as aside:
        for name, data in source.companions.items():
            (aside / name).write_bytes(data)
        notes = write_model(source, aside, settings)
        source.check()
    return [*source.left_out, *notes]


def write_model(source: Source, folder: Path, settings: ExportSettings) -> list[str]:
    """Writes weights into a folder with config.json, and sets their dtype there."""
    with untrusted(folder / CONFIG, "the configuration of a model"):
        shell = model_of(folder)
        if shell is None:
            named = dict(source.tensors)
            left = ["transformers does not know this model: tensors keep their names"]
        else:
            named, left = as_files_have(source, shell)
    named = {name: entry.cast(settings.dtype) for name, entry in named.items()}
    complete_config(folder, shell, named)
    write_weights(named, folder, settings)
    return left


def as_files_have(source: Source, shell: nn.Module) -> tuple[dict[str, Entry], list[str]]:
    """The model's tensors under their names in files, and a list of what else the source contains.

    Raises:
        CheckpointError: A tensor is missing, or has another shape.
    """
    named, left = _as_the_model_has(by_model_names(shell, source), shell)
    return by_file_names(shell, named), left


def write_weights(
    entries: Mapping[str, Entry], folder: Path, settings: ExportSettings
) -> list[str]:
    """Writes tensors into files of limited size; returns the files written by this process.

    Raises:
        OSError: The disk is full; raised after every tensor was read, which is a collective.
    """
    files = split(entries, settings.max_shard_bytes)
    written: list[str] = []
    problem: OSError | None = None
    for at, (file, names) in enumerate(files.items()):
        reads = (entries[name].read() for name in names)  # files are written in order
        if settings.writes(at) and problem is None:
            load = partial(next, reads)
            pieces = [
                piece_of(f"model/{name}", replace(entries[name], load=load), settings.on_bytes)
                for name in names
            ]
            try:
                write_tensors(folder / file, pieces, 0)
                written.append(file)
            except OSError as error:
                problem = error
        deque(reads, maxlen=0)
    if problem is not None:
        raise problem
    if settings.writes(0) and list(files) != [ONE_FILE]:
        where = {name: file for file, names in files.items() for name in names}
        total = sum(entry.num_bytes for entry in entries.values())
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(folder / INDEX, json.dumps(table, indent=2) + "\n")
    return written


def split(entries: Mapping[str, Entry], max_bytes: int) -> dict[str, list[str]]:
    """Names of tensors by file, in their order."""
    parts, size = [list[str]()], 0
    for name, entry in entries.items():
        if parts[-1] and size + entry.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += entry.num_bytes
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    count = len(parts)
    return {f"model-{at:05d}-of-{count:05d}.safetensors": part for at, part in enumerate(parts, 1)}


def _as_the_model_has(source: Source, shell: nn.Module) -> tuple[dict[str, Entry], list[str]]:
    """The model's tensors, tied ones once, and the source's other contents.

    Raises:
        CheckpointError: One is missing or has another shape; the configuration is of another model.
    """
    first = {id(param): name for name, param in reversed(list(shell.named_parameters()))}
    ignored: Iterable[str] = getattr(shell, "_keys_to_ignore_on_save", None) or ()
    found: dict[str, Entry] = {}
    for name, value in shell.state_dict(keep_vars=True).items():
        if first.get(id(value), name) != name or name in ignored:
            continue
        entry = source.tensors.get(name) or source.tensors.get(source.tied.get(name, name))
        if entry is None or entry.shape != tuple(value.shape):
            close = nearest(name, sorted({*source.tensors} - {*shell.state_dict()}))
            got = entry.shape if entry else f"none{f', but {close}' if close else ''}"
            raise CheckpointError(
                f"export: expected {name} of shape {tuple(value.shape)}, as the model of {CONFIG} "
                f"has it; {source.what} has {got}. Copy all files of the model, or pass the folder "
                "with its configuration: --config FOLDER."
            )
        found[name] = entry
    every = set(found)
    for name, param in shell.named_parameters(remove_duplicate=False):
        every.add(name)
        twin, own = source.tensors.get(name), found.get(first[id(param)])
        if twin and own and twin is not own and not torch.equal(twin.read(), own.read()):
            raise CheckpointError(
                f"export: expected {name} to equal {first[id(param)]}, to which the model of "
                f"{CONFIG} ties it; they differ. Correct tie_word_embeddings there."
            )
    left = [f"{name}, which is not in the model" for name in source.tensors if name not in every]
    return found, left


def complete_config(folder: Path, shell: nn.Module | None, named: Mapping[str, Entry]) -> None:
    """Sets the dtype in config.json to that of the weights, because readers load in that dtype."""
    with untrusted(folder / CONFIG, "the configuration of a model"):
        config: dict[str, Any] = dict(json.loads((folder / CONFIG).read_bytes()))
    dtypes = [entry.dtype for entry in named.values() if entry.dtype.is_floating_point]
    if dtypes:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtypes[0]).removeprefix("torch.")
    if shell is not None:
        config["architectures"] = [type(shell).__name__]
        settings: Any = getattr(shell, "generation_config", None)
        if settings is not None and not (folder / GENERATION).is_file():
            settings.save_pretrained(folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def live_source(model: nn.Module) -> Source:
    """The tensors of a sharded model. Reading an entry is a collective."""
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
    return Entry(value.dtype, tuple(value.record.shape), partial(_gathered, value))


def _gathered(param: ShardedParameter) -> torch.Tensor:
    with torch.no_grad():
        return param.full_tensor().detach().cpu()


def export_together(
    engine: Engine, source: Source, shell: nn.Module, folder: Path, max_shard_bytes: int
) -> list[str]:
    """Writes the weights of a sharded model; the ranks that see the folder write files in turn.

    Each rank stores at most one full tensor. A collective.

    Args:
        engine: Engine of the model.
        source: Its tensors.
        shell: The model without storage.
        folder: Folder with config.json, if this rank can access it.
        max_shard_bytes: Maximum size of a file with more than one tensor.

    Returns:
        The files that this rank wrote.

    Raises:
        CheckpointError: On every rank, if one cannot write.
    """
    named, _ = as_files_have(source, shell)
    sees = engine.all_values(folder.is_dir())
    writers = [rank for rank, there in enumerate(sees) if there]
    settings = ExportSettings(
        max_shard_bytes=max_shard_bytes,
        writes=lambda file: writers[file % len(writers)] == engine.rank,
    )
    written = engine.agree(partial(write_weights, named, folder, settings))

    def complete() -> None:
        if engine.rank == writers[0]:
            complete_config(folder, shell, named)
            sync_folder(folder)

    engine.agree(complete)
    return written


@contextmanager
def opened(path: Path, config: Path | None) -> Generator[Source]:
    """Opens a path of any known format, with the configuration to export.

    Args:
        path: Path of a checkpoint of any tool.
        config: Folder with config.json and tokenizer; None: those of the path itself.

    Raises:
        ConfigError: `config` has no config.json.
        CheckpointError: The format of the path is unknown.
    """
    if config is not None and not (config / "config.json").is_file():
        raise ConfigError(f"--config: expected a folder with config.json; got '{config}'.")
    with open_source(path) as source:
        yield source if config is None else replace(source, companions=companions_of(config))
