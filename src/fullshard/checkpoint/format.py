"""The files of a checkpoint.

    step-00000100/
      COMPLETE.json             step, every file's size and checksum; written last
      files-3f2a.../            in an object store: all other files, which are never renamed
      index.json                every tensor: dtype, global shape, its slices and their files
      state.json                step and values that are not tensors of model or optimizer
      plan.json, config.json    plan and configuration of the run, if the writer knows them
      model-00000.safetensors   slices of parameters, and buffers; one file per writing rank
      optimizer-00000.safetensors
      state-00000.safetensors

[Note: keys]
Keys are `model/<name>`, `optimizer/<name>/<state>` and `state/<path>`, with the original names of
the unsharded model. In a file, a slice has the key without its first word. A slice is the elements
[start, stop) of the tensor in row-major order, stored as a vector; a slice that is the whole tensor
has the tensor's own shape. The slices of a tensor cover it without overlap. The slices
of an *opaque* tensor belong to one rank each, and only the same number of ranks can read them.

[Note: values]
state.json has numbers, texts, lists and state dicts:

    {"betas": (0.9, 0.95), "best": inf, "noise": <tensor>}
    {"betas": {"$tuple": [0.9, 0.95]}, "best": {"$float": "inf"}, "noise": {"$tensor": "noise"}}

Nothing else is written: reading a pickle could execute code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import xxhash

from fullshard.errors import CheckpointError, untrusted

FORMAT, VERSION = "fullshard-checkpoint", 2  # 2: in an object store
COMPLETE, INDEX, STATE = "COMPLETE.json", "index.json", "state.json"
PLAN, CONFIG = "plan.json", "config.json"

SAVING, OLD, NOTES = "saving", "old", "notes"  # hidden folders next to a checkpoint
FILES = "files"  # folder in a checkpoint of a store
AVERAGE = "ema"  # optimizer state of a parameter: the average of its values
ADAPTED = ".base_layer."  # in the names of weights with adapters, as peft names them
OWN = "$rank"  # marks values that differ between ranks

ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class ForeignError(CheckpointError):
    """The checkpoint was written by a later version, or by another program."""


class Kind(StrEnum):
    """The first word of a key, and of the names of files with such tensors."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    STATE = "state"


def key_of(kind: Kind, *words: str) -> str:
    """The key of a tensor. See [Note: keys]."""
    return "/".join((kind, *words))


def kind_of(key: str) -> Kind:
    return Kind(key.partition("/")[0])


def name_in_file(key: str) -> str:
    """The name of a tensor's slice in a file."""
    return key.partition("/")[2]


def file_name(kind: Kind, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def step_name(step: int) -> str:
    """The folder of a step's checkpoint: `step-00000100`."""
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Elements [start, stop) of a tensor in one file.

    Attributes:
        file: Name of the file.
        start: First element, in row-major order.
        stop: One past the last.
        checksum: xxh3_128 of the slice's bytes, hexadecimal.
        rank: Rank of a slice of an opaque tensor; else -1.
    """

    file: str
    start: int
    stop: int
    checksum: str
    rank: int = -1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        dtype: Dtype, as safetensors names it.
        shape: Global shape; for an opaque tensor, the shape of each slice.
        slices: Slices in the order of their elements; for an opaque tensor, of their ranks.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def opaque(self) -> bool:
        return any(piece.rank >= 0 for piece in self.slices)

    def gap(self) -> tuple[int, int] | None:
        """Range of elements in no slice or in two; None if there is none."""
        if self.opaque:
            return None
        end = 0
        for piece in self.slices:
            if piece.start != end:
                return min(end, piece.start), max(end, piece.start)
            end = piece.stop
        return None if end == self.numel else (end, self.numel)


@dataclass(frozen=True, slots=True)
class Index:
    """All tensors of a checkpoint.

    Attributes:
        world_size: Number of ranks that wrote it.
        tensors: Tensors by key.
        tied: Further names of parameters: second name -> first name.
    """

    world_size: int
    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str] = field(default_factory=dict[str, str])

    def names(self, kind: Kind) -> list[str]:
        """The keys of one kind without their first word."""
        return [name_in_file(key) for key in self.tensors if kind_of(key) is kind]

    def find(self, kind: Kind, name: str) -> str | None:
        """The key of a tensor, also by a tied parameter's further names."""
        keys = (key_of(kind, name), key_of(kind, self.tied.get(name, name)))
        return next((key for key in keys if key in self.tensors), None)

    def to_json(self) -> str:
        files = sorted({piece.file for t in self.tensors.values() for piece in t.slices})
        number = {file: at for at, file in enumerate(files)}
        tensors = {
            key: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "slices": [
                    [number[p.file], p.start, p.stop, p.checksum, *([p.rank] * opaque)]
                    for p in tensor.slices
                ],
            }
            for key, tensor in self.tensors.items()
            for opaque in (tensor.opaque,)  # it looks at every slice
        }
        return json.dumps(
            {
                "world_size": self.world_size,
                "files": files,
                "tied": dict(self.tied),
                "tensors": tensors,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes, origin: str, *, whole: bool = True) -> Index:
        """Parses index.json.

        Args:
            text: Content of the file.
            origin: Name of the file, for errors.
            whole: Whether it must contain every element of its tensors; False for one rank's part.

        Raises:
            CheckpointError: It is not such a file; names `origin`.
        """
        with untrusted(origin, "the index of a checkpoint"):
            table: Any = json.loads(text)
            files = [_file_name(name) for name in table["files"]]
            entries: dict[str, Any] = table["tensors"]
            tensors = {
                key: StoredTensor(
                    value["dtype"],
                    tuple(map(natural, value["shape"])),
                    tuple(_slice(files, entry) for entry in value["slices"]),
                )
                for key, value in entries.items()
            }
            found = cls(natural(table["world_size"]), tensors, dict(table["tied"]))
            if whole:
                found._check()
            return found

    def _check(self) -> None:
        """Raises ValueError for an index that cannot be right."""
        for key, tensor in self.tensors.items():
            kind_of(key)
            if tensor.dtype not in ITEMSIZE or not tensor.slices or tensor.gap() is not None:
                raise ValueError(f"{key} has an unknown dtype, or a part of its elements")
        for second, first in self.tied.items():
            if key_of(Kind.MODEL, first) not in self.tensors:
                raise ValueError(f"{second} is tied to {first}, which is missing")


def natural(value: Any) -> int:
    """Checks that a JSON value is a count.

    Raises:
        ValueError: It is not an integer, negative, or larger than any file.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]} instead of a count")
    return value


def _file_name(value: Any) -> str:
    """Checks the name of a file in the same folder."""
    name = str(value)
    if value != name or not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name[:40]!r} instead of the name of a file beside it")
    return name


def _slice(files: list[str], entry: list[Any]) -> StoredSlice:
    at, start, stop = map(natural, entry[:3])
    rank = natural(entry[4]) if len(entry) > 4 else -1
    return StoredSlice(files[at], start, stop, str(entry[3]), rank)


def join_slices(
    parts: Iterable[tuple[str, StoredTensor]], tied: Mapping[str, str], world_size: int
) -> Index:
    """Joins the indices of all ranks.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or some of its elements were not written.
    """
    found: dict[str, list[StoredTensor]] = {}
    for key, tensor in parts:
        found.setdefault(key, []).append(tensor)
    tensors: dict[str, StoredTensor] = {}
    for key in sorted(found):
        first = found[key][0]
        for other in found[key]:
            if (other.dtype, other.shape) != (first.dtype, first.shape) and not first.opaque:
                raise CheckpointError(
                    f"{key}: expected one dtype and shape on all ranks; got {first.dtype} "
                    f"{first.shape} and {other.dtype} {other.shape}. Save the same model on all "
                    "ranks."
                )
        pieces = [piece for tensor in found[key] for piece in tensor.slices]
        pieces.sort(key=lambda p: (p.rank, p.start, p.stop))
        joined = StoredTensor(first.dtype, first.shape, tuple(pieces))
        gap = joined.gap()
        if gap is not None:
            raise CheckpointError(
                f"{key}: expected every one of its {joined.numel:,} elements once; elements "
                f"{gap[0]:,} to {gap[1]:,} were not written exactly once. All ranks must save "
                "together."
            )
        tensors[key] = joined
    return Index(world_size, tensors, tied)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum (xxh3_128, hexadecimal) of a file."""

    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of COMPLETE.json.

    Attributes:
        step: Step of the checkpoint, or None.
        files: Size and checksum of each file by name.
        folder: Folder of these files, in the one of COMPLETE.json; empty: the same folder.
    """

    step: int | None
    files: Mapping[str, FileFacts]
    folder: str = ""

    def to_json(self) -> str:
        files = {name: [facts.size, facts.checksum] for name, facts in sorted(self.files.items())}
        table = {"format": FORMAT, "version": 1, "step": self.step, "files": files}
        if self.folder:  # a reader of the first version would look for the files next to it
            table |= {"version": VERSION, "folder": self.folder}
        return json.dumps({**table, "checksum": _checksum(table)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> Manifest:
        """Parses COMPLETE.json.

        Raises:
            CheckpointError: It is not such a file; names `origin`.
            ForeignError: A later version or another program wrote it.
        """
        with untrusted(origin, "the last file of a checkpoint"):
            table: Any = json.loads(text)
            if table["format"] != FORMAT:
                raise ForeignError(f"{origin}: expected format {FORMAT}; got {table['format']!r}")
            version = natural(table["version"])
            if version > VERSION:
                raise ForeignError(
                    f"{origin}: expected version {VERSION} or older; got {version}. "
                    "Read it with a newer fullshard."
                )
            checksum = table.pop("checksum", None)
            folder = _file_name(table["folder"]) if "folder" in table else ""
            if checksum != _checksum(table) or len(table) != 4 + bool(folder):
                raise ValueError("values that differ from those written")
            step = None if table["step"] is None else natural(table["step"])
            entries = table["files"].items()
            files = {_file_name(n): FileFacts(natural(size), str(x)) for n, (size, x) in entries}
            if not {INDEX, STATE} <= files.keys():
                raise ValueError(f"no {INDEX} or no {STATE}")
            return cls(step, files, folder)


def _checksum(table: Mapping[str, Any]) -> str:
    """Checksum of COMPLETE.json itself; it contains the checksums of all other files."""
    return xxhash.xxh3_128_hexdigest(json.dumps(table, sort_keys=True).encode())


# ---- values that are not tensors -----------------------------------------------------------------


MARKS = ("$tuple", "$float", "$items", "$tensor", OWN)

KeepTensor = Callable[[str, Any], str | None]
GetTensor = Callable[[str], Any]


def encode(value: Any, path: str, keep_tensor: KeepTensor) -> Any:
    """A value as JSON.

    Args:
        value: Numbers, texts, None, lists, tuples, mappings, tensors, objects with `state_dict()`.
        path: Its path in the state, for errors and the names of its tensors.
        keep_tensor: Stores a tensor and returns its name; returns None for other values.

    Raises:
        CheckpointError: It is none of these; the error names its path.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, tuple | list):
        items = cast("list[Any]", value)
        coded = [encode(item, f"{path}.{at}", keep_tensor) for at, item in enumerate(items)]
        return {"$tuple": coded} if isinstance(value, tuple) else coded
    if isinstance(value, Mapping):
        return _encode_mapping(cast("Mapping[Any, Any]", value), path, keep_tensor)
    name = keep_tensor(path, value)
    if name is not None:
        return {"$tensor": name}
    get_state = getattr(value, "state_dict", None)
    if callable(get_state):
        return encode(get_state(), path, keep_tensor)
    raise CheckpointError(
        f"{path}: expected numbers, texts, lists, mappings, tensors or an object with "
        f"state_dict(); got {type(value).__name__}, which needs a pickle. Save its contents."
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, keep_tensor: KeepTensor) -> Any:
    coded = {key: encode(item, f"{path}.{key}", keep_tensor) for key, item in value.items()}
    if all(isinstance(key, str) and key not in MARKS for key in coded):
        return coded
    for key in coded:
        if not isinstance(key, str | int):
            raise CheckpointError(
                f"{path}: expected texts or integers as keys; got {key!r} "
                f"({type(key).__name__}). Save it as a list of pairs."
            )
    return {"$items": [[key, item] for key, item in coded.items()]}


def decode(value: Any, get_tensor: GetTensor) -> Any:
    """Decodes a value; objects are returned as their state dicts."""
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    if len(table) == 1:
        (mark, inner), *_ = table.items()
        match mark:
            case "$tuple":
                return tuple(decode(item, get_tensor) for item in inner)
            case "$float":
                return float(inner)
            case "$items":
                return {key: decode(item, get_tensor) for key, item in inner}
            case "$tensor":
                return get_tensor(inner)
            case _:
                pass
    return {key: decode(item, get_tensor) for key, item in table.items()}
