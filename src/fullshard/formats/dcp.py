"""Reads folders of torch.distributed.checkpoint without torch's reader; writes with its writer.

`.metadata` is a pickle, read with a list of the classes that it may name. Each chunk of a tensor is
a torch.save file inside a .distcp file.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from fullshard.checkpoint.format import natural
from fullshard.config.regular_files import open_regular
from fullshard.errors import CheckpointError
from fullshard.formats.source import Entry, Source, check_empty, whole_or_nothing
from fullshard.formats.state_dicts import (
    WRAPPERS,
    Chunk,
    attributes_of,
    joined,
    optimizer_of,
    read_listed,
    read_pickle,
)

METADATA = ".metadata"
_HOME = "torch.distributed.checkpoint"
_CLASSES = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")
_CLASSES += ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")
RECORDS = [
    *(f"{_HOME}.metadata.{name}" for name in _CLASSES),
    f"{_HOME}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "_local.PosixPath")),
]
PLAIN = [
    "torch.Size",
    "torch.device",
    "collections.OrderedDict",
    *(f"torch.{dtype}" for dtype in dir(torch) if isinstance(getattr(torch, dtype), torch.dtype)),
]
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict")


def open_dcp(folder: Path) -> Source:
    """Opens the model's tensors in a folder, and the optimizer's if present.

    Raises:
        CheckpointError: The folder is damaged, or contains no model.
    """
    values = _Folder(folder).values()
    model = {path: value for path, value in values.items() if not _in_optimizer(path)}
    left: list[str] = []
    while pairs := {path[:2] for path in model if len(path) > 1}:
        heads = {head for head, _ in pairs}
        of_model = next((head for head in WRAPPERS if head in heads), None)
        if of_model is None and len(heads) == 1 and {key for _, key in pairs} & {*WRAPPERS}:
            of_model = heads.pop()
        if of_model is None:
            break
        beside = dict.fromkeys(path[0] for path in model if path[0] != of_model)
        left += [f"{name}, beside the model" for name in beside]
        model = {path[1:]: value for path, value in model.items() if path[0] == of_model}
    named = {".".join(map(str, path)): value for path, value in model.items()}
    tensors = {name: value for name, value in named.items() if isinstance(value, Entry)}
    if not tensors:
        raise CheckpointError(f"'{folder}': expected a model's tensors; got none. Pass its folder.")
    left += [f"{name}, which is no tensor" for name in named if name not in tensors]
    at = ((path, _in_optimizer(path)) for path in values)
    states = {path[begin:]: values[path] for path, begin in at if begin}
    optimizer = _optimizer(states, tensors)
    if states and optimizer is None:
        left.append("the optimizer's states")
    what = "a folder of torch.distributed.checkpoint"
    return Source(what, tensors, optimizer=optimizer, left_out=tuple(left))


def optimizer_folder(folder: Path, tensors: Mapping[str, Entry]) -> Any:
    """Accelerate's separate folder of optimizer states."""
    states = {path[1:]: value for path, value in _Folder(folder).values().items()}
    return _optimizer(states, tensors)


class _Folder:
    """The metadata of a folder, and its chunks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = attributes_of(read_listed(folder / METADATA, RECORDS, PLAIN))
        self._where: dict[tuple[Any, ...], Any] = {}
        for index, info in self._table["storage_data"].items():
            facts = attributes_of(index)
            self._where[_place(facts["fqn"], facts.get("offset"))] = attributes_of(info)

    def values(self) -> dict[tuple[Any, ...], Any]:
        """All values by path in the nested state dict: Entries, or contents of small files."""
        paths = self._table.get("planner_data") or {}
        found: dict[tuple[Any, ...], Any] = {}
        for name, facts in self._table["state_dict_metadata"].items():
            path = tuple(paths.get(name) or (name,))
            if type(facts).__name__ == "TensorStorageMetadata":
                found[path] = self._entry(name, attributes_of(facts))
            elif _in_optimizer(path):
                found[path] = self._read(_place(name, None))
            else:
                found[path] = None
        return found

    def _entry(self, name: str, facts: Mapping[str, Any]) -> Entry:
        chunks: list[Chunk] = []
        for chunk in map(attributes_of, facts["chunks"]):
            read = partial(self._read, _place(name, chunk["offsets"]))
            chunks.append(Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), read))
        properties = facts["properties"]  # their state is a tuple whose first item is the dtype
        return joined(name, properties.state[0], tuple(facts["size"]), chunks)

    def _read(self, place: tuple[Any, ...]) -> Any:
        """Reads the torch.save file of a chunk."""
        where = self._where[place]
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"'{self._folder}': expected plain chunks; {place[0]} was written through "
                f"{where['transform_descriptors']}. Save it without extensions."
            )
        path = self._folder / Path(where["relative_path"]).name
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(natural(where["offset"]))
            data = io.BytesIO(file.read(natural(where["length"])))
        return read_pickle(data, f"{path} ({place[0]})")


def _in_optimizer(path: tuple[Any, ...]) -> int:
    """Returns the index at which the path within an optimizer's states begins; 0 if none does."""
    return next((at for at, key in enumerate(path[:2], 1) if key in _OPTIMIZERS), 0)


def _place(name: str, offset: Any) -> tuple[Any, ...]:
    """The key of a chunk."""
    return (name, None if offset is None else tuple(offset))


def _optimizer(values: Mapping[tuple[Any, ...], Any], tensors: Mapping[str, Entry]) -> Any:
    """Converts {"state": {parameter: {...}}, "param_groups": [{...}]}; None for another form."""
    states: dict[str, dict[str, Any]] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for path, value in values.items():
        match path:
            case ("state", param, state):
                states.setdefault(str(param), {})[str(state)] = value
            case ("param_groups", number, setting):
                groups.setdefault(number, {})[str(setting)] = value
            case ("param_groups",) if isinstance(value, list):
                groups = dict(enumerate(value))
            case _:
                return None
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return optimizer_of(states, [groups[number] for number in sorted(groups)], shapes)


class _Streamed(DefaultSavePlanner):
    """A planner that uses tensors without storage and reads each when it is written."""

    def __init__(self, entries: Mapping[str, Entry], on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._entries = entries
        self._on_bytes = on_bytes

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor itself."""
        entry = self._entries.get(index.fqn)
        if entry is None:
            return super().lookup_object(index)
        self._on_bytes(entry.num_bytes)
        return entry.read()


def write_dcp(
    source: Source, folder: Path, dtype: torch.dtype | None, on_bytes: Callable[[int], None]
) -> list[str]:
    """Writes {"model": tensors, "optimizer": {"state", "param_groups"}} for torch's dcp.load.

    Args:
        source: Source to write; tied parameters are written under each name, as torch does.
        folder: New or empty folder.
        dtype: Dtype of the model's floating-point tensors; None keeps each tensor's own.
        on_bytes: Called with the number of bytes after each write.

    Returns:
        Descriptions of omitted content.

    Raises:
        CheckpointError: The folder is not empty, or cannot be written.
    """
    check_empty(folder, "export")
    model = {name: entry.cast(dtype) for name, entry in source.tensors.items()}
    model |= {name: model[first] for name, first in source.tied.items()}
    entries = {f"model.{name}": entry for name, entry in model.items()}
    state: dict[str, Any] = {
        "model": {name: entry.without_storage() for name, entry in model.items()}
    }
    left = list(source.left_out)
    optimizer = source.optimizer
    if optimizer is not None:
        states = {param: dict(values) for param, values in optimizer.scalars.items()}
        for (param, name), entry in optimizer.tensors.items():
            states.setdefault(param, {})[name] = entry.without_storage()
            entries[f"optimizer.state.{param}.{name}"] = entry
        state["optimizer"] = {"state": states, "param_groups": optimizer.groups}
        left += optimizer.own
    with whole_or_nothing(folder) as aside, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming ... a single process": intended
        # One file per tensor, because torch's writer keeps all tensors of a file in memory.
        writer = FileSystemWriter(aside, single_file_per_rank=False)
        try:
            save(state, storage_writer=writer, planner=_Streamed(entries, on_bytes), no_dist=True)
        except CheckpointException as error:  # torch's type is no Exception and hides a full disk
            cause = next(iter(error.failures.values()))[0]
            hidden = cause.__context__  # torch closes its file, and fails again
            raise (hidden if isinstance(hidden, OSError) else cause) from error
        source.check()
    return left
