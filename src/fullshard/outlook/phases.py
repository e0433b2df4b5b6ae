"""What the largest rank holds in each phase of a run, and what its checkpoints take on disk.

    load -> shard ---> forward -> backward -> optimizer ---> save
      '--> resume ------^------------------------'

Buffers are made once and stay: parameter and gradient shards as weights come in, slots at the end
of `fs.shard`, states and what is received with the first step, the copy that a checkpoint is
written from with the first save. Only what a micro-batch makes comes and goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fullshard.outlook.predict import WORKSPACES, Outlook
from fullshard.planner.activations import Kind
from fullshard.planner.homes import Place
from fullshard.planner.memory import AVERAGE, WHOLES, MemoryRow, sum_by_place
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE

LOAD = "load"
TEACHER = "teacher: "  # before the names of its rows
_LOADED = ("parameter shards", "gradient shards", "shared weights to compute with", "buffers")
_SHARDED = (*_LOADED, WORKSPACES, "slots", "gradient slots")


class Source(StrEnum):
    """Where a run's first weights come from."""

    INITIAL = "the model's own initialisation"
    FOLDER = "a folder, read slice by slice"
    WHOLE = "a folder, loaded whole on every rank"


@dataclass(frozen=True, slots=True)
class Storage:
    """What a run reads and writes.

    Attributes:
        source: Where the first weights come from.
        saves: Whether it saves checkpoints while it trains.
        keep: Complete checkpoints that stay; None: all.
    """

    source: Source = Source.INITIAL
    saves: bool = True
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Peak bytes of the largest rank by place; checkpoints are not in `disk`."""

    name: str
    device: int
    host: int
    disk: int


def phases_of(outlook: Outlook, storage: Storage) -> tuple[Phase, ...]:
    """All phases, in the order in which a run meets them."""
    plan, rows = outlook.plan, outlook.rows
    state = tuple(row for row in rows if row.name not in (*Kind, WHOLES))
    resumed = (*_SHARDED, plan.optimizer.row, AVERAGE)
    whole = sum(row.num_bytes for row in rows if row.name in list(Kind))
    owned = sum(row.num_bytes for row in plan.memory if row.name == WHOLES)
    device, host = _reading(plan, storage.source)
    copy = plan.staging_bytes if storage.saves else 0
    found = [
        _phase(LOAD, _among(state, _LOADED), device, host),
        _phase("shard", _among(state, _SHARDED)),
        _phase("forward", state, outlook.forward_bytes, copy),
        _phase("backward", state, whole, copy),
        _phase("optimizer", state, owned, copy),
        _phase("resume", _among(state, resumed), 0, _largest_part(plan) + plan.buffer_bytes),
    ]
    if storage.saves:
        found.insert(-1, _phase("save", state, 0, copy))
    return tuple(found)


def checkpoint_bytes(plan: Plan) -> int:
    """Tensors of one checkpoint, of all ranks; headers and texts come on top."""
    total = float(plan.saved_buffer_bytes)
    for group in (group for unit in plan.units for group in unit.groups):
        itemsize = ITEMSIZE[group.dtypes.master]
        for placement in group.layout.placements:
            total += itemsize * placement.numel
            if group.trainable:
                total += plan.optimizer.saved_bytes(placement.name, placement.shape, itemsize)
    return math.ceil(total)


def _among(rows: Iterable[MemoryRow], names: Sequence[str]) -> list[MemoryRow]:
    """The student's and the teacher's."""
    return [row for row in rows if row.name.removeprefix(TEACHER) in names]


def _phase(name: str, rows: Iterable[MemoryRow], *more: int) -> Phase:
    """Rows, and bytes beside them on the device and on the host."""
    sums, (device, host) = sum_by_place(rows), (*more, 0, 0)[:2]
    return Phase(name, sums[Place.DEVICE] + device, sums[Place.HOST] + host, sums[Place.DISK])


def _reading(plan: Plan, source: Source) -> tuple[int, int]:
    """What comes and goes while weights come in, on the device and on the host."""
    groups = [group for unit in plan.units for group in unit.groups]
    sizes = [(g.layout, ITEMSIZE[g.dtypes.master]) for g in groups]
    match source:
        case Source.INITIAL:  # all parts of this rank, and the tensor that is drawn just now
            parts = sum(layout.part_numel * itemsize for layout, itemsize in sizes)
            tensors = [p.numel * itemsize for layout, itemsize in sizes for p in layout.placements]
            return 0, parts + max(tensors, default=0)
        case Source.FOLDER:  # this rank's part of a tensor as it is stored, and as a master
            return 0, max(
                (n * (itemsize + (2 if itemsize == 4 else 4)) for n, itemsize in _parts(plan)),
                default=0,
            )
        case Source.WHOLE:
            whole = sum(layout.numel * itemsize for layout, itemsize in sizes)
            return whole, whole


def _largest_part(plan: Plan) -> int:
    """Bytes of the most that a rank has of one tensor."""
    return max((numel * itemsize for numel, itemsize in _parts(plan)), default=0)


def _parts(plan: Plan) -> Iterator[tuple[int, int]]:
    """Elements that a rank has of each tensor at most, and bytes of one."""
    for group in (group for unit in plan.units for group in unit.groups):
        for placement in group.layout.placements:
            numel = min(placement.numel, group.layout.part_numel)
            yield numel, ITEMSIZE[group.dtypes.master]
