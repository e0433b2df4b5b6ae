"""Groups, manifest and resume decision of a simulated world, for `benchmarks.scale`.

The ranks run the code of a real save: every rank reports the slices of its part of the plan, rank 0
merges them, and a restart selects the checkpoint. No tensor data is written.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.host import fake_group
from fullshard.checkpoint import commit
from fullshard.checkpoint.files import Written
from fullshard.checkpoint.format import (
    COMPLETE,
    INDEX,
    STATE,
    FileFacts,
    Kind,
    StoredSlice,
    StoredTensor,
    file_name,
    key_of,
)
from fullshard.checkpoint.read import choose
from fullshard.config.schema import ShardConfig
from fullshard.planner.mesh import Topology, mesh_of
from fullshard.planner.plan import Plan
from fullshard.transport.base import Axes
from fullshard.transport.groups import own_group

GROUPS, HYBRID, RECORD, MANIFEST, RESUME = (
    "groups",
    "groups, hybrid",
    "record",
    "manifest",
    "resume",
)
STATES = ("", "exp_avg", "exp_avg_sq")
FILE_BYTES = 4096  # size of the sparse files
STEP = 1


def groups_us(worlds: Sequence[int], local: int) -> Iterator[tuple[str, int, float, int]]:
    """Yields (name, world, us, number of groups) of what rank 0 creates under two strategies."""
    for name, strategy in ((GROUPS, "full_shard"), (HYBRID, "hybrid_shard")):
        for world in worlds:
            mesh = mesh_of(ShardConfig.of(None, strategy=strategy), Topology(world, local))
            with fake_group(world):
                start = time.thread_time_ns()
                layouts = mesh.shard_groups(), mesh.shard_groups(), mesh.replicate_groups()
                own_group("all", [range(world)])
                for purpose, layout in zip(("gather", "reduce", "replicate"), layouts, strict=True):
                    own_group(purpose, layout)
                Axes.of(mesh, 0)
                spent = (time.thread_time_ns() - start) / 1e3
                made = 1 + sum(len(layout[0]) > 1 for layout in layouts)
                assert dist.get_world_size() == world
            yield name, world, spent, made


def written_of(plan: Plan, rank: int) -> list[Written]:
    """Returns a rank's files of parameters and AdamW's states."""
    files: dict[Kind, dict[str, StoredTensor]] = {Kind.MODEL: {}, Kind.OPTIMIZER: {}}
    pieces = [s for unit in plan.view(rank).slices for group in unit for s in group]
    for piece in (piece for piece in pieces if piece.start < piece.stop):
        for state in STATES:
            kind = Kind.OPTIMIZER if state else Kind.MODEL
            words = (piece.name, state) if state else (piece.name,)
            checksum = f"{hash((piece.name, state, rank)) & (1 << 128) - 1:032x}"
            stored = StoredSlice(file_name(kind, rank), piece.start, piece.stop, checksum)
            files[kind][key_of(kind, *words)] = StoredTensor("F32", tuple(piece.shape), (stored,))
    facts = FileFacts(FILE_BYTES, f"{rank:032x}")
    return [Written(file_name(kind, rank), facts, tensors) for kind, tensors in files.items()]


def saves_us(plan: Plan, world: int) -> Iterator[tuple[str, int, float, int]]:
    """Yields (name, world, us, bytes) of a rank's record, rank 0's manifest, and a restart."""
    with tempfile.TemporaryDirectory(prefix="fullshard-scale-") as name:
        target, told, spent = Path(name, f"step-{STEP:08d}"), 0, 0
        place = commit.claim(target)
        for rank in range(world):
            written = written_of(plan, rank)
            for file in written:
                with (place.aside / file.name).open("wb") as made:
                    os.truncate(made.fileno(), FILE_BYTES)
            start = time.thread_time_ns()
            commit.join(place, rank)
            commit.report(place, rank, written)
            spent += time.thread_time_ns() - start
            told += place.record(rank).stat().st_size
        yield RECORD, world, spent / 1e3 / world, told // world
        state = {"step": STEP, "world_size": world, "extra": {}, "state": {}}
        documents = commit.Documents(STEP, {STATE: json.dumps(state)}, {})
        before, commit.FAREWELL_S = commit.FAREWELL_S, 0.0  # no rank reads the verdict
        try:
            start = time.process_time_ns()  # includes the threads that read the ranks' records
            commit.conclude(place, world, documents)
            spent = time.process_time_ns() - start
        finally:
            commit.FAREWELL_S = before
        size = sum((target / name).stat().st_size for name in (INDEX, COMPLETE))
        yield MANIFEST, world, spent / 1e3, size
        start = time.thread_time_ns()
        assert choose(commit.ALONE, Path(name), whole=False).step == STEP
        yield RESUME, world, (time.thread_time_ns() - start) / 1e3, size
