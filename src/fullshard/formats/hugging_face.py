"""Reads Hugging Face folders."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.files import TensorFile
from fullshard.config.regular_files import read_regular
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.engine.state import DTYPES, as_bytes
from fullshard.errors import CheckpointError, untrusted
from fullshard.formats.source import COMPANIONS, Entry, Source


def open_safetensors(folder: Path, closing: ExitStack) -> Source:
    """Opens a folder with model.safetensors, or with several files and their index.

    Raises:
        CheckpointError: A file is missing or damaged, or contains a dtype unknown to torch.
    """
    names = files_of(folder, ONE_FILE, INDEX)
    files = {name: closing.enter_context(TensorFile.open(folder / name)) for name in names}
    tensors: dict[str, Entry] = {}
    for file in files.values():
        check_once(tensors, file.entries, file.path)
        tensors |= {name: _entry(file, name) for name in sorted(file.entries)}
    return Source("a Hugging Face folder", tensors, companions=companions_of(folder))


def check_once(known: Collection[str], names: Collection[str], file: Path) -> None:
    """Raises CheckpointError if two files contain the same tensor, which is ambiguous."""
    if twice := sorted({*known} & {*names}):
        raise CheckpointError(
            f"'{file}': expected each tensor in one file; got {twice[0]} in another one too. Copy "
            "the folder again."
        )


def files_of(folder: Path, one: str, index: str) -> list[str]:
    """The single weights file, or the files in the index.

    Raises:
        CheckpointError: The index cannot be read, or lists a missing file.
    """
    if (folder / one).is_file() or not (folder / index).is_file():  # as transformers does
        return [one]
    with untrusted(folder / index, "an index with a weight_map"):
        table: Any = json.loads(read_regular(folder / index))
        names: list[str] = sorted(set(table["weight_map"].values()))
        strays = [name for name in names if Path(name).name != name]
    for name in names:
        if name in strays or not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / index}: expected its files beside it; {name} is not there. Copy it too."
            )
    return names


def companions_of(folder: Path) -> dict[str, bytes]:
    """Reads the configuration and tokenizer files of a folder.

    Raises:
        CheckpointError: A file is a link out of the folder, other than into the blobs of a Hugging
            Face cache. An export would publish whatever file it points to.
    """
    home = folder.resolve()
    inside = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not any(fnmatch.fnmatch(path.name, p) for p in COMPANIONS):
            continue
        if path.is_symlink() and path.resolve().parent not in inside:
            raise CheckpointError(
                f"{path}: expected a file of this folder; it is a link to '{path.resolve()}'. "
                "Copy the file here if it belongs to the model."
            )
        found[path.name] = read_regular(path)
    return found


def _entry(file: TensorFile, name: str) -> Entry:
    kind, shape, begin, end = file.entries[name]
    if kind not in DTYPES:
        raise CheckpointError(
            f"{file.path}: expected dtypes among {', '.join(DTYPES)}; {name} has {kind}. "
            "Convert it with the tool that wrote it."
        )

    def read() -> torch.Tensor:
        tensor = torch.empty((end - begin) // DTYPES[kind].itemsize, dtype=DTYPES[kind])
        file.read(name, 0, as_bytes(tensor))
        return tensor.view(shape)

    return Entry(DTYPES[kind], shape, read)
