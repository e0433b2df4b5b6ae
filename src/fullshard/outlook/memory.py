"""Memory of a rank: at the peak of a step, in every phase of a run, and beyond its tensors.

The planner counts state, to the byte (planner/memory.py). This module adds the rest.

[Note: the peak of a step]
The peak of a device is at one of these moments. Without a module to trace, formulas from shapes
estimate it; their constants were fitted to published runs.

    backward begins     weights + optimizer                + activations + logits, or a block
    backward ends       weights + optimizer + gradients    + a block
    saving              weights + optimizer + the whole model, if a checkpoint is one file

The allocator reserves more. The two moments of backward allocate blocks of different sizes, so the
larger one cannot reuse most of the memory of the smaller one. That share was fitted to the reserved
bytes of published runs, which include the rounding to blocks of 512 bytes and segments of 2 MiB.

[Note: phases of a run]

    load -> shard ---> forward -> backward -> optimizer ---> save
      '--> resume ------^------------------------'

Most buffers are allocated once and stay: parameter and gradient shards while weights are read,
slots at the end of `fs.shard`, optimizer states and receive buffers in the first step, the copy for
checkpoints at the first save. Only the tensors of a micro-batch are temporary.

[Note: memory on XLA]
The peak of a step, beyond its state, is the larger of two moments.

    the head        saved activations, the gathered head, logits, gradient of the head's weight
    the last block  saved activations, gradient shards, that gradient, one block and its gradients

The saved activations are read from the traced program (xla/aot.py); a cotangent reuses the
memory of its activation. `fullshard plan --exact` compiles the step and compares.

The rules for compilers were observed in their buffers. Compilers for accelerators fuse the
exponentials of the loss, and allocate the gradient shards of blocks after the logits are freed. The
CPU compiler allocates two more arrays of the size of the logits (exponentials, gradient of the
labels) and frees one of them before the gradient of the head's weight. It allocates zeros for the
blocks' gradients, and for the whole gradient of the embedding (unless the head is tied), before
everything else, and shards each gradient at once.

A head in chunks (xla/loss.py) computes gradients together with logits. It also has the sum over the
earlier chunks, which exists until the blocks' backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fullshard.config.values import Strategy, parse
from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.workload import Compiler, Math, Metric, Stage, Tuning, Workload
from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.memory import AVERAGE, WHOLES, MemoryRow, sum_by_place
from fullshard.planner.mesh import row_of
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.tracing import TensorKind
from fullshard.planner.units import Place

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
LORA_SHARE = 0.002  # parameters that adapters of usual ranks add, as a share of the model's
NF4_BYTES = 0.56  # 4 bits, and a scale for every 64 parameters
FULL = 0.97  # of a device: the allocator frees its cache before it fails


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on the device with the most, at its peak.

    Attributes:
        weights, optimizer, gradients: State at rest.
        gathered: Gathered blocks, embedding and head.
        kept: Activations saved for backward.
        block: Activations of one block while it is computed.
        logits: Logits, loss, and their gradients.
        base: Library workspaces and fragments that are too small to reuse.
        active: Peak of allocated bytes.
        reserved: Peak of bytes that the allocator reserves.
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
        """Returns the peak as a metric counts it."""
        if metric is Metric.UNKNOWN:
            return (self.active * self.reserved) ** 0.5
        return self.reserved if metric is Metric.RESERVED else self.active


def peak_memory(run: Workload, k: Constants = FITTED) -> PeakMemory:
    """Returns the peak of the device with the most, by formula."""
    weights, optimizer, gradients = _states(run)
    gathered, unreduced = _gathered(run, k)
    kept, block = _activations(run)
    logits = _logits(run, k)
    # Buckets of whole gradients are kept between steps; sharded gradients are allocated again.
    is_bucketed = run.sharding is not Stage.PARAMETERS and run.mesh.data_ranks > 1
    waiting = gradients if run.batch.accumulation > 1 or is_bucketed else 0.0
    begins = waiting + kept + max(logits, block + unreduced)
    ends = gradients + min(kept, block) + block + unreduced
    rest = weights + optimizer + gathered
    active = rest + max(begins, ends)
    if run.saves_whole:
        whole = run.precision.master * run.model.num_params / run.mesh.tensor / run.mesh.pipeline
        active = max(active, rest + whole)
    base = k.base_gib * GIB
    cached = k.cached_share * (min(begins, ends) - waiting)
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
        reserved=max(active, min(active + base + cached, FULL * run.device.memory_gib * GIB)),
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
    """Bytes of gathered weights, and of gradients before their reduction."""
    mesh, model = run.mesh, run.model
    block = model.held_block_params / mesh.tensor
    if run.sharding is not Stage.PARAMETERS or (mesh.state_ranks == 1 and not run.offloads):
        return 0.0, 0.0
    size = NF4_BYTES if run.tuning is Tuning.QLORA else run.precision.gather
    ends = run.precision.gather
    if run.precision.casts_late:
        size = ends = run.precision.master
    blocks = k.gathered_blocks if run.reshards else model.layers
    if mesh.pipeline > 1:  # a stage is gathered as a whole and counts as state
        blocks = 0
    sums = 2.0  # gradients of a block: as computed, and in the reduction
    if run.kernels.compiler is Compiler.XLA:  # frees a buffer after its last use
        blocks, sums = min(2.0, blocks), 1.0
    trained = 1.0 if run.tuning is Tuning.FULL else 0.0
    gathered = blocks * size * block + ends * model.end_params / mesh.tensor
    return gathered, trained * sums * run.precision.reduce * block


def _activations(run: Workload) -> tuple[float, float]:
    """Bytes that all blocks save for backward, and activations of one block being computed.

    The first stage of a pipeline saves activations of as many micro-batches as there are stages.
    """
    model, mesh, kernels = run.model, run.mesh, run.kernels
    tokens = run.tokens_per_micro_batch / (mesh.context * mesh.tensor)
    element = 4.0 if run.precision.math is Math.FLOAT32 else 2.0
    stream = 4.0 if run.precision.casts_late else element
    block = element * _block_elements(run) * tokens
    kept = kernels.kept * block
    whole = mesh.tensor if mesh.is_partial else 1
    inputs = (1 - kernels.kept) * stream * model.width * tokens * whole
    if kernels.by_operation and 0 < kernels.kept < 1:
        kept, inputs = element * _chosen_elements(run) * tokens, stream * model.width * tokens
    layers = model.layers / mesh.pipeline
    if kernels.offloads_activations:
        inputs /= layers
    return layers * (kept + inputs), block / mesh.pipeline


def _block_elements(run: Workload) -> float:
    """Elements per token that a block saves for backward without recompute.

        norms        input and output of each; RMSNorm by several kernels (gated blocks) also saves
                     its input in float32, which counts twice
        attention    queries, keys, values and the output; without a compiler, keys and values are
                     expanded to the width of queries
        mlp          both halves of a gate, the activation and the product; or the inner
                     activations before and after the nonlinearity

    A compiler saves less between matmuls. Tensor parallelism shards everything but the outputs of
    norms, which are gathered.
    """
    model = run.model
    others = run.mesh.tensor - 1
    whole = 2 * others * model.width
    frozen = run.tuning is Tuning.LORA  # a frozen matmul does not save its input
    if run.kernels.compiler is not Compiler.NONE:
        attention = 2 * (model.query_width + model.kv_width)
        norms, mlp = 4, 3 if model.gated else 2
    else:
        attention = 4 * model.query_width
        norms, mlp = (8, 4) if model.gated else (4, 2)
    if run.mesh.is_partial:
        whole = norms * others * model.width
    return norms * model.width + whole + attention + (mlp - frozen) * model.mlp_width


def _chosen_elements(run: Workload) -> float:
    """Elements per token that a block saves if it keeps attention and every other matmul.

    References:
        torchtitan's selective recompute, whose kept matmuls are q, v, gate and down.
    """
    model = run.model
    return 2 * model.query_width + model.kv_width + model.mlp_width + model.width


def _logits(run: Workload, k: Constants) -> float:
    """Bytes of logits, loss and their gradients; of a compiled loss, the head's gradient too.

    Without a compiler the peak is in the backward of the loss, before the head has a gradient. A
    loss over logits that are sharded by vocabulary is not compiled.
    """
    mesh, model = run.mesh, run.model
    tensor = 1 if mesh.is_partial else mesh.tensor
    size = model.vocab * run.tokens_per_micro_batch / (mesh.context * tensor * mesh.pipeline)
    if run.kernels.compiler is Compiler.NONE or mesh.tensor > 1:
        return k.logits_held * size
    trained = 1.0 if run.tuning is Tuning.FULL else 0.0
    return k.fused_logits * size + trained * run.precision.gather * model.head_params


# ---- on XLA -------------------------------------------------------------------------------------

WIDE = 4  # bytes, at least, of the logits that the loss is computed from


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a device's micro-batch.

    Attributes:
        num_logits: Tokens times vocabulary, per chunk of tokens.
        kept_bytes: Bytes of activations saved for backward.
        gathered_bytes: Bytes of the blocks' gathered parameters saved for backward.
        block_bytes: Bytes that one block saves without recompute.
        accumulates: Whether gradients of several micro-batches are summed.
        on_cpu: Whether XLA compiles for the CPU.
        num_chunks: Number of chunks of the head; 0: all logits at once.
    """

    num_logits: int
    kept_bytes: int
    gathered_bytes: int
    block_bytes: int
    accumulates: bool
    on_cpu: bool
    num_chunks: int = 0


def at_peak(table: ArraysPlan, shape: StepShape) -> tuple[MemoryRow, ...]:
    """Returns memory rows of a device that add up to its peak. See [Note: memory on XLA]."""
    whole = {"gradient shards", "gathered arrays"}
    always = [row for row in table.memory if row.name not in whole]
    always.append(MemoryRow("activations", shape.kept_bytes))
    if shape.accumulates:
        always.append(_gradient_shards(table.arrays, table, "sum of gradients"))
    moments = (_at_the_head(table, shape), _at_a_block(table, shape))
    return (*always, *max(moments, key=lambda rows: sum(row.num_bytes for row in rows)))


def _at_the_head(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside, blocks = _large(table, inside=False), _large(table, inside=True)
    gathered = max((a.whole_bytes("compute") for a in _parted(outside)), default=0)
    gradient = _largest_gradient(outside)
    of_chunk = _largest_gradient(outside, "compute") if shape.num_chunks > 1 else 0
    compute = max(ITEMSIZE[array.dtypes.compute] for array in table.arrays)
    wide = max(compute, WIDE)
    one = wide * shape.num_logits
    rows = [MemoryRow("gathered arrays", gathered + shape.gathered_bytes)]
    if shape.on_cpu:
        return [
            *rows,
            _gradient_shards(blocks, table),
            MemoryRow("gradient of the embedding", gradient * (len(outside) > 1)),
            MemoryRow("logits", one if shape.num_chunks else 2 * one),
            MemoryRow("gradient of the head", max(one, gradient) + of_chunk),
        ]
    logits = (wide + compute) * shape.num_logits
    return [
        *rows,
        MemoryRow("logits", logits),
        MemoryRow("gradient of the head", gradient + of_chunk),
    ]


def _at_a_block(table: ArraysPlan, shape: StepShape) -> list[MemoryRow]:
    outside, blocks = _large(table, inside=False), _large(table, inside=True)
    parted = _parted(blocks)
    one = sum(a.whole_bytes("compute") for a in parted)
    gradients = _gradient_shards(table.arrays, table)
    sizes = {a.name: a.whole_bytes("reduce") for a in parted if a.trainable}
    # The loop over blocks of experts makes the gradients of all experts; see xla/decoder.py.
    experts = (a for a in blocks if a.trainable and ".experts." in a.name)
    most = max([sum(a.whole_bytes("reduce") for a in experts), *sizes.values()])
    head = _largest_gradient(_parted(outside))
    return [
        *([] if shape.accumulates and not shape.on_cpu else [gradients]),
        MemoryRow("gathered arrays", one if table.reshards else shape.gathered_bytes),
        MemoryRow("one block", shape.block_bytes),
        MemoryRow("its gradients", most if shape.on_cpu else sum(sizes.values())),
        MemoryRow("gradient of the embedding" if shape.on_cpu else "gradient of the head", head),
        *[MemoryRow("gradient of the head", head)] * (shape.on_cpu and shape.num_chunks > 1),
    ]


def _large(table: ArraysPlan, *, inside: bool) -> list[ArrayPlan]:
    """The arrays of two or more dimensions inside or outside of blocks."""
    return [a for a in table.arrays if bool(a.block) == inside and len(a.shape) > 1]


def _parted(arrays: Sequence[ArrayPlan]) -> list[ArrayPlan]:
    """The sharded arrays."""
    return [array for array in arrays if array.cut.dim is not None]


def _largest_gradient(arrays: Sequence[ArrayPlan], kind: str = "reduce") -> int:
    return max((a.whole_bytes(kind) for a in arrays if a.trainable), default=0)


def _gradient_shards(
    arrays: Sequence[ArrayPlan], table: ArraysPlan, name: str = "gradient shards"
) -> MemoryRow:
    parts = (table.own_numel(a) * ITEMSIZE[a.dtypes.accumulate] for a in arrays if a.trainable)
    return MemoryRow(name, sum(parts))


# ---- whether it fits -----------------------------------------------------------------------------

# Share of a device that must stay free, for holes between tensors and errors of the estimates.
HEADROOM = 0.1


class Fit(StrEnum):
    """Whether a plan fits into a device."""

    FITS = "fits"  # with the headroom free
    TIGHT = "tight"  # but less than the headroom is free
    NO = "no"

    def sentence(self, needed_bytes: int, memory_bytes: int) -> str:
        """Returns the verdict with its numbers."""
        share = f"{needed_bytes / max(1, memory_bytes):.1%} of"
        if needed_bytes > 2 * memory_bytes:
            share = f"{needed_bytes / max(1, memory_bytes):,.1f} times"
        verdict = "does not fit" if self is Fit.NO else str(self)
        return f"{verdict}: needs {share} the memory."


def judge_fit(needed_bytes: int, memory_bytes: int) -> Fit:
    """Compares the memory of the largest rank with that of a device."""
    if needed_bytes > memory_bytes:
        return Fit.NO
    return Fit.FITS if needed_bytes <= (1 - HEADROOM) * memory_bytes else Fit.TIGHT


# ---- phases of a run -----------------------------------------------------------------------------

LOAD = "load"
WORKSPACES = "libraries' workspaces"
TEACHER = "teacher: "  # prefix of its rows' names
_LOADED = ("parameter shards", "gradient shards", "shared weights to compute with", "buffers")
_SHARDED = (*_LOADED, WORKSPACES, "slots", "gradient slots")


class WeightsSource(StrEnum):
    """The origin of a run's initial weights."""

    INITIAL = "the model's own initialisation"
    FOLDER = "a folder, read slice by slice"
    WHOLE = "a folder, loaded whole on every rank"


@dataclass(frozen=True, slots=True)
class Storage:
    """A run's weights and checkpoints.

    Attributes:
        source: Origin of the initial weights.
        saves: Whether checkpoints are saved during training.
        keep: Number of complete checkpoints that are kept; None: all.
    """

    source: WeightsSource = WeightsSource.INITIAL
    saves: bool = True
    keep: int | None = None


DEFAULT_STORAGE = Storage()


@dataclass(frozen=True, slots=True)
class Phase:
    """Peak bytes of the largest rank in one phase, by place; `disk` excludes checkpoints."""

    name: str
    device: int
    host: int
    disk: int


def phases_of(
    plan: Plan, rows: Sequence[MemoryRow], forward_bytes: int, storage: Storage
) -> tuple[Phase, ...]:
    """Returns all phases of a run in their order.

    Args:
        plan: Plan of the run.
        rows: Memory rows at the peak of a step, activations included.
        forward_bytes: Peak bytes of the micro-batch before its backward begins.
        storage: The run's weights and checkpoints.
    """
    state = tuple(row for row in rows if row.name not in (*TensorKind, WHOLES))
    resumed = (*_SHARDED, plan.optimizer.row, AVERAGE)
    whole = sum(row.num_bytes for row in rows if row.name in list(TensorKind))
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


def _among(rows: Iterable[MemoryRow], names: Sequence[str]) -> list[MemoryRow]:
    """Rows with these names, of the student and of the teacher."""
    return [row for row in rows if row.name.removeprefix(TEACHER) in names]


def _phase(name: str, rows: Iterable[MemoryRow], *more: int) -> Phase:
    """The sum of rows, plus bytes on the device and on the host."""
    sums, (device, host) = sum_by_place(rows), (*more, 0, 0)[:2]
    return Phase(name, sums[Place.DEVICE] + device, sums[Place.HOST] + host, sums[Place.DISK])


def _reading(plan: Plan, source: WeightsSource) -> tuple[int, int]:
    """Temporary bytes while weights are loaded, on the device and on the host."""
    sizes = [(group.layout, ITEMSIZE[group.dtypes.master]) for group in plan.groups]
    match source:
        case WeightsSource.INITIAL:  # one whole tensor
            tensors = [p.numel * itemsize for layout, itemsize in sizes for p in layout.placements]
            return 0, max(tensors, default=0)
        case WeightsSource.FOLDER:  # copied from mapped files into the shards
            return 0, 0
        case WeightsSource.WHOLE:
            whole = sum(layout.numel * itemsize for layout, itemsize in sizes)
            return whole, whole


def _parts(plan: Plan) -> Iterator[tuple[int, int]]:
    """(most elements of a tensor on one rank, bytes per element) of each tensor."""
    for group in plan.groups:
        for placement in group.layout.placements:
            numel = min(placement.numel, group.layout.part_numel)
            yield numel, ITEMSIZE[group.dtypes.master]


# ---- memory beyond tensors: estimates ------------------------------------------------------------

# Outside of the allocator: a CUDA context with cuBLAS, and an NCCL communicator. On an H100, see
# docs/log.md; on an A100 one communicator takes 544 to 688 MB
# (https://github.com/NVIDIA/nccl/issues/964).
CONTEXT, COMMUNICATOR = 685 * MIB, GB // 2
# Peaks of a run whose tensors need less than a MiB: anonymous memory and page tables of a rank, and
# of the launcher, which prepares the data. Measured by `python -m benchmarks.limits --case base`.
# A worker makes the batches of a rank.
RANK_PROCESS, LAUNCHER_PROCESS, WORKER_PROCESS = 300 * MIB, 320 * MIB, 28 * MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes that are in use beyond tensors.

    Attributes:
        name: The user of the bytes.
        num_bytes: An estimate.
        why: How it was estimated.
    """

    name: str
    num_bytes: int
    why: str


def overhead_of(plan: Plan, holes: int) -> tuple[Overhead, ...]:
    """Returns the overhead of a plan on a GPU.

    Args:
        plan: The plan.
        holes: Most bytes in holes between tensors.
    """
    mesh = plan.mesh  # one group each for gathers, reductions, replicas and the whole world
    num_groups = 2 * (mesh.shard > 1) + (mesh.replicate > 1) + (mesh.world_size > 1)
    return (
        Overhead("allocator: holes", holes, "at most: a share of temporary tensors"),
        Overhead("context", CONTEXT, "CUDA's, as on an H100"),
        Overhead("communicators", num_groups * COMMUNICATOR, f"{num_groups} of NCCL, from reports"),
    )


# ---- from only the number of parameters ----------------------------------------------------------

SLOTS = 2  # units gathered at once, with a prefetch depth of one


def estimate_fsdp_memory(  # noqa: PLR0913  (the documented signature, and further options)
    model_params_billions: float,
    world_size: int = 8,
    mixed_precision: bool = True,  # noqa: FBT001, FBT002  the documented signature
    sharding_strategy: object = "FULL_SHARD",
    *,
    optimizer_bytes: float = 8.0,
    num_units: int = 32,
    ranks_per_host: int = 8,
) -> dict[str, float]:
    """Returns a rule-of-thumb estimate of a rank's memory without activations, in GB (1e9 bytes).

    `fs.plan(model, config)` is exact to the byte.

    With P parameters, S ranks that share one copy (all ranks; those of a host for hybrid
    strategies; one under NO_SHARD), U units, c bytes per parameter in the compute dtype (2 in mixed
    precision, else 4), and o bytes of optimizer state per parameter (8: Adam's two moments in
    float32):

        params      4 P / S              the float32 master, also in mixed precision
        gradients   4 P / S              float32 sums
        optimizer   o P / S
        temporary   gathered weights + unreduced gradients
                    full_shard           c 2P/U + 4 2P/U     two units at once, not the model
                    shard_grad_op        c P    + 4 2P/U     the model stays gathered
                    no_shard             (c P in mixed precision) + 4 2P/U

    Args:
        model_params_billions: P / 1e9.
        world_size: Ranks.
        mixed_precision: Whether the compute dtype has 16 bits.
        sharding_strategy: A strategy in any spelling, or torch's ShardingStrategy.
        optimizer_bytes: o.
        num_units: U.
        ranks_per_host: Number of ranks that hybrid strategies shard over.

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
