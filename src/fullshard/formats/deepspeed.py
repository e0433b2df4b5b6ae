"""DeepSpeed's ZeRO checkpoints: fp32 masters in flat vectors, cut over the ranks.

    stages 1, 2   a group's parameters one after another in one vector, of which each rank has a
    part            mp_rank_00_model_states.pt   *zero_pp_rank_R_*_optim_states.pt
    stage 3       each parameter is cut over the ranks separately, padded to equal parts; a rank's
                  vector has its parts one after another
                                  zero_pp_rank_R_mp_rank_00_model_states.pt   ..._optim_states.pt

The model states list the parameters' names and shapes in the order of the vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.config.regular_files import read_regular
from fullshard.errors import CheckpointError
from fullshard.formats.source import Entry, Source
from fullshard.formats.state_dicts import flat, read_pickle

Tables = Sequence[Mapping[str, Any]]
MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
_RANK = re.compile(r"(?:.*zero_pp_rank_(\d+)_)?mp_rank_(\d+)_\w+\.pt")


def steps_folder(path: Path) -> Path | None:
    """The folder of a step: this folder, or the one named in `latest`; None if there is none."""
    latest = path / "latest"
    if latest.exists():
        name = read_regular(latest, 4096).decode().strip()
        if Path(name).name != name:
            raise ValueError(f"{name!r} in {latest} instead of a folder beside it")
        path = path / name
    return path if any(path.glob(f"*mp_rank_*_{MODEL}")) else None


def open_deepspeed(folder: Path) -> Source:
    """Opens the masters of all ranks, and the buffers.

    Raises:
        CheckpointError: A rank's files are missing, or the model used tensor parallelism.
    """
    models = [read_pickle(path, str(path)) for path in _files(folder, MODEL)]
    facts: dict[str, Any] = models[0]
    optimizers = [read_pickle(p, str(p))["optimizer_state_dict"] for p in _files(folder, OPTIMIZER)]
    what, left = "a DeepSpeed checkpoint", ("the optimizer's states",)
    step = facts.get("global_steps")
    if not optimizers:  # without ZeRO the module is stored whole
        tensors = {n: Entry.of(v) for n, v in facts["module"].items() if torch.is_tensor(v)}
        return Source(what, tensors, step=step, left_out=left)
    stage = 3 if "fp32_flat_groups" in optimizers[0] else 2  # its own value is an enum
    ranks = optimizers[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else int(ranks)
    if len(optimizers) != ranks:
        raise CheckpointError(
            f"'{folder}': expected *_{OPTIMIZER} of {ranks} ranks; got {len(optimizers)}. "
            "Copy the others too."
        )
    whole = facts.get("buffer_names") or () if stage == 3 else facts["module"]
    tensors = {
        n: Entry.of(facts["module"][n]) for n in whole if torch.is_tensor(facts["module"][n])
    }
    tensors |= _frozen(models, stage)
    merge = _zero3 if stage == 3 else _zero2
    tensors |= dict(merge(facts["param_shapes"], optimizers))
    shared: Mapping[str, str] = dict(facts.get("shared_params") or {})
    tied = {name: first for name, first in shared.items() if first in tensors}
    tensors = {name: entry for name, entry in tensors.items() if name not in tied}
    return Source(f"{what} of ZeRO stage {stage}", tensors, tied, step=step, left_out=left)


def _files(folder: Path, what: str) -> list[Path]:
    """The files in rank order."""
    found: list[tuple[int, Path]] = []
    for path in folder.glob(f"*mp_rank_*_{what}"):
        match = _RANK.fullmatch(path.name)
        if match is None or int(match.group(2)) > 0 or "expert" in path.name:
            raise CheckpointError(
                f"{path}: expected only data parallelism; this model was also cut in other ways. "
                "Convert it with DeepSpeed's own ds_to_universal.py or zero_to_fp32."
            )
        found.append((int(match.group(1) or 0), path))
    if [rank for rank, _ in sorted(found)] != list(range(len(found))):
        raise CheckpointError(
            f"'{folder}': expected one *_{what} per rank, from 0; got "
            f"{', '.join(path.name for _, path in sorted(found))}. Remove those of other saves."
        )
    return [path for _, path in sorted(found)]


def _zero2(groups: Tables, optimizers: Tables) -> Iterator[tuple[str, Entry]]:
    paddings = optimizers[0].get("param_alignment_paddings")
    for at, shapes in enumerate(groups):
        parts = [states["single_partition_of_fp32_groups"][at] for states in optimizers]
        start = 0
        for number, (name, shape) in enumerate(shapes.items()):
            yield name, flat(name, parts, start, tuple(shape))
            start += math.prod(shape) + (paddings[at][number] if paddings else 0)
        total, unit = sum(part.numel() for part in parts), 2 * len(parts)  # DeepSpeed's alignment
        if not paddings and -(-start // unit) != -(-total // unit):
            raise CheckpointError(
                f"param_shapes: expected {start:,} elements in group {at}, got {total:,} in the "
                "files of all ranks. Name a folder with the files of one save."
            )


def _zero3(groups: Tables, optimizers: Tables) -> Iterator[tuple[str, Entry]]:
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    flats = [list(states["fp32_flat_groups"]) for states in optimizers]
    start = 0
    for name, shape in shapes.items():
        count = -(-math.prod(shape) // len(flats))
        own = [flat(name, vectors, start, (count,)) for vectors in flats]
        yield name, _cut_over_ranks(own, shape)
        start += count


def _frozen(models: Tables, stage: int) -> dict[str, Entry]:
    """Frozen parameters, which are in the model states because they have no masters."""
    shapes: Mapping[str, Any] = models[0].get("frozen_param_shapes") or {}
    found: dict[str, Entry] = {}
    for name, shape in shapes.items():
        ranks = models if stage == 3 else models[:1]
        parts = [Entry.of(model["frozen_param_fragments"][name].reshape(-1)) for model in ranks]
        found[name] = _cut_over_ranks(parts, tuple(shape))
    return found


def _cut_over_ranks(parts: Sequence[Entry], shape: tuple[int, ...]) -> Entry:
    """Joins the parts of all ranks; the last ones are padded."""

    def read() -> torch.Tensor:
        return torch.cat([part.read() for part in parts])[: math.prod(shape)].view(shape)

    return Entry(parts[0].dtype, shape, read)
