"""What a checkpoint holds, and which of its bytes are not those that were written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fullshard.checkpoint.files import checksum_of
from fullshard.checkpoint.format import ITEMSIZE, Index, Kind, kind_of, name_in_file
from fullshard.checkpoint.read import Checkpoint
from fullshard.checkpoint.retain import Found
from fullshard.errors import CheckpointError


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
            if checksum_of(found.path / name, on_bytes) == facts.checksum:
                continue
            why, tensors = "its bytes are not those that were written", list[str]()
            try:
                tensors = checkpoint.damaged_tensors(name)
            except (CheckpointError, OSError):  # the table at its beginning
                why = "its header is not what was written"
                tensors = _keys_in(checkpoint.index, name)
            damages.append(Damage(name, why, tensors))
    return damages


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
