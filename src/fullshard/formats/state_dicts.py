"""State dicts as sources: one file of torch.save, or a file a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format import AVERAGE
from fullshard.errors import CheckpointError
from fullshard.formats.chunks import joined_ranks
from fullshard.formats.hugging_face import check_once
from fullshard.formats.pickles import read_pickle
from fullshard.formats.source import Entry, OptimizerSource, Source

RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")  # around the tensors, in places


def open_pickled(files: Sequence[Path], what: str) -> Source:
    """Files of torch.save with a model's whole tensors."""
    tensors: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    left: list[str] = []
    for file in files:
        state = _unwrapped(read_pickle(file, str(file)))
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
            f"'{files[0]}': expected a model's state dict; got no tensor by name. Save "
            "model.state_dict()."
        )
    return Source(what, tensors, tied, left_out=tuple(left))


def open_rank_files(folder: Path) -> Source:
    """model_world_size_N_rank_R.pt, as verl writes them: the sharded state dict of each rank.

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
            "too, and leave out those of other saves."
        )
    states = [read_pickle(path, str(path)) for _, path in sorted(found.items())]
    entries = {name: joined_ranks(name, [s[name] for s in states]) for name in states[0]}
    left = [f"{name}, which is no tensor" for name, entry in entries.items() if entry is None]
    if any(folder.glob("optim_world_size_*")):
        left.append("the optimizer's states")
    return Source(
        f"the sharded state dicts of {world_size} ranks",
        {name: entry for name, entry in entries.items() if entry is not None},
        left_out=tuple(left),
    )


def optimizer_of(
    states: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> OptimizerSource | None:
    """An optimizer's state dict under parameters' names; None where it is of no known kind.

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


def _kind_of(
    states: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> str | None:
    """The class that has such states: its name is in no state dict."""
    names = {state for values in states.values() for state in values} - {AVERAGE}
    if names and names <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
        decoupled = groups[0].get("decoupled_weight_decay") if groups else None
        return None if decoupled is None else "AdamW" if decoupled else "Adam"
    return "SGD" if names == {"momentum_buffer"} else None


def _unwrapped(state: Any) -> Mapping[str, Any]:
    """The dict that holds the tensors."""
    for _ in WRAPPERS:  # a pickle can hold itself
        inner = next((state[w] for w in WRAPPERS if isinstance(state.get(w), Mapping)), None)
        if inner is None:
            break
        state = inner
    return state
