"""What a rank holds: at the peak of a step, in every phase of a run, and beyond its tensors.

State is counted by the planner, to the byte (planner/memory.py). Here is what comes on top of it.

[Note: the peak of a step]
The most that one device holds is at one of these moments; formulas from shapes say how much, fitted
to published runs where no module is at hand to be traced:

    backward begins     weights + optimizer                + activations + logits, or a block
    backward ends       weights + optimizer + gradients    + a block
    saving              weights + optimizer + the whole model, where a checkpoint is one file

The allocator holds more: the two moments of backward want pieces of different sizes, so that most
of what the smaller one takes lies beside the larger one.

[Note: phases of a run]

    load -> shard ---> forward -> backward -> optimizer ---> save
      '--> resume ------^------------------------'

Buffers are made once and stay: parameter and gradient shards as weights come in, slots at the end
of `fs.shard`, states and what is received with the first step, the copy that a checkpoint is
written from with the first save. Only what a micro-batch makes comes and goes.

[Note: blocks and segments]
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

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fullshard.config.values import Strategy, parse
from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.workload import (
    Compiler,
    Math,
    Metric,
    Stage,
    Tuning,
    Workload,
)
from fullshard.planner.homes import Place
from fullshard.planner.memory import AVERAGE, WHOLES, MemoryRow, sum_by_place
from fullshard.planner.owners import owned_tensors
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.strategy import row_of
from fullshard.planner.tracing import Kind

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
LORA_SHARE = 0.002  # of the parameters that adapters add, at the usual ranks
NF4_BYTES = 0.56  # 4 bits, and a scale for every 64
FULL = 0.97  # of a device: the allocator gives back what it caches before it fails


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on the device that holds most.

    Attributes:
        weights, optimizer, gradients: State at rest.
        gathered: Blocks and ends that are whole for a while.
        kept: Activations that wait for backward.
        block: Those of one block while it is computed.
        logits: With the loss, and their gradient.
        base: Allocator overhead: library workspaces and fragments too small to use.
        active: The most at once.
        reserved: What the allocator holds for that.
    """

    weights: float
    optimizer: float
    gradients: float
    gathered: float
    kept: float
    block: float
    logits: float
    base: float
    active: float
    reserved: float

    def of(self, metric: Metric) -> float:
        """As the metric counts it."""
        match metric:
            case Metric.ALLOCATED | Metric.ACTIVE:
                return self.active
            case Metric.RESERVED:
                return self.reserved
            case Metric.UNKNOWN:
                return (self.active * self.reserved) ** 0.5


def peak_memory(run: Workload, k: Constants = FITTED) -> PeakMemory:
    """What the device that holds most holds at its peak."""
    weights, optimizer, gradients = _states(run)
    gathered, unreduced = _gathered(run, k)
    kept, block = _activations(run)
    logits = _logits(run, k)
    # Buckets of gradients that are whole are kept from step to step; slices are made anew.
    is_bucketed = run.sharding is not Stage.PARAMETERS and run.mesh.data_ranks > 1
    waiting = gradients if run.batch.accumulation > 1 or is_bucketed else 0.0
    begins = waiting + kept + max(logits, block + unreduced)
    ends = gradients + min(kept, block) + block + unreduced
    rest = weights + optimizer + gathered
    active = rest + max(begins, ends)
    if run.saves_whole:
        held = run.model.num_params / (run.mesh.tensor * run.mesh.pipeline)
        active = max(active, rest + run.precision.master * held)
    base = k.base_gib * GIB
    cached = k.cached_share * (min(begins, ends) - waiting)
    limit = FULL * run.device.memory_gib * GIB
    return PeakMemory(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        gathered=gathered,
        kept=kept,
        block=block,
        logits=logits,
        base=base,
        active=active,
        reserved=max(active, min(active + base + cached, limit)),
    )


def _states(run: Workload) -> tuple[float, float, float]:
    """Weights, optimizer state and gradients at rest."""
    held = run.model.num_params / (run.mesh.tensor * run.mesh.pipeline)
    shard, precision = run.mesh.state_ranks, run.precision
    master, gather = precision.master, precision.gather
    cut = [shard if run.sharding.value >= stage.value else 1 for stage in Stage]
    state = run.state_bytes * (master / 4 if run.state_bytes == 8 else 1)
    if run.tuning is not Tuning.FULL:
        ends = run.model.end_params / run.model.num_params
        stored = master
        if run.tuning is Tuning.QLORA:
            stored = NF4_BYTES * (1 - ends) + 2 * ends
        trained = LORA_SHARE * held / cut[1]
        base = 0.0 if run.offloads else stored * held / cut[3]
        return base + 4 * trained, 8 * trained, 4 * trained
    copies = gather * held if master > gather and run.sharding is not Stage.PARAMETERS else 0.0
    weights = copies + master * held / cut[1 if copies else 3]
    gradient = master if run.sharding is Stage.PARAMETERS else precision.reduce
    gradients = 0.0 if run.updates_in_backward else gradient * held / cut[2]
    if run.mesh.pipeline > 1 and cut[3] > 1:  # gathered and reduced once for all micro-batches
        copies = gather * held
        weights += copies
        gradients += precision.reduce * held
    if run.offloads:
        return copies, 0.0, gradients / 4
    return weights, state * held / cut[1], gradients


def _gathered(run: Workload, k: Constants) -> tuple[float, float]:
    """Weights that are gathered for computing, and gradients that wait for their reduction."""
    mesh, model = run.mesh, run.model
    block = model.held_block_params / mesh.tensor
    if run.sharding is not Stage.PARAMETERS or (mesh.state_ranks == 1 and not run.offloads):
        return 0.0, 0.0
    size = NF4_BYTES if run.tuning is Tuning.QLORA else run.precision.gather
    ends = run.precision.gather
    if run.precision.casts_late:
        size = ends = run.precision.master
    blocks = k.gathered_blocks if run.reshards else model.layers
    if mesh.pipeline > 1:  # all of a stage: part of its state
        blocks = 0
    sums = 2.0  # of gradients: as they come, and as they travel
    if run.kernels.compiler is Compiler.XLA:  # frees what no operation asks for again
        blocks, sums = min(2.0, blocks), 1.0
    trained = 1.0 if run.tuning is Tuning.FULL else 0.0
    gathered = blocks * size * block + ends * model.end_params / mesh.tensor
    return gathered, trained * sums * run.precision.reduce * block


def _activations(run: Workload) -> tuple[float, float]:
    """Bytes that all blocks keep for backward, and those of one block while it is computed.

    The first stage of a pipeline keeps what as many micro-batches as there are stages need.
    """
    model, mesh, kernels = run.model, run.mesh, run.kernels
    tokens = run.tokens_per_micro_batch / (mesh.context * mesh.tensor)
    element = 4.0 if run.precision.math is Math.FLOAT32 else 2.0
    stream = 4.0 if run.precision.casts_late else element
    block = element * _block_elements(run) * tokens
    kept = kernels.kept * block
    inputs = (1 - kernels.kept) * stream * model.width * tokens
    if kernels.by_operation and 0 < kernels.kept < 1:
        kept, inputs = element * _chosen_elements(run) * tokens, stream * model.width * tokens
    layers = model.layers / mesh.pipeline
    if kernels.offloads_activations:
        inputs /= layers
    return layers * (kept + inputs), block / mesh.pipeline


def _block_elements(run: Workload) -> float:
    """Of a block without recompute, a token: what its operations keep for their backward.

        norms        each its input and output; a gated block's RMSNorm by several kernels also
                     the input in float32, which is two, and the normed one in place of the input
        attention    queries, keys, values, its output; without a compiler, keys and values are
                     made as wide as queries
        mlp          both halves of a gate, the activation, the product; or before and after it

    A compiler keeps fewer of what lies between matmuls. Tensor parallelism cuts all of this but the
    norms' outputs, which are gathered.
    """
    model = run.model
    whole = 2 * (run.mesh.tensor - 1) * model.width
    frozen = run.tuning is Tuning.LORA  # needs no gradient, so its input is not kept
    if run.kernels.compiler is not Compiler.NONE:
        attention = 2 * (model.query_width + model.kv_width)
        norms, mlp = 4, 3 if model.gated else 2
    else:
        attention = 4 * model.query_width
        norms, mlp = (8, 4) if model.gated else (4, 2)
    return norms * model.width + whole + attention + (mlp - frozen) * model.mlp_width


def _chosen_elements(run: Workload) -> float:
    """Of a block that recomputes by operation, a token: attention's output, every other matmul's.

    References:
        The habit of torchtitan, whose matmuls are in this order: q, v, gate, down.
    """
    model = run.model
    return 2 * model.query_width + model.kv_width + model.mlp_width + model.width


def _logits(run: Workload, k: Constants) -> float:
    """Logits, what the loss makes of them, their gradient; compiled, the head's gradient too.

    Without a compiler the most is while the loss is differentiated, before there is a gradient of
    the head; a loss over logits that are cut by vocabulary is not compiled.
    """
    mesh, model = run.mesh, run.model
    size = model.vocab * run.tokens_per_micro_batch / (mesh.context * mesh.tensor * mesh.pipeline)
    if run.kernels.compiler is Compiler.NONE or mesh.tensor > 1:
        return k.logits_held * size
    trained = 1.0 if run.tuning is Tuning.FULL else 0.0
    return k.fused_logits * size + trained * run.precision.gather * model.head_params


# ---- whether it fits -----------------------------------------------------------------------------

# What must stay free for the holes between tensors, and for what the plan's estimates miss.
HEADROOM = 0.1


class Fit(StrEnum):
    """Whether a plan fits into a device."""

    FITS = "fits"  # with the headroom left over
    TIGHT = "tight"  # it fits, the headroom does not
    NO = "no"

    def sentence(self, needed_bytes: int, memory_bytes: int) -> str:
        """The verdict with its numbers."""
        share = f"{needed_bytes / memory_bytes:.1%}"
        if needed_bytes > 2 * memory_bytes:
            share = f"{needed_bytes / max(1, memory_bytes):,.1f} times as much"
        match self:
            case Fit.FITS:
                return f"fits, it takes {share}."
            case Fit.TIGHT:
                return f"tight, it takes {share}."
            case Fit.NO:
                return f"will not fit, it would take {share}."


def judge_fit(needed_bytes: int, memory_bytes: int) -> Fit:
    """Judge what the largest rank holds against the memory of a device."""
    if needed_bytes > memory_bytes:
        return Fit.NO
    return Fit.FITS if needed_bytes <= (1 - HEADROOM) * memory_bytes else Fit.TIGHT


# ---- phases of a run -----------------------------------------------------------------------------

LOAD = "load"
WORKSPACES = "libraries' workspaces"
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


DEFAULT_STORAGE = Storage()


@dataclass(frozen=True, slots=True)
class Phase:
    """Peak bytes of the largest rank by place; checkpoints are not in `disk`."""

    name: str
    device: int
    host: int
    disk: int


def phases_of(
    plan: Plan, rows: Sequence[MemoryRow], forward_bytes: int, storage: Storage
) -> tuple[Phase, ...]:
    """All phases, in the order in which a run meets them.

    Args:
        plan: Plan of the run.
        rows: Rows at its peak, activations and all.
        forward_bytes: Peak bytes of the micro-batch before its backward begins.
        storage: What it reads and writes.
    """
    state = tuple(row for row in rows if row.name not in (*Kind, WHOLES))
    resumed = (*_SHARDED, plan.optimizer.row, AVERAGE)
    whole = sum(row.num_bytes for row in rows if row.name in list(Kind))
    owned = sum(row.num_bytes for row in plan.memory if row.name == WHOLES)
    device, host = _reading(plan, storage.source)
    copy = plan.staging_bytes if storage.saves else 0
    largest = max((numel * itemsize for numel, itemsize in _parts(plan)), default=0)
    found = [
        _phase(LOAD, _among(state, _LOADED), device, host),
        _phase("shard", _among(state, _SHARDED)),
        _phase("forward", state, forward_bytes, copy),
        _phase("backward", state, whole, copy),
        _phase("optimizer", state, owned, copy),
        _phase("resume", _among(state, resumed), 0, largest + plan.buffer_bytes),
    ]
    if storage.saves:
        found.insert(-1, _phase("save", state, 0, copy))
    return tuple(found)


def checkpoint_bytes(plan: Plan) -> int:
    """Tensors of one checkpoint, of all ranks; headers and texts come on top."""
    total = float(plan.saved_buffer_bytes)
    for group in plan.groups:
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
    sizes = [(group.layout, ITEMSIZE[group.dtypes.master]) for group in plan.groups]
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


def _parts(plan: Plan) -> Iterator[tuple[int, int]]:
    """Elements that a rank has of each tensor at most, and bytes of one."""
    for group in plan.groups:
        for placement in group.layout.placements:
            numel = min(placement.numel, group.layout.part_numel)
            yield numel, ITEMSIZE[group.dtypes.master]


# ---- beyond what is allocated: estimates, each with a reason -------------------------------------

BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
# Outside of the allocator, as public reports have them. A context: 0.3 to 0.5 GB; a communicator of
# NCCL's: about 0.5 GB (https://github.com/NVIDIA/nccl/issues/964: 544 to 688 MB on A100).
CONTEXT = COMMUNICATOR = GB // 2


@dataclass(frozen=True, slots=True)
class Overhead:
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


def overhead_of(plan: Plan, holes: int) -> tuple[Overhead, ...]:
    """Of a plan on a GPU, beside its rows; holes are what lies between tensors, at most."""
    kept = list(_kept(plan))
    mesh = plan.mesh  # gathers and reductions go apart, and numbers that all ranks share
    num_groups = 2 * (mesh.shard > 1) + (mesh.replicate > 1) + (mesh.world_size > 1)
    blocks = "blocks of 512 B in segments"
    share = "at most: a share of what comes and goes"
    return (
        Overhead("allocator: rounding", segments(kept) - sum(kept), blocks, is_cached=True),
        Overhead("allocator: holes", holes, share, is_cached=True),
        Overhead("context", CONTEXT, "of CUDA, as reported"),
        Overhead("communicators", num_groups * COMMUNICATOR, f"{num_groups} of NCCL, as reported"),
    )


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
    for group in plan.groups:
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
        yield from _kept_states(plan)


def _kept_states(plan: Plan) -> Iterator[int]:
    """Of the optimizer, parameter by parameter."""
    optimizer, groups = plan.optimizer, plan.groups
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


# ---- where only the number of parameters is known ------------------------------------------------

SLOTS = 2  # units that are gathered at once, with a prefetch depth of one


def estimate_fsdp_memory(  # noqa: PLR0913  (the documents' signature, and what they leave out)
    model_params_billions: float,
    world_size: int = 8,
    mixed_precision: bool = True,  # noqa: FBT001, FBT002  the documents' signature
    sharding_strategy: object = "FULL_SHARD",
    *,
    optimizer_bytes: float = 8.0,
    num_units: int = 32,
    ranks_per_host: int = 8,
) -> dict[str, float]:
    """Memory of one rank, activations aside, in GB of 1e9 bytes: a rule of thumb.

    `fs.plan(model, config)` knows it to the byte, of a model and a configuration.

    With P parameters, S ranks that share one copy (all; those of a host for hybrid strategies; one
    under NO_SHARD), U units, c bytes a parameter in compute (2 in mixed precision, else 4), and o
    bytes a parameter of the optimizer's states (8: Adam's two moments in float32):

        params      4 P / S              the float32 master, which mixed precision keeps
        gradients   4 P / S              float32 sums
        optimizer   o P / S
        temporary   gathered weights + unreduced gradients
                    full_shard           c 2P/U + 4 2P/U     two units at once, not the model
                    shard_grad_op        c P    + 4 2P/U     the model stays gathered
                    no_shard             (c P in mixed precision) + 4 2P/U

    Args:
        model_params_billions: P / 1e9.
        world_size: Ranks.
        mixed_precision: Whether weights are computed with in 16 bits.
        sharding_strategy: In any spelling, or torch's ShardingStrategy.
        optimizer_bytes: o.
        num_units: U.
        ranks_per_host: Ranks that hybrid strategies shard over.

    Raises:
        ConfigError: An unknown strategy (a ValueError).
    """
    name = getattr(sharding_strategy, "name", sharding_strategy)
    row = row_of(parse(Strategy, str(name).removeprefix("_"), "sharding_strategy"))
    params = model_params_billions * 1e9
    ranks = min(world_size, ranks_per_host) if row.hybrid else world_size
    shard = ranks if row.shard_params else 1
    compute = 2 if mixed_precision else 4
    window = min(SLOTS, num_units) * params / num_units
    if row.reshard_after_forward:
        gathered = compute * window
    elif row.shard_params:
        gathered = compute * params
    else:
        gathered = compute * params if mixed_precision else 0.0
    found = {
        "params_gb": 4 * params / shard / GB,
        "gradients_gb": 4 * params / shard / GB,
        "optimizer_gb": optimizer_bytes * params / shard / GB,
        "temporary_gb": (gathered + 4 * window) / GB,
    }
    return {**found, "total_gb": sum(found.values())}
