"""Memory of a plan on the largest rank, by kind: exact for state, without activations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.config.values import DType, GradSync, ReductionKind, TransportKind
from fullshard.planner.layout import ALIGNMENT, Bounds, owned_numels
from fullshard.planner.optimizers import OptimizerStates, owned_tensors
from fullshard.planner.schedule import EventKind
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.units import GroupPlan, Place

if TYPE_CHECKING:
    from fullshard.planner.plan import Plan

AVERAGE = "average of the weights"
WHOLES = "whole tensors of owners"
# direct reads and writes of state on disk: two of pieces, others of turns of an optimizer's update
DISK_PIECE, DISK_ROOM, NUM_DISK_ROOMS = 4 << 20, 16 << 20, 3
DISK_BUFFERS = "buffers of state on disk"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One kind of memory on one rank."""

    name: str
    num_bytes: int
    place: Place = Place.DEVICE


def sum_by_place(rows: Iterable[MemoryRow]) -> dict[str, int]:
    """Returns bytes on the device, the host and the disk.

    Memory that the ranks of a host share counts as device memory, since they compute on the CPU.
    """
    found: dict[str, int] = dict.fromkeys((Place.DEVICE, Place.HOST, Place.DISK), 0)
    for row in rows:
        found[Place.DEVICE if row.place is Place.SHARED else row.place] += row.num_bytes
    return found


def state_rows(plan: Plan) -> tuple[MemoryRow, ...]:
    """Returns the bytes of the largest rank: shards, slots, optimizer, buffers."""
    groups, rings, homes, optimizer = plan.groups, plan.rings, plan.homes, plan.optimizer
    averages = OptimizerStates("", optimizer.num_averages)
    trained = [group for group in groups if group.trainable]
    compute = sum(
        g.layout.part_numel * ITEMSIZE[g.dtypes.compute]
        for g in groups
        if g.shared and g.dtypes.compute is not g.dtypes.master
    )
    master = sum(g.layout.part_numel * ITEMSIZE[g.dtypes.master] for g in groups)
    grads = sum(g.layout.part_numel * gradient_bytes(g) for g in trained)
    rows = (
        MemoryRow("parameter shards", master, homes.parameters),
        MemoryRow("gradient shards", grads, homes.gradients),
        MemoryRow(optimizer.row, optimizer_bytes(trained, optimizer), homes.optimizer),
        MemoryRow(AVERAGE, optimizer_bytes(trained, averages), homes.optimizer),
        MemoryRow("shared weights to compute with", compute, homes.parameters),
        MemoryRow("slots", sum(r.num_bytes for r in rings if not r.name.endswith(".grad"))),
        MemoryRow("gradient slots", sum(r.num_bytes for r in rings if r.name.endswith(".grad"))),
        MemoryRow("communication buffers", communication_bytes(plan)),
        MemoryRow("buffers", plan.buffer_bytes),
        MemoryRow("deferred gradients", deferred_bytes(plan)),
        MemoryRow(WHOLES, whole_bytes(trained, optimizer)),
    )
    on_disk = [row.num_bytes for row in rows if row.place is Place.DISK]
    rooms = 2 * DISK_PIECE * (Place.DISK in (homes.parameters, homes.gradients))
    rooms += bool(trained) * NUM_DISK_ROOMS * DISK_ROOM
    rows = (*rows, MemoryRow(DISK_BUFFERS, min(sum(on_disk), rooms), Place.HOST))
    rare = (AVERAGE, DISK_BUFFERS, WHOLES, "shared weights to compute with", "deferred gradients")
    return tuple(row for row in rows if row.num_bytes or row.name not in rare)


def optimizer_bytes(trained: Sequence[GroupPlan], optimizer: OptimizerStates) -> int:
    """Returns the bytes of optimizer states on the rank with the most; states have no padding."""
    sizes: dict[tuple[Bounds, int, int], float] = {}
    counts = 0
    for group in trained:
        layout = group.layout
        mine = [p for p in layout.placements if not optimizer.owns(p.name, p.shape)]
        counts += optimizer.count_bytes * len(mine)
        key = (tuple((p.offset, p.stop) for p in mine), layout.num_parts, layout.part_numel)
        element = optimizer.element_bytes(ITEMSIZE[group.dtypes.master])
        sizes[key] = sizes.get(key, 0.0) + element
    parts: dict[int, list[float]] = {}  # bytes of each part, by number of parts
    for (bounds, num_parts, part_numel), element in sizes.items():
        sums = parts.setdefault(num_parts, [0.0] * num_parts)
        for part, numel in enumerate(owned_numels(bounds, num_parts, part_numel)):
            sums[part] += element * numel
    tables: dict[int, list[int]] = {}
    for tensor in owned_tensors(trained, optimizer):
        sums = parts.setdefault(tensor.num_parts, [0.0] * tensor.num_parts)
        sums[tensor.owner] += optimizer.whole_bytes(tensor.shape, tensor.itemsize)
        most = tables.setdefault(tensor.num_parts, [0] * tensor.num_parts)
        most[tensor.owner] = max(most[tensor.owner], optimizer.table_bytes(tensor.shape))
    for num_parts, most in tables.items():
        parts[num_parts] = [a + b for a, b in zip(parts[num_parts], most, strict=True)]
    return counts + math.ceil(sum(max(sums) for sums in parts.values()))


def whole_bytes(trained: Sequence[GroupPlan], optimizer: OptimizerStates) -> int:
    """Returns the most bytes of an owner in an update: whole tensors, gradients, temporaries."""
    held: dict[tuple[int, int, int], int] = {}
    for tensor in owned_tensors(trained, optimizer):
        key = tensor.num_parts, tensor.turn, tensor.owner
        held[key] = held.get(key, 0) + tensor.held_bytes
    return int(max(held.values(), default=0) * (1 + optimizer.num_temporaries / 2))


def staging_bytes(plan: Plan) -> int:
    """Returns the most host bytes that a rank copies to save in the background.

    The replicas of a shard take turns: each saves some of the units.
    """
    by_turn: dict[int, int] = {}
    owned, sliced = 0, plan.optimizer
    if sliced.owned is not None:
        owned = optimizer_bytes([g for g in plan.groups if g.trainable], sliced)
        sliced = OptimizerStates("", sliced.num_averages)
    for unit in plan.units:
        for group in unit.groups:
            itemsize = ITEMSIZE[group.dtypes.master]
            element = itemsize + sliced.kept_bytes(itemsize) * group.trainable
            turn = unit.index % unit.mesh.replicate
            size = math.ceil(element * group.layout.part_numel)
            by_turn[turn] = by_turn.get(turn, 0) + size
    return max(by_turn.values(), default=0) + owned


def deferred_bytes(plan: Plan) -> int:
    """Return the bytes of gradients that are deferred to the last micro-batch of a step."""
    is_outer = plan.grad_sync is GradSync.LAST_MICRO_BATCH_OUTER
    has_replicas = any(unit.mesh.replicate > 1 for unit in plan.units)
    if plan.grad_sync is GradSync.EVERY_MICRO_BATCH or (is_outer and not has_replicas):
        return 0
    trained = [group for group in plan.groups if group.trainable]
    sizes = [(g, g.layout.part_numel if is_outer else g.layout.numel) for g in trained]
    return sum(numel * ITEMSIZE[group.dtypes.accumulate] for group, numel in sizes)


def most_spilled_bytes(plan: Plan) -> int:
    """Returns the most bytes of gradients that come in another order than the plan's.

    In the plan's order, a gradient slot is free when the next unit needs it. In the worst case all
    other units wait, each in a buffer of its own, until the first one is reduced.
    """
    sizes: dict[tuple[str, int], Counter[int]] = {}  # of units, by slot
    for unit in plan.units:
        for group in unit.groups:
            if group.grad_slot is not None:
                slot = sizes.setdefault((group.grad_slot.ring, group.grad_slot.index), Counter())
                slot[unit.index] += group.layout.numel * ITEMSIZE[group.dtypes.reduce]
    return sum(slot.total() - min(slot.values()) for slot in sizes.values())


def gradient_bytes(group: GroupPlan) -> int:
    """Returns bytes per element of a gradient shard: the sum, and `p.grad` if its dtype differs."""
    dtypes = group.dtypes
    shown = ITEMSIZE[dtypes.master] if dtypes.master is not dtypes.accumulate else 0
    return ITEMSIZE[dtypes.accumulate] + shown


def communication_bytes(plan: Plan, *, accumulates: bool = False) -> int:
    """Returns the bytes of a transport's receive buffers, by replaying the events of a step.

    A reduction uses its buffers from REDUCE to ACCUMULATE. Freed buffers are reused, the smallest
    that fits first. The direct transport receives one part from every peer, c10d one from every
    rank for ordered sums, and all other sums in the gradient slots.
    Replicas exchange chunks of a part during the backward of the next units. Gradients are received
    in a device buffer first if their home is the host, or if they are added to an earlier sum. A
    copy to the host runs until the next unit's sum lands.

    Args:
        plan: A plan with the events of a step.
        accumulates: Whether several micro-batches are reduced into one sum.
    """
    pool = _Pool()
    lent: dict[int, list[_Buffer]] = {}
    landing: list[Iterator[None]] = []
    to_host, how = plan.homes.gradients is not Place.DEVICE, (plan.transport, plan.reduction)
    for event in plan.events:
        if event.kind is EventKind.REDUCE:
            wanted = _received(plan.units[event.unit].groups, *how)
            lent[event.unit] = [pool.take(dtype, numel) for dtype, numel in wanted]
        elif event.kind is EventKind.ACCUMULATE:
            unit = plan.units[event.unit]
            trained = [group for group in unit.groups if group.trainable]
            sizes = [(g.dtypes.accumulate, g.layout.part_numel) for g in trained]
            aside = [pool.take(*size) for size in sizes if accumulates or to_host]
            pool.give(lent.pop(event.unit))
            landing = [steps for steps in landing if next(steps, _ENDED) is not _ENDED]
            for at, group in enumerate(trained):
                sent = _exchanged(group, *how, unit.mesh.replicate)
                room = sizes[at : at + 1] if accumulates else []
                steps = _land(pool, sent, aside[at : at + 1], room if to_host else None)
                landing += [steps] if next(steps, _ENDED) is not _ENDED else []
    while landing:
        landing = [steps for steps in landing if next(steps, _ENDED) is not _ENDED]
    return pool.num_bytes


def _land(
    pool: _Pool,
    exchanged: Sequence[Sequence[_Buffer]] | None,
    landed: Sequence[_Buffer],
    room: Sequence[_Buffer] | None,
) -> Iterator[None]:
    """The buffers of a sum on its way to its shard, step by step, as in `Gradients._land`.

    Args:
        pool: Lends the buffers.
        exchanged: Receive buffer and sum buffer of replicas; None without replicas.
        landed: The buffer of the sum, if it is not the gradient shard.
        room: Buffers of earlier sums that are added on the device; None if the shard is there.
    """
    if exchanged is not None:
        received = [pool.take(*buffer) for buffer in exchanged[0]]
        yield
        pool.give([*(pool.take(*buffer) for buffer in exchanged[1]), *received])
        if exchanged[1]:
            yield
    if room is not None:
        lent = [pool.take(*size) for size in room]
        yield
        pool.give(lent)
    pool.give(landed)


_ENDED = object()
_Buffer = tuple[DType, int]


class _Pool:
    """Counts of a transport's scratch buffers by size; thousands of peers share one size."""

    def __init__(self) -> None:
        self._free: Counter[_Buffer] = Counter()
        self.num_bytes = 0

    def take(self, dtype: DType, numel: int) -> _Buffer:
        fitting = [
            b for b, count in self._free.items() if count and b[0] is dtype and b[1] >= numel
        ]
        if fitting:
            best = min(fitting, key=lambda b: b[1])
            self._free[best] -= 1
            return best
        self.num_bytes += numel * ITEMSIZE[dtype]
        return dtype, numel

    def give(self, buffers: Sequence[_Buffer]) -> None:
        self._free.update(buffers)


def _received(
    groups: Sequence[GroupPlan], transport: TransportKind, reduction: ReductionKind
) -> list[_Buffer]:
    """The receive buffers of one unit's reduction."""
    found: list[_Buffer] = []
    for group in (group for group in groups if group.trainable and group.layout.num_parts > 1):
        parts, dtype = group.layout.num_parts, group.dtypes.reduce
        if transport is TransportKind.DIRECT:
            found += [(dtype, group.layout.part_numel)] * (parts - 1)
        elif transport is not TransportKind.SHARED and reduction.is_ordered(ITEMSIZE[dtype], parts):
            found.append((dtype, group.layout.numel))  # other sums are received in gradient slots
    return found


def _exchanged(
    group: GroupPlan, transport: TransportKind, reduction: ReductionKind, replicate: int
) -> tuple[list[_Buffer], list[_Buffer]] | None:
    """Receive buffer and sum buffer of the largest replica's chunk."""
    if replicate == 1:
        return None
    dtype, numel = group.dtypes.accumulate, group.layout.part_numel
    if transport in (TransportKind.DIRECT, TransportKind.SHARED):
        chunk = dtype, ALIGNMENT * -(-(numel // ALIGNMENT) // replicate)
        return [chunk] * (replicate - 1), [chunk]
    ordered = reduction.is_ordered(ITEMSIZE[dtype], replicate)
    return [(dtype, numel * replicate)] * ordered, []
