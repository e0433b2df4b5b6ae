"""The most memory that one device holds in a step, and what its allocator holds for that.

    backward begins     weights + optimizer                + activations + logits, or a block
    backward ends       weights + optimizer + gradients    + a block
    saving              weights + optimizer + the whole model, where a checkpoint is one file

Whichever is most is what tensors take. The allocator holds more: the two moments of backward want
pieces of different sizes, so that most of what the smaller one takes lies beside the larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.workload import (
    Compiler,
    Math,
    Metric,
    Sharding,
    Tuning,
    Workload,
)

GIB = 1 << 30
LORA_SHARE = 0.002  # of the parameters that adapters add, at the usual ranks
NF4_BYTES = 0.56  # 4 bits, and a scale for every 64
FULL = 0.97  # of a device: the allocator gives back what it caches before it fails


@dataclass(frozen=True, slots=True)
class Held:
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


def peak_memory(run: Workload, k: Constants = FITTED) -> Held:
    """What the device that holds most holds at its peak."""
    weights, optimizer, gradients = _states(run)
    gathered, unreduced = _gathered(run, k)
    kept, block = _activations(run)
    logits = _logits(run, k)
    # Buckets of gradients that are whole are kept from step to step; slices are made anew.
    is_bucketed = run.sharding is not Sharding.PARAMETERS and run.mesh.data_ranks > 1
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
    return Held(
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
    cut = [shard if run.sharding.value >= stage.value else 1 for stage in Sharding]
    state = run.optimizer.state_bytes * (master / 4 if run.optimizer.state_bytes == 8 else 1)
    if run.tuning is not Tuning.FULL:
        ends = run.model.end_params / run.model.num_params
        stored = master
        if run.tuning is Tuning.QLORA:
            stored = NF4_BYTES * (1 - ends) + 2 * ends
        trained = LORA_SHARE * held / cut[1]
        base = 0.0 if run.offloads else stored * held / cut[3]
        return base + 4 * trained, 8 * trained, 4 * trained
    copies = gather * held if master > gather and run.sharding is not Sharding.PARAMETERS else 0.0
    weights = copies + master * held / cut[1 if copies else 3]
    gradient = master if run.sharding is Sharding.PARAMETERS else precision.reduce
    gradients = 0.0 if run.optimizer.in_backward else gradient * held / cut[2]
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
    if run.sharding is not Sharding.PARAMETERS or (mesh.state_ranks == 1 and not run.offloads):
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
