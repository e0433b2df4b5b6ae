"""Reads torch.save files without executing code in them.

`weights_only=True` builds tensors, plain containers and the classes named here. Sharded tensors and
other tools' records become stand-ins, data without behaviour, so reading needs neither a process
group nor the other tool.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from fullshard.config.regular_files import open_regular, read_regular
from fullshard.errors import CheckpointError, untrusted


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
