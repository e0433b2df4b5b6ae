"""The most memory that one device holds in a step.

    at loading          the whole model and a part of it, where it is cut on the device
    at the loss         weights + optimizer (+ gradients that accumulate) + activations + logits
    late in backward    weights + optimizer + gradients + a block's activations

Whichever is more. The allocator reserves more than that: what comes and goes (a block's
activations, logits, gathered weights) leaves holes of sizes that nothing else wants.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.planner.forecast.constants import FITTED, Constants
from fullshard.planner.forecast.workload import (
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
FUSED_LOGITS = 4  # bytes of a logit and its gradient, in 16 bits each
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
        base: Libraries' workspaces.
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
    kept, block = _activations(run, k)
    logits = _logits(run, k)
    waiting = gradients if run.batch.accumulation > 1 else 0.0
    late = gradients + unreduced + min(kept, block) + block
    at_loss = waiting + kept + max(logits, block)
    base = k.base_gib * GIB
    active = weights + optimizer + gathered + max(at_loss, late)
    if run.loads_whole:
        held = run.model.num_params / (run.mesh.tensor * run.mesh.pipeline)
        active = max(active, run.precision.master * held * (1 + 1 / run.mesh.shard))
    active += base
    transient = block + logits + gathered + unreduced
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
        reserved=max(active, min(active + k.cached_share * transient, limit)),
    )


def _states(run: Workload) -> tuple[float, float, float]:
    """Weights, optimizer state and gradients at rest."""
    held = run.model.num_params / (run.mesh.tensor * run.mesh.pipeline)
    shard, precision = run.mesh.shard, run.precision
    master, gather = precision.master, precision.gather
    cut = [shard if run.sharding.value >= stage.value else 1 for stage in Sharding]
    state = run.optimizer.state_bytes * (master / 4 if run.optimizer.state_bytes == 8 else 1)
    if run.tuning is not Tuning.FULL:
        ends = 2 * run.model.head_params / run.model.num_params
        stored = master
        if run.tuning is Tuning.QLORA:
            stored = NF4_BYTES * (1 - ends) + 2 * ends
        trained = LORA_SHARE * held / cut[1]
        base = 0.0 if run.offloads else stored * held / cut[3]
        return base + 4 * trained, 8 * trained, 4 * trained
    copies = gather * held if master > gather and run.sharding is not Sharding.PARAMETERS else 0.0
    gradient = master if run.sharding is Sharding.PARAMETERS else precision.reduce
    gradients = 0.0 if run.optimizer.in_backward else gradient * held / cut[2]
    if run.offloads:
        return copies, 0.0, gradients / 4
    weights = master * held / (cut[3] if not copies else cut[1])
    return weights + copies, state * held / cut[1], gradients


def _gathered(run: Workload, k: Constants) -> tuple[float, float]:
    """Weights that are gathered for computing, and gradients that wait for their reduction."""
    mesh, model = run.mesh, run.model
    block = model.held_block_params / mesh.tensor
    if run.sharding is not Sharding.PARAMETERS or (mesh.shard == 1 and not run.offloads):
        return 0.0, 0.0
    size = NF4_BYTES if run.tuning is Tuning.QLORA else run.precision.gather
    if run.precision.casts_late:
        size = run.precision.master
    ends = 2 * run.precision.gather * model.head_params / mesh.tensor
    blocks = k.gathered_blocks if run.reshards else model.layers / mesh.pipeline
    trained = 1.0 if run.tuning is Tuning.FULL else 0.0
    return blocks * size * block + ends, trained * 2 * run.precision.reduce * block


def _activations(run: Workload, k: Constants) -> tuple[float, float]:
    """Bytes that all blocks keep for backward, and those of one block while it is computed."""
    model, mesh, kernels = run.model, run.mesh, run.kernels
    tokens = run.tokens_per_micro_batch / (mesh.context * mesh.tensor)
    element = 4.0 if run.precision.math is Math.FLOAT32 else 2.0
    stream = 4.0 if run.precision.casts_late else element
    attention = 2 * (model.query_width + model.kv_width)
    elements = (8 if model.gated else 4) * model.width + attention
    frozen = (
        run.tuning is not Tuning.FULL
    )  # frozen weights need no gradient, so no inputs of theirs
    elements += ((4 if model.gated else 2) - frozen) * model.mlp_width
    compiled = k.compiled_kept if kernels.compiler is not Compiler.NONE else 1.0
    block = k.activation_scale * compiled * elements * element * tokens
    layers = model.layers / mesh.pipeline
    share = kernels.kept
    if 0 < share < 1 and kernels.by_operation:
        share = k.selective_kept
    inputs = (1 - share) * model.width * stream * tokens
    if kernels.offloads_activations:
        inputs /= layers
    return layers * (share * block + inputs), block


def _logits(run: Workload, k: Constants) -> float:
    """Logits, their copy for the loss and the gradient."""
    mesh = run.mesh
    tokens = run.tokens_per_micro_batch / (mesh.context * mesh.tensor * mesh.pipeline)
    held = k.logits_held
    if run.kernels.compiler is not Compiler.NONE:
        held = FUSED_LOGITS  # loss and gradient are computed where the logits lie
    return held * run.model.vocab * tokens
