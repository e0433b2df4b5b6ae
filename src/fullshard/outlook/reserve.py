"""What a GPU holds beyond the bytes that are allocated on it: estimates, each with a reason.

torch's caching allocator asks the driver for segments and gives out blocks of them:

    a request        <= 1 MiB           <= 10 MiB          above
    a segment        2 MiB              20 MiB             itself, rounded up to 2 MiB
    what is left     serves others      serves others,     serves others,
                                        if > 1 MiB         if > 1 MiB

Every block is a multiple of 512 bytes, and the smallest that fits is taken. Our engine makes its
buffers once and keeps them, so their segments follow from the plan. Tensors that come and go leave
holes that nothing else fits into: of these only a share is known, from public runs.

References:
    c10/cuda/CUDACachingAllocator.cpp of PyTorch, whose sizes these are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.outlook.predict import Machine, Outlook
from fullshard.planner.homes import Place
from fullshard.planner.owners import owned_tensors
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE

MIB = 1 << 20
BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
# Outside of the allocator, as public reports have them. A context: 0.3 to 0.5 GB; a communicator of
# NCCL's: about 0.5 GB (https://github.com/NVIDIA/nccl/issues/964: 544 to 688 MB on A100).
CONTEXT = 500 * 10**6
COMMUNICATOR = 500 * 10**6


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that are held and that no tensor has.

    Attributes:
        name: What holds them.
        num_bytes: How many, at most or about.
        why: The reason.
        is_cached: Whether torch counts them as reserved.
    """

    name: str
    num_bytes: int
    why: str
    is_cached: bool = False


def reserve_of(outlook: Outlook, machine: Machine) -> tuple[Reserved, ...]:
    """Beside the rows of a plan; nothing is known of what is no GPU of the table."""
    if machine.device is None:
        return ()
    plan = outlook.plan
    rounding = rounding_bytes(plan)
    holes = outlook.reserved_bytes - outlook.peak_bytes[Place.DEVICE]
    mesh = plan.mesh  # gathers and reductions go apart, and numbers that all ranks share
    num_groups = 2 * (mesh.shard > 1) + (mesh.replicate > 1) + (mesh.world_size > 1)
    blocks = "blocks of 512 B in segments"
    share = "at most: a share of what comes and goes"
    return (
        Reserved("allocator: rounding", rounding, blocks, is_cached=True),
        Reserved("allocator: holes", holes, share, is_cached=True),
        Reserved("context", CONTEXT, "of CUDA, as reported"),
        Reserved("communicators", num_groups * COMMUNICATOR, f"{num_groups} of NCCL, as reported"),
    )


def rounding_bytes(plan: Plan) -> int:
    """What blocks and segments have beyond the buffers that are made once."""
    sizes = list(_kept(plan))
    return segments(sizes) - sum(sizes)


def segments(sizes: list[int]) -> int:
    """Bytes that the allocator reserves for requests that come in this order and stay."""
    total = 0
    small: list[int] = []  # what is left of segments, sorted
    large: list[int] = []
    for size in sizes:
        block = -(-max(size, 1) // BLOCK) * BLOCK
        left, least = (small, BLOCK) if block <= SMALL else (large, SMALL + 1)
        at = bisect_left(left, block)
        if at < len(left):
            rest = left.pop(at) - block
        else:
            segment = _segment(block)
            total += segment
            rest = segment - block
        if rest >= least:
            insort(left, rest)
    return total


def _segment(block: int) -> int:
    if block <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if block < MEDIUM else -(-block // (2 * MIB)) * 2 * MIB


def _kept(plan: Plan) -> Iterator[int]:
    """Sizes of what the first rank's engine and optimizer make on the device, in their order."""
    homes = plan.homes
    for group in (group for unit in plan.units for group in unit.groups):
        part, dtypes = group.layout.part_numel, group.dtypes
        if homes.parameters is Place.DEVICE:
            yield part * ITEMSIZE[dtypes.master]
        if group.trainable and homes.gradients is Place.DEVICE:
            yield part * ITEMSIZE[dtypes.accumulate]
            if dtypes.master is not dtypes.accumulate:
                yield part * ITEMSIZE[dtypes.master]
    for ring in plan.rings:
        yield from [ring.numel * ITEMSIZE[ring.dtype]] * ring.count
    if homes.optimizer is Place.DEVICE:
        yield from _states(plan)


def _states(plan: Plan) -> Iterator[int]:
    """Of the optimizer, parameter by parameter."""
    optimizer = plan.optimizer
    groups = [group for unit in plan.units for group in unit.groups]
    slices = [pieces for unit in plan.view(0).slices for pieces in unit]
    for tensor in owned_tensors([group for group in groups if group.trainable], optimizer):
        if tensor.owner == 0:
            yield optimizer.whole_bytes(tensor.shape, tensor.itemsize)
    for group, pieces in zip(groups, slices, strict=True):
        itemsize = ITEMSIZE[group.dtypes.master]
        for piece in pieces if group.trainable else ():
            if optimizer.owns(piece.name, piece.shape):
                continue
            yield from [optimizer.count_bytes] * bool(optimizer.count_bytes)
            yield from [piece.numel * itemsize] * optimizer.num_states
