"""Reads trees of arrays that orbax wrote, through tensorstore.

_METADATA    the leaves' paths, and how arrays are stored: zarr or zarr3, in files or in OCDBT
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.config.regular_files import read_regular
from fullshard.errors import untrusted
from fullshard.formats.source import Entry, Source

METADATA = "_METADATA"
ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def open_arrays(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Opens the arrays by dotted path, of which boxes can be read; and names other leaves.

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
    entries = {name: _entry(array) for name, array in sorted(arrays.items())}
    return Source("a tree that orbax wrote", entries, left_out=tuple(others))


def _entry(array: Any) -> Entry:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return Entry(dtype, tuple(array.shape), partial(_read, array, dtype))


def _read(array: Any, dtype: torch.dtype) -> torch.Tensor:
    values = np.array(array.read().result(), order="C")
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(values.shape)
