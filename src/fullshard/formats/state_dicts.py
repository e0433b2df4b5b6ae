"""State dicts as sources: one torch.save file, or one per rank.

torch.save files are read without executing code in them: `weights_only=True` builds tensors, plain
containers and the classes named here. Sharded tensors and other tools' records become stand-ins,
data without behaviour, so reading needs neither a process group nor the other tool. The files of
other formats (dcp.py, deepspeed.py) are read in the same way.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fullshard.checkpoint.format import AVERAGE, natural
from fullshard.config.regular_files import open_regular, read_regular
from fullshard.errors import CheckpointError, untrusted
from fullshard.formats.source import Entry, OptimizerSource, Source, check_once

# ---- reading without executing code


class Foreign:
    """A stand-in for another tool's object: its constructor arguments and attributes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class PartOfTensor(torch.Tensor):
    """A stand-in for torch's DTensor and ShardedTensor, with the full tensor's shape."""

    state: Any

    def __setstate__(self, state: Any) -> None:
        """DTensor: its attributes. ShardedTensor: (local shards, metadata, ...)."""
        self.state = state

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        """Raises an error: a stand-in cannot be computed with."""
        raise CheckpointError(f"a part of a tensor: expected its local tensor to be read; {func}")


# Other tools' classes whose content is read or skipped, by module.
_RECORDS = {
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed.tensor.placement_types": "Shard Replicate _StridedShard",
    "torch.distributed._shard.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties"
    " MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "argparse": "Namespace",
}
_ZIP = b"PK\x03\x04"
_PARTS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
)


class _Attribute(Foreign):
    """Resolves the attributes that a pickle reads from a class: nested classes, enum members."""


def _get_attribute(*_: Any) -> type:
    """A harmless replacement for getattr, which pickles may name."""
    return _Attribute


def _stand_in(name: str, base: type) -> tuple[Any, str]:
    """Makes one class per name, because torch's allow list compares identity."""
    return type(name.rpartition(".")[2], (base,), {}), name


_ALLOWED: list[tuple[Any, str]] = [
    _stand_in(f"{module}.{name}", Foreign)
    for module, names in _RECORDS.items()
    for name in names.split()
]
_ALLOWED += [(_Attribute, "a nested class")]
_ALLOWED += [(_get_attribute, f"{module}.getattr") for module in ("builtins", "__builtin__")]
_ALLOWED += [_stand_in(name, PartOfTensor) for name in _PARTS]


@contextmanager
def _stand_ins_alone() -> Generator[None]:
    """Clears torch's global allow list meanwhile: its entries could precede our stand-ins."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(cast("list[Any]", _ALLOWED))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def read_pickle(file: Path | io.BytesIO, origin: str) -> Any:
    """Reads a torch.save file; large files are memory-mapped.

    Raises:
        CheckpointError: The file names something that could execute code, or has another format.
    """
    with untrusted(origin, "a whole file of torch.save"):
        begins = _begin(file)
        if not begins.startswith((_ZIP, b"\x80")):  # a pickle's first opcode
            raise CheckpointError(
                f"{origin}: expected a file of torch.save, got one that begins with {begins!r}. "
                "Pass a checkpoint's folder, or a file of torch.save."
            )
        if begins == _ZIP:
            _check_sums(file, origin)
        try:
            with _stand_ins_alone():
                # The only place that reads pickles; weights_only builds only listed classes.
                return torch.load(  # noqa: TID251
                    file,
                    map_location="cpu",
                    weights_only=True,
                    mmap=isinstance(file, Path) and begins == _ZIP,
                )
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{origin}: expected tensors, numbers and texts; it names "
                f"{named.group(1) if named else 'something else'}, and what could execute code is "
                "not read. Save its state_dict() alone."
            ) from error


def _check_sums(file: Path | io.BytesIO, origin: str) -> None:
    """Compares the entries with their checksums, which torch.load does not do."""
    with zipfile.ZipFile(file) as entries:
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.infolist())
        damaged = entries.testzip() if stored else "a compressed entry"
    if damaged is not None:
        raise CheckpointError(
            f"{origin}: expected entries that equal their checksums, as torch.save writes them; "
            f"{damaged} differs. Copy the file again; if it was saved with "
            "torch.serialization.set_crc32_options(False), save it again without."
        )
    if isinstance(file, io.BytesIO):
        file.seek(0)


def attributes_of(stand_in: Any) -> dict[str, Any]:
    """The attributes of the saved object."""
    state = getattr(stand_in, "state", None)
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return state[1]  # (None, slot values)
    return state if isinstance(state, dict) else {}


class _NamedOnly(pickle.Unpickler):
    """An unpickler with an allow list, for DCP's metadata, which torch.load does not read.

    A pickle can set attributes of its objects, so Python classes are never returned. Each read has
    its own stand-ins, which are discarded after it.
    """

    def __init__(self, file: io.BytesIO, records: Collection[str], plain: Collection[str]) -> None:
        super().__init__(file)
        self._records = {name: type(name.rpartition(".")[2], (Foreign,), {}) for name in records}
        self._plain = plain

    def find_class(self, module: str, name: str) -> Any:
        """Returns a stand-in or an immutable value for a listed name."""
        full = f"{module}.{name}"
        if full in self._records:
            return self._records[full]
        if full not in self._plain:
            raise pickle.UnpicklingError(f"it names {full}")
        return super().find_class(module, name)


def read_listed(path: Path, records: Collection[str], plain: Collection[str]) -> Any:
    """Reads a plain pickle that may name only the listed objects.

    Args:
        path: Path of the file.
        records: Names of classes and functions that become stand-ins (`Foreign`).
        plain: Immutable values and C classes.

    Raises:
        CheckpointError: The pickle names anything else, or is damaged.
    """
    wanted = "torch.distributed.checkpoint's own classes and nothing that could execute code"
    with untrusted(path, wanted, advice="Save it again with a known torch."):
        return _NamedOnly(io.BytesIO(read_regular(path)), records, plain).load()


def _begin(file: Path | io.BytesIO) -> bytes:
    if isinstance(file, io.BytesIO):
        return file.getvalue()[: len(_ZIP)]
    with os.fdopen(open_regular(file), "rb") as opened:
        return opened.read(len(_ZIP))


# ---- sources

States = Mapping[str, Mapping[str, Any]]  # parameter -> state -> value
RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")  # around the tensors, in places


def open_pickled(files: Sequence[Path], what: str) -> Source:
    """Opens torch.save files with the full tensors of a model."""
    tensors: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    left: list[str] = []
    for file in files:
        state, beside = _unwrapped(read_pickle(file, str(file)))
        left += [f"{name}, beside the model" for name in beside]
        check_once({*tensors, *tied}, state, file)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                left.append(f"{name}, which is no tensor")
                continue
            where = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape)
            where = (*where, value.stride(), value.dtype)
            if value.numel() and where in first:
                tied[name] = first[where]
                continue
            first[where] = name
            tensors[name] = Entry.of(value)
    if not tensors:
        raise CheckpointError(
            f"'{files[0]}': expected a model's state dict; got no named tensors. Save "
            "model.state_dict()."
        )
    return Source(what, tensors, tied, left_out=tuple(left))


def open_rank_files(folder: Path) -> Source:
    """Opens model_world_size_N_rank_R.pt, the sharded state dicts of ranks that verl writes.

    Raises:
        CheckpointError: The file of a rank is missing.
    """
    found = {
        (int(match.group(1)), int(match.group(2))): path
        for path in folder.iterdir()
        if (match := RANK_FILE.fullmatch(path.name))
    }
    world_size = max(found)[0]
    if len(found) != world_size or sorted(found) != [(world_size, r) for r in range(len(found))]:
        raise CheckpointError(
            f"'{folder}': expected the files of {world_size} ranks; got those of "
            f"{', '.join(f'{rank} of {size}' for size, rank in sorted(found))}. Copy the others "
            "too, and remove those of other saves."
        )
    states = [read_pickle(path, str(path)) for _, path in sorted(found.items())]
    if odd := {name for state in states for name in state.keys() ^ states[0].keys()}:
        raise CheckpointError(
            f"'{folder}': expected the same names on all ranks; got {min(odd)} on some. Copy all "
            "files of one save."
        )
    entries = {name: joined_ranks(name, [s[name] for s in states]) for name in states[0]}
    left = [f"{name}, which is no tensor" for name, entry in entries.items() if entry is None]
    left += [f"{name} of other ranks than 0, which differs" for name in _unequal(states)]
    if any(folder.glob("optim_world_size_*")):
        left.append("the optimizer's states")
    return Source(
        f"the sharded state dicts of {world_size} ranks",
        {name: entry for name, entry in entries.items() if entry is not None},
        left_out=tuple(left),
    )


def _unequal(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of the whole tensors that differ between ranks."""
    for name, first in states[0].items():
        is_whole = isinstance(first, torch.Tensor) and not isinstance(first, PartOfTensor)
        if is_whole and not all(torch.equal(first, state[name]) for state in states):
            yield name


def optimizer_of(
    states: States,
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> OptimizerSource | None:
    """Converts an optimizer's state dict to parameter names; None if its form is unknown.

    Args:
        states: Parameter -> state -> an Entry, a tensor or a number.
        groups: Settings, with names under "params".
        shapes: Shapes of the model's tensors.
    """
    kind = _kind_of(states, groups)
    named = {name for group in groups for name in group.get("params", ())}
    if kind is None or not set(states) <= named or not named <= set(shapes):
        return None
    tensors: dict[tuple[str, str], Entry] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for param, values in states.items():
        for state, value in values.items():
            entry = Entry.of(value) if isinstance(value, torch.Tensor) else value
            if not isinstance(entry, Entry) or entry.shape == () != shapes[param]:
                plain = entry.read() if isinstance(entry, Entry) else entry
                scalars.setdefault(param, {})[state] = plain
            elif entry.shape == shapes[param] and state != "step":
                tensors[param, state] = entry
            elif entry.num_bytes == entry.dtype.itemsize:
                scalars.setdefault(param, {})[state] = entry.read().reshape(())
            else:
                return None
    return OptimizerSource(kind, tensors, scalars, [dict(group) for group in groups])


def _kind_of(states: States, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The optimizer class, guessed from its states, because state dicts do not name it."""
    names = {state for values in states.values() for state in values} - {AVERAGE}
    if names and names <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
        decoupled = groups[0].get("decoupled_weight_decay") if groups else None
        return None if decoupled is None else "AdamW" if decoupled else "Adam"
    return "SGD" if names == {"momentum_buffer"} else None


def _unwrapped(state: Any) -> tuple[Mapping[str, Any], list[str]]:
    """Unwraps the dict that contains the tensors; also returns the keys beside it."""
    beside: list[str] = []
    for _ in WRAPPERS:  # a pickle can contain itself
        names = WRAPPERS if len(state) > 1 else tuple(state)
        inner = next((name for name in names if isinstance(state.get(name), Mapping)), None)
        if inner is None:
            break
        beside += [str(name) for name in state if name != inner]
        state = state[inner]
    return state, beside


# ---- tensors from the parts of ranks


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor.

    Attributes:
        offsets: Index of the first element, per dimension.
        sizes: Shape of the block.
        read: Reads the elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def joined(name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> Entry:
    """Joins blocks into a tensor.

    Raises:
        CheckpointError: The blocks do not cover the tensor.
    """
    for chunk in chunks:
        pairs = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(natural(o) + natural(s) > size for o, s, size in pairs):
            raise CheckpointError(
                f"{name}: expected parts inside of {shape}; got {chunk.sizes} at {chunk.offsets}. "
                "Copy the files again."
            )
    there = sum(math.prod(chunk.sizes) for chunk in chunks)
    if there != math.prod(shape):
        raise CheckpointError(
            f"{name}: expected parts that make {shape}; got {there:,} of {math.prod(shape):,} "
            "elements. Name a folder that has the files of all ranks."
        )

    def read() -> torch.Tensor:
        whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for chunk in chunks:
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            part = chunk.read()
            if (part.dtype, tuple(part.shape)) != (dtype, chunk.sizes) or filled[at].any():
                got = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(f"a part of {got} at {chunk.offsets}, or two there")
            whole[at], filled[at] = part, True
        return whole

    return Entry(dtype, shape, read)


def joined_ranks(name: str, parts: Sequence[Any]) -> Entry | None:
    """Joins the parts that each rank saved; None for values other than tensors.

    Raises:
        CheckpointError: The tensor was sharded in an unknown way.
    """
    first = parts[0]
    if not isinstance(first, PartOfTensor):
        return Entry.of(first) if isinstance(first, torch.Tensor) else None
    shape = tuple(first.shape)
    chunks: list[Chunk] = []
    for part in parts:
        spec = attributes_of(part).get("_spec")
        if spec is None:  # ShardedTensor: each shard has its offsets
            chunks += [_block(shard) for shard in part.state[0]]
            continue
        chunks += _rows(name, part, spec, chunks)
    return joined(name, first.dtype, shape, chunks)


def _block(shard: Any) -> Chunk:
    facts = attributes_of(shard)
    where = attributes_of(facts["metadata"])
    begin, sizes = (tuple(where[part]) for part in ("shard_offsets", "shard_sizes"))
    return Chunk(begin, sizes, lambda: facts["tensor"])


def _rows(name: str, part: Any, spec: Any, before: Sequence[Chunk]) -> list[Chunk]:
    """The rows that a rank contributes to a DTensor, until it is complete.

    On a mesh (replicate, shard) the first ranks complete it; the others have copies.
    """
    local: torch.Tensor = attributes_of(part)["_local_tensor"]
    placements = attributes_of(spec)["placements"]
    kinds = [type(placement).__name__ for placement in placements]
    cut = [placement for placement in placements if type(placement).__name__ == "Shard"]
    if len(cut) > 1 or set(kinds) - {"Shard", "Replicate"} or (cut and kinds[-1] != "Shard"):
        raise CheckpointError(
            f"{name}: expected DTensors cut over one axis, the last; got {', '.join(kinds)}. "
            "Save it with torch.distributed.checkpoint, which can be imported."
        )
    shape = tuple(part.shape)
    if not cut:
        return [] if before else [Chunk((0,) * len(shape), shape, lambda: local)]
    dim: int = (attributes_of(cut[0]) or {"dim": 0})["dim"]
    begin = sum(chunk.sizes[dim] for chunk in before)
    if begin == shape[dim] or local.shape[dim] == 0:
        return []
    offsets = tuple(begin if at == dim else 0 for at in range(len(shape)))
    return [Chunk(offsets, tuple(local.shape), lambda: local)]


def flat(name: str, parts: Sequence[torch.Tensor], start: int, shape: tuple[int, ...]) -> Entry:
    """Reads elements from `start` on of a vector that is stored in several parts.

    Raises:
        CheckpointError: The vector is too short.
    """
    stop, pieces, begin = start + math.prod(shape), list[torch.Tensor](), 0
    for part in parts:
        end = begin + part.numel()
        if begin < stop and end > start:
            pieces.append(part[max(start - begin, 0) : stop - begin])
        begin = end
    if sum(piece.numel() for piece in pieces) != stop - start:
        raise CheckpointError(
            f"{name}: expected elements up to {stop:,}; the files of all ranks have {begin:,}. "
            "Name a folder that has the files of all ranks."
        )
    dtype = parts[0].dtype if parts else torch.float32
    return Entry(
        dtype, shape, lambda: torch.cat(pieces).view(shape) if pieces else torch.empty(shape)
    )
