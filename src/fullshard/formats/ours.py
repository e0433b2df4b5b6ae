"""Our checkpoints as sources, and sources as our checkpoints."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint.commit import ALONE, Documents
from fullshard.checkpoint.files import Piece
from fullshard.checkpoint.format import STATE, Kind, decode, key_of
from fullshard.checkpoint.read import Checkpoint, check_stays
from fullshard.checkpoint.retain import Found
from fullshard.engine.state import DTYPE_NAMES, DTYPES, as_bytes
from fullshard.errors import CheckpointError, untrusted
from fullshard.formats.source import (
    CHECKPOINT,
    COMPANIONS,
    Entry,
    OptimizerSource,
    Source,
    check_empty,
)
from fullshard.loading import state_tensor, stored_tensor
from fullshard.saving import CodedValue, SaveSettings, write


@contextmanager
def open_checkpoint(found: Found) -> Generator[Source]:
    """Opens a complete checkpoint.

    Raises:
        CheckpointError: The checkpoint is incomplete, or its index is damaged.
    """
    with Checkpoint.open(found) as checkpoint:
        names = checkpoint.index.names(Kind.MODEL)
        with untrusted(f"checkpoint '{found.path}'", "what fs.save wrote"):
            companions = {
                name: (checkpoint.text(name) or "").encode()
                for name in checkpoint.manifest.files
                if any(fnmatch.fnmatch(name, pattern) for pattern in COMPANIONS)
            }
            source = Source(
                what=CHECKPOINT,
                tensors={name: _entry(checkpoint, key_of(Kind.MODEL, name)) for name in names},
                tied=checkpoint.index.tied,
                optimizer=_optimizer(checkpoint),
                companions=companions,
                step=checkpoint.state["step"],
                left_out=tuple(f"the extra state {name}" for name in checkpoint.state["extra"]),
                check=partial(check_stays, found),
            )
        yield source


def _entry(checkpoint: Checkpoint, key: str, rank: int = 0) -> Entry:
    """A tensor of a checkpoint; `rank` saved it if it is opaque."""
    stored, read = checkpoint.index.tensors[key], partial(stored_tensor, checkpoint, key, rank)
    shape = tuple(read().shape) if stored.opaque else stored.shape
    return Entry(DTYPES[stored.dtype], shape, read)


def _optimizer(checkpoint: Checkpoint) -> OptimizerSource | None:
    saved: dict[str, Any] | None = checkpoint.state.get("optimizer")
    if saved is None:
        return None
    tensors: dict[tuple[str, str], Entry] = {}
    own: dict[str, Entry] = {}
    for name in checkpoint.index.names(Kind.OPTIMIZER):
        key = key_of(Kind.OPTIMIZER, name)
        stored = checkpoint.index.tensors[key]
        if stored.opaque:
            for piece in stored.slices:
                own[f"{name} of rank {piece.rank}"] = _entry(checkpoint, key, piece.rank)
        else:
            param, _, state = name.rpartition("/")
            tensors[param, state] = _entry(checkpoint, key)
    get_tensor = partial(state_tensor, checkpoint, 0)
    scalars, groups = (decode(saved[part], get_tensor) for part in ("scalars", "groups"))
    return OptimizerSource(saved["class"], tensors, scalars, groups, own)


def write_checkpoint(source: Source, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Writes a checkpoint as a single rank; equal tensors are stored once, as tied.

    Raises:
        CheckpointError: The folder is not empty, or cannot be written.
    """
    check_empty(folder, "import")
    with untrusted(source.what, "tensors and settings that a checkpoint can hold"):
        pieces, texts, tied = _contents(source, on_bytes)
    documents = Documents(source.step, texts, tied, source.check)
    write(ALONE, folder, pieces, documents, SaveSettings())


def _contents(
    source: Source, on_bytes: Callable[[int], None]
) -> tuple[list[Piece], dict[str, str], dict[str, str]]:
    """Tensors, further files by name, and tied names."""
    equal = equal_tensors(source)
    tied = {**{name: equal.get(first, first) for name, first in source.tied.items()}, **equal}
    if lost := sorted({*tied.values()} - {*source.tensors}):
        raise ValueError(f"names tied to {lost[0]}, which is not there")
    entries = {
        key_of(Kind.MODEL, name): entry
        for name, entry in source.tensors.items()
        if name not in tied
    }
    facts: dict[str, Any] = {"step": source.step, "world_size": 1, "extra": {}, "state": {}}
    pieces: list[Piece] = []
    if source.optimizer is not None:
        optimizer = source.optimizer
        groups = CodedValue("$optimizer.groups", optimizer.groups)
        numbers = {n: dict(v) for n, v in optimizer.scalars.items() if n not in tied}
        scalars = CodedValue("$optimizer.scalars", numbers)
        names = {"groups": groups.coded, "scalars": scalars.coded}
        facts["optimizer"] = {"class": optimizer.kind, **names}
        pieces = groups.pieces + scalars.pieces
        entries |= {
            key_of(Kind.OPTIMIZER, *names): entry
            for names, entry in optimizer.tensors.items()
            if names[0] not in tied
        }
    pieces += [piece_of(key, entry, on_bytes) for key, entry in entries.items()]
    texts = {STATE: json.dumps(facts, indent=1)}
    for name, data in source.companions.items():
        with suppress(UnicodeDecodeError):
            texts[name] = data.decode()
    return pieces, texts, tied


def equal_tensors(source: Source) -> dict[str, str]:
    """Finds equal matrices, since other tools save tied weights twice: second -> first name."""
    alike: dict[Any, list[str]] = {}
    for name, entry in source.tensors.items():
        if len(entry.shape) > 1:
            alike.setdefault((entry.dtype, entry.shape), []).append(name)
    tied: dict[str, str] = {}
    for names in alike.values():
        first: dict[str, str] = {}
        for name in names if len(names) > 1 else ():
            tensor = source.tensors[name].read()
            if bool((tensor == tensor.reshape(-1)[:1]).all()):
                continue  # constant vectors are often equal by coincidence
            digest = xxhash.xxh3_128_hexdigest(as_bytes(tensor.contiguous()))
            if digest in first:
                tied[name] = first[digest]
            first.setdefault(digest, name)
            del tensor  # freed before the next one is read
    return tied


def piece_of(key: str, entry: Entry, on_bytes: Callable[[int], None]) -> Piece:
    """A piece with the full tensor, which is read when it is written.

    Raises:
        CheckpointError: safetensors does not support the dtype.
    """

    def data() -> memoryview:
        on_bytes(entry.num_bytes)
        return as_bytes(entry.read().contiguous())

    if entry.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{key}: expected a dtype among {', '.join(DTYPES)}; got {entry.dtype}. Convert it "
            "with the tool that wrote it."
        )
    return Piece(key, DTYPE_NAMES[entry.dtype], entry.shape, 0, math.prod(entry.shape), data)
