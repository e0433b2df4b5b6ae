"""Reads trees of arrays that orbax wrote, through tensorstore.

_METADATA    the leaves' paths, and how arrays are stored: zarr or zarr3, in files or in OCDBT
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard import loading
from fullshard.checkpoint.format import Index, Kind, Manifest, StoredTensor, key_of
from fullshard.checkpoint.read import Checkpoint
from fullshard.checkpoint.storage import StorePath
from fullshard.config.regular_files import read_regular
from fullshard.engine.engine import engine_of
from fullshard.engine.state import as_bytes, dtype_name
from fullshard.errors import untrusted
from fullshard.formats.source import Entry, Source

METADATA = "_METADATA"
ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def open_arrays(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Open the arrays by dotted path, so that boxes can be read; and list other leaves.

    Raises:
        CheckpointError: The folder is damaged, or tensorstore is not installed.
    """
    arrays: dict[str, Any] = {}
    others: list[str] = []
    advice = "Copy it again; or, if tensorstore is not installed, run pip install tensorstore."
    with untrusted(f"'{folder}'", "a tree of arrays that orbax wrote", advice=advice):
        import tensorstore

        facts = json.loads(read_regular(folder / METADATA))
        for leaf in facts["tree_metadata"].values():
            name = ".".join(str(part["key"]) for part in leaf["key_metadata"])
            if leaf["value_metadata"]["value_type"] not in ARRAYS:
                others.append(name)
                continue
            store = {"driver": "file", "path": f"{folder.resolve()}/{name}/"}
            if facts.get("use_ocdbt", (folder / "manifest.ocdbt").is_file()):
                base = {"driver": "file", "path": f"{folder.resolve()}/"}
                store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            driver = "zarr3" if facts.get("use_zarr3") else "zarr"
            arrays[name] = tensorstore.open({"driver": driver, "kvstore": store}).result()
    return arrays, others


def open_orbax(folder: Path) -> Source:
    """Opens a tree of arrays as tensors. Raises as `open_arrays` does."""
    arrays, others = open_arrays(folder)
    entries = {name: _entry(name, array) for name, array in sorted(arrays.items())}
    return Source("a tree that orbax wrote", entries, left_out=tuple(others))


def _entry(name: str, array: Any) -> Entry:
    dtype: Any = getattr(torch, array.dtype.name, None) or dtype_name(array.dtype.name, name)
    return Entry(dtype, tuple(array.shape), partial(_read, array, dtype))


def _read(array: Any, dtype: torch.dtype) -> torch.Tensor:
    values = np.array(array.read().result(), order="C")
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(values.shape)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """As `loading.load`, also from a tree, whose parameters are at the top or under `params`."""
    engine = engine_of(model)
    if isinstance(path, StorePath) or not engine.lead(lambda: os.path.isfile(path / METADATA)):  # noqa: PTH113  (False for names that no file can have)
        return loading.load(path, model, optimizer)

    def read() -> dict[str, Any]:
        with untrusted(f"'{path}'", "a tree of arrays that orbax wrote"):
            return loading.load_open(_OrbaxTree.at(path), engine, model, optimizer)

    return engine.agree(read)


@dataclass(frozen=True)
class _OrbaxTree(Checkpoint):
    """A tree as a checkpoint of only a model."""

    arrays: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def at(cls, folder: Path) -> _OrbaxTree:
        found = open_arrays(folder)[0]
        own = {n.removeprefix("params."): a for n, a in found.items() if n.startswith("params.")}
        arrays = {key_of(Kind.MODEL, name): array for name, array in (own or found).items()}
        entries = {key: _entry(key, array) for key, array in arrays.items()}
        tensors = {k: StoredTensor(dtype_name(e.dtype, k), e.shape, ()) for k, e in entries.items()}
        state: dict[str, Any] = {"state": {}, "extra": {}, "step": None}
        return cls(folder, Manifest(None, {}), Index(1, tensors), state, arrays=arrays)

    def read(self, key: str, start: int, stop: int, out: memoryview) -> None:
        """Fills `out` with elements [start, stop) of an array, whose rows are read whole."""
        if start == stop:
            return
        array, row, first = self.arrays[key], math.prod(self.arrays[key].shape[1:]), 0
        if array.shape:
            first = start // row
            array = array[first : -(-stop // row)]
        data, size = as_bytes(_entry(key, array).read()), array.dtype.numpy_dtype.itemsize
        out[:] = data[(start - first * row) * size :][: out.nbytes]
