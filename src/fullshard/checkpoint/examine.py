"""What a checkpoint holds, which of its bytes are not those that were written, which may go."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.commit import OLD
from fullshard.checkpoint.files import checksum_of
from fullshard.checkpoint.format import ITEMSIZE, Index, Kind, kind_of, name_in_file
from fullshard.checkpoint.read import Checkpoint, why_not
from fullshard.checkpoint.retain import Found, checkpoints_in, unusable
from fullshard.errors import CheckpointError, untrusted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that has other bytes than were written.

    Attributes:
        file: Its name.
        why: What is wrong with it.
        tensors: Keys of what is damaged in it; none where that is no tensor.
    """

    file: str
    why: str
    tensors: list[str]


def find_damage(found: Found, on_bytes: Callable[[int], None]) -> list[Damage]:
    """Read every byte of a complete checkpoint; `on_bytes` hears how many were read.

    Raises:
        CheckpointError: The index itself is damaged, or the checkpoint is not complete.
    """
    damages: list[Damage] = []
    with Checkpoint.open(found) as checkpoint:
        for name, facts in sorted(checkpoint.manifest.files.items()):
            why, tensors = "its bytes are not those that were written", list[str]()
            try:
                if checksum_of(found.path / name, on_bytes) == facts.checksum:
                    continue
                tensors = checkpoint.damaged_tensors(name)
            except OSError as error:  # a sector that the disk cannot read
                why, tensors = error.strerror or str(error), _keys_in(checkpoint.index, name)
            except CheckpointError:  # the table at its beginning
                why = "its header is not what was written"
                tensors = _keys_in(checkpoint.index, name)
            damages.append(Damage(name, why, tensors))
    return damages


def superfluous(folder: Path, keep: int, newest: int | None = None) -> list[Found]:
    """All complete checkpoints but the newest `keep`, and what crashes left behind.

    What is being saved right now is newer than any complete one, and stays. So does whatever is no
    checkpoint of ours, and what is damaged, which does not count.

    Args:
        folder: The folder that holds the step-* folders.
        keep: At least 1: the last good one is never removed.
        newest: The step that was just written: it is known to be whole, and no other one is read.
            Later ones (damaged, or of a run that went on from an earlier step) do not count.

    Raises:
        CheckpointError: All are damaged.
    """
    assert keep >= 1, keep
    found = checkpoints_in(folder)
    complete = [
        entry
        for entry in found
        if entry.manifest is not None and (newest is None or (entry.step or 0) <= newest)
    ]
    kept: list[Found] = []
    going: list[Found] = []
    damaged: list[str] = []
    for entry in complete:
        is_known = newest is not None and (kept or entry.step == newest)
        if len(kept) == keep:
            going.append(entry)
        elif is_known or not (why := why_not(entry)):
            kept.append(entry)
        else:
            damaged.append(f"{entry.path.name}: {why}")
            logger.warning("%s stays, but does not count: %s", entry.path, why)
    if damaged and not kept:
        raise unusable(folder, damaged)
    last = kept[0].step or 0 if kept else -1
    return going + [entry for entry in found if entry.is_leftover and (entry.step or 0) <= last]


def remove(found: Sequence[Found]) -> list[Path]:
    """Remove checkpoints; returns their folders. Of a link the name alone goes.

    Raises:
        CheckpointError: The file system refused.
    """
    for entry in found:
        # The name goes first, so that no reader takes half a folder for a damaged checkpoint.
        going = entry.path.with_name(f".{entry.path.name.lstrip('.')}.{OLD}-0")
        with untrusted(entry.path, "to remove a checkpoint", advice="The others are untouched."):
            if entry.path.is_symlink():
                entry.path.unlink()
                continue
            shutil.rmtree(going, ignore_errors=True)
            entry.path.rename(going)
            shutil.rmtree(going, ignore_errors=True)
    return [entry.path for entry in found]


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything about a checkpoint but its numbers, as JSON."""
    index, state = checkpoint.index, checkpoint.state
    optimizer = state.get("optimizer")
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.manifest.step,
        "world_size": index.world_size,
        "num_bytes": sum(facts.size for facts in checkpoint.manifest.files.values()),
        "num_parameters_and_buffers": sum(
            tensor.numel for key, tensor in index.tensors.items() if kind_of(key) is Kind.MODEL
        ),
        "files": {name: facts.size for name, facts in sorted(checkpoint.manifest.files.items())},
        "tied": dict(index.tied),
        "optimizer": None if optimizer is None else optimizer["class"],
        "optimizer_states": _states_of(checkpoint),
        "position": state["state"].get("position"),
        "saved_beside": sorted(state["state"]),
        "tensors": [
            {
                "name": name_in_file(key),
                "kind": kind_of(key),
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_slices": len(tensor.slices),
                "num_bytes": _num_bytes(index, key),
                "opaque": tensor.opaque,
            }
            for key, tensor in index.tensors.items()
        ],
    }


def _states_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """A row for each of the optimizer's states, over all parameters."""
    rows: dict[str, dict[str, Any]] = {}
    for key, tensor in checkpoint.index.tensors.items():
        if kind_of(key) is not Kind.OPTIMIZER:
            continue
        state = key.rpartition("/")[2]
        first = {"name": state, "dtype": tensor.dtype, "num_tensors": 0, "num_bytes": 0}
        row = rows.setdefault(state, {**first, "opaque": tensor.opaque})
        row["num_tensors"] += 1
        row["num_bytes"] += _num_bytes(checkpoint.index, key)
    optimizer: dict[str, Any] = checkpoint.state.get("optimizer") or {}
    scalars: dict[str, dict[str, Any]] = optimizer.get("scalars", {})
    for states in scalars.values():
        for state in states:
            first = {"name": state, "dtype": "scalar", "num_tensors": 0, "num_bytes": 0}
            rows.setdefault(state, {**first, "opaque": False})["num_tensors"] += 1
    return list(rows.values())


def _num_bytes(index: Index, key: str) -> int:
    tensor = index.tensors[key]
    return sum(piece.stop - piece.start for piece in tensor.slices) * ITEMSIZE[tensor.dtype]


def _keys_in(index: Index, file: str) -> list[str]:
    return [key for key, t in index.tensors.items() if any(p.file == file for p in t.slices)]
