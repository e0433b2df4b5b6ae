"""A source as a Hugging Face folder that `from_pretrained` opens.

    tensors by the model's names ---> by the names of files ---> model-00001-of-00003.safetensors
                                      (experts one by one)      model.safetensors.index.json

transformers says what a file names things, asked of a model without storage. Files are written one
tensor at a time, in a folder aside that gets its name when it is whole.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files import write_tensors, write_text
from fullshard.config.values import nearest
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.engine.hugging_face import build_on_meta, read_config
from fullshard.errors import CheckpointError, ConfigError, untrusted
from fullshard.formats.ours import piece_of
from fullshard.formats.place import check_empty, whole_or_nothing
from fullshard.formats.source import Entry, Source

CONFIG, GENERATION = "config.json", "generation_config.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class ExportSettings:
    """How a folder is written.

    Attributes:
        dtype: Dtype of floating point tensors; None: as they are.
        max_shard_bytes: Largest file, unless one tensor is larger.
        on_bytes: Hears how many bytes were written.
        writes: Whether this process writes the file of that number; of the others it reads the
            tensors all the same, because reading may be a collective.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 * 10**9
    on_bytes: Callable[[int], None] = lambda _count: None
    writes: Callable[[int], bool] = lambda _file: True


def parse_size(text: str) -> int:
    """Bytes of "5GB" (as Hugging Face: 5e9), "500MiB", "1000".

    Raises:
        ConfigError: It is no size.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size: expected a size such as 5GB or 500MiB; got '{text}'.")
    return size


def export_folder(source: Source, folder: Path, settings: ExportSettings) -> list[str]:
    """Write weights, configuration and tokenizer; returns notes on what was left out.

    Raises:
        CheckpointError: The source has no config.json, its tensors are not those of that model, or
            the folder cannot be written.
    """
    if CONFIG not in source.companions:
        raise CheckpointError(
            f"export: expected {source.what} with {CONFIG}, which says what model this is; it has "
            "none. Name a folder that has it: --config FOLDER."
        )
    check_empty(folder, "export")
    with whole_or_nothing(folder) as aside:
        for name, data in source.companions.items():
            (aside / name).write_bytes(data)
        notes = write_model(source, aside, settings)
    return [*source.left_out, *notes]


def write_model(source: Source, folder: Path, settings: ExportSettings) -> list[str]:
    """Write weights into a folder that has config.json, which is told their dtype."""
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
    """The model's tensors under the names that files have, and what the source has beside them.

    Raises:
        CheckpointError: One is missing, or of another shape.
    """
    named, left = _as_the_model_has(source, shell)
    return converted(shell, named), left


def model_of(folder: Path) -> nn.Module | None:
    """The model of a folder's config.json without storage; None where transformers has none."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        config = read_config(folder, CONFIG)
        names = getattr(config, "architectures", None) or [""]
        kind: Any = getattr(transformers, str(names[0]), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            with torch.device("meta"):
                return kind(config)
        return build_on_meta(config)
    except ConfigError:
        return None


def converted(shell: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries under the names that files of such a model have: transformers 5 joins experts.

    Each is converted alone; where a conversion needs several at once the model's own names stay,
    which `from_pretrained` reads too.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: files have the model's names
        return dict(entries)
    shapes = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in entries.items()
    }
    model: Any = shell
    together = revert_weight_conversion(model, dict(shapes))
    if together.keys() == entries.keys():
        return dict(entries)
    found: dict[str, Entry] = {}
    for name, shape in shapes.items():
        parts = revert_weight_conversion(model, {name: shape})
        once = _Once(
            lambda name=name: revert_weight_conversion(model, {name: entries[name].read()})
        )
        for part, value in parts.items():
            found[part] = Entry(value.dtype, tuple(value.shape), partial(once.read, part))
    return found if found.keys() == together.keys() else dict(entries)


class _Once:
    """What one tensor becomes, kept until all of its parts were read."""

    def __init__(self, convert: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._convert = convert
        self._parts: dict[str, torch.Tensor] = {}

    def read(self, part: str) -> torch.Tensor:
        """One of the parts; reading it again converts anew."""
        if part not in self._parts:
            self._parts = self._convert()
        return self._parts.pop(part)


def write_weights(
    entries: Mapping[str, Entry], folder: Path, settings: ExportSettings
) -> list[str]:
    """Write tensors into as many files as the cap asks for; returns those written here.

    Raises:
        OSError: The disk is full; raised once every tensor was read, for the other ranks' sake.
    """
    files = split(entries, settings.max_shard_bytes)
    written: list[str] = []
    problem: OSError | None = None
    for at, (file, names) in enumerate(files.items()):
        unread = list(names)
        if settings.writes(at) and problem is None:
            pieces = [
                piece_of(f"model/{name}", _once_read(entries[name], unread), settings.on_bytes)
                for name in names
            ]
            try:
                write_tensors(folder / file, pieces, 0)
                written.append(file)
            except OSError as error:
                problem = error
        for name in unread:
            entries[name].read()
    if problem is not None:
        raise problem
    if settings.writes(0) and list(files) != [ONE_FILE]:
        where = {name: file for file, names in files.items() for name in names}
        total = sum(entry.num_bytes for entry in entries.values())
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(folder / INDEX, json.dumps(table, indent=2) + "\n")
    return written


def _once_read(entry: Entry, unread: list[str]) -> Entry:
    """An entry that takes the first name off a list when it is read: files are written in order."""

    def read() -> torch.Tensor:
        unread.pop(0)
        return entry.read()

    return replace(entry, load=read)


def split(entries: Mapping[str, Entry], max_bytes: int) -> dict[str, list[str]]:
    """Names of tensors by file, in their order."""
    parts: list[list[str]] = [[]]
    size = 0
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
    """The model's tensors, tied ones once, and what the source has beside them.

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
            close = nearest(name, list(source.tensors))
            got = entry.shape if entry else f"none{f', but {close}' if close else ''}"
            raise CheckpointError(
                f"export: expected {name} of shape {tuple(value.shape)}, as the model of "
                f"{CONFIG} has it; {source.what} has {got}. Name the folder with the right "
                "configuration: --config FOLDER."
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
    left = [f"{name}, which the model has not" for name in source.tensors if name not in every]
    return found, left


def complete_config(folder: Path, shell: nn.Module | None, named: Mapping[str, Entry]) -> None:
    """config.json says the dtype that a reader loads in: the one that the weights have."""
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
