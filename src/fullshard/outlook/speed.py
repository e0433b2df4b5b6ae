"""The time of a step by formula, for devices of the table.

    micro-batch   forward:  work of the blocks   overlapped with  gathers
                  backward: recompute, twice the work   overlapped with  gathers and reductions
    step          accumulation x micro-batch, communication once per step, the update

Work is matmuls, attention and elementwise passes at the speed that the device reaches, or the
host's kernel launches if these take longer. Work and communication that overlap cost a p-norm of
both times, because collectives use memory bandwidth and processors of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.workload import Compiler, Math, Stage, Tuning, Workload

HOST_BANDWIDTH = 20e9  # bytes per second of copies between device and host
CPU_UPDATE = 3e9  # bytes per second and rank of an update on the host
UPDATE_BYTES = 28  # AdamW reads four float32 numbers per parameter and writes three
FP32_SLOWDOWN = 0.45  # TF32 runs at half the speed of bf16; plain fp32 is slower still
ALONE = 0.78  # of the link's bandwidth: large collectives without other work, in nccl-tests
HIDDEN = 0.5  # exposed share of tensor parallel communication that overlaps with split matmuls
TORUS_HOP = 1e-6  # seconds between neighbours of a TPU
BACKWARD = 2.0  # relative to forward: gradients of inputs and of weights
ATTENTION_BACKWARD = 2.5  # the kernels recompute the scores


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step by cause; the other fields add up to `step`.

    Attributes:
        work: Kernels of all passes.
        exposed: Communication that nothing hides.
        launch: Time of the host beyond that of the kernels.
        update: The optimizer's update.
        bubble: Idle stages of a pipeline.
    """

    step: float
    work: float
    exposed: float
    launch: float
    update: float
    bubble: float


def step_times(run: Workload, k: Constants = FITTED) -> Times:
    """Returns the times of one optimizer step."""
    mesh = run.mesh
    (matmul, attention, passes), launch = _forward(run, k), _launch(run, k)
    head, logits = _ends(run, k)
    again = run.kernels.recompute
    weights = 1.0 if run.tuning is Tuning.FULL else 0.02  # frozen weights need no gradient
    blocks_s = matmul + attention + passes
    back_s = matmul * (1 + weights + again) + attention * (ATTENTION_BACKWARD + again)
    back_s += passes * (BACKWARD + again)
    fwd_s = max(blocks_s, launch) + (head + logits) / 3
    bwd_s = max(back_s, (BACKWARD + again) * launch) + (head + logits) * 2 / 3
    gather, regather, reduce, once = traffic(run, k)
    forward = _beside(fwd_s, gather, k.overlap)
    backward = _beside(bwd_s, regather + reduce, k.overlap)
    shared = _tensor_traffic(run, k) * (HIDDEN if run.cuts_matmuls else 1)
    micro = forward + backward + shared
    if run.device.is_tpu:  # XLA splits matmuls to overlap their communication
        micro = _beside(forward + backward, shared, k.overlap)
    pipeline = mesh.pipeline
    count = run.batch.accumulation
    # A single micro-batch is divided into as many as there are pipeline stages.
    bubble = micro * count * (pipeline - 1) / max(pipeline, count)
    last = _beside(bwd_s, once, k.overlap) - bwd_s if once else 0.0
    update = _update(run)
    busy = count * micro + last + bubble + update
    work = count * (blocks_s + back_s + head + logits)
    return Times(
        step=busy,
        work=work,
        exposed=count * (micro - fwd_s - bwd_s) + last,
        launch=count * (fwd_s + bwd_s) - work,
        update=update,
        bubble=bubble,
    )


def tokens_per_s(run: Workload, k: Constants = FITTED) -> float:
    """Returns tokens per second and device."""
    tokens = run.batch.accumulation * run.tokens_per_micro_batch
    return tokens / run.mesh.model_ranks / step_times(run, k).step


def _beside(one: float, other: float, norm: float) -> float:
    if other <= 0:
        return one
    return (one**norm + other**norm) ** (1 / norm)


# ---- work ----------------------------------------------------------------------------------------


def _rate(run: Workload, k: Constants) -> float:
    device = run.device
    share = k.tpu_matmul_share if device.is_tpu else k.matmul_share
    if device.is_hopper:
        share *= k.hopper_matmul
    if run.precision.math is Math.FLOAT32:
        share *= FP32_SLOWDOWN
    width = run.model.width / run.mesh.tensor**0.5
    return device.matmul * share * width / (width + k.narrow_width)


def _forward(run: Workload, k: Constants) -> tuple[float, float, float]:
    """Seconds of matmuls, attention and passes in a forward through this device's blocks."""
    model, mesh, device = run.model, run.mesh, run.device
    tokens = run.tokens_per_micro_batch / mesh.context
    layers = model.layers / mesh.pipeline
    rate = _rate(run, k)
    fast = k.fp8_speedup if run.precision.math is Math.FLOAT8 else 1.0
    if model.is_sparse:
        fast *= k.expert_share
    matmul = 2 * model.block_params * tokens / mesh.tensor / (rate * fast)
    share = k.attention_share
    if device.is_hopper:
        share *= k.hopper_attention
    if run.kernels.is_tuned:
        share *= k.tuned_attention
    scores = 2 * run.batch.seq_len * model.query_width * tokens / mesh.tensor  # the causal half
    width = _pass_width(run)
    fused = min(_fused(run, k), k.compiled_passes if run.kernels.is_tuned else 1.0)
    passes = k.elementwise_passes * fused * 2 * width * tokens / mesh.tensor / device.bandwidth
    if run.tuning is Tuning.QLORA:
        passes += 6 * model.block_params / device.bandwidth  # 4-bit weights are dequantized
    return layers * matmul, layers * scores / (device.matmul * share), layers * passes


def _fused(run: Workload, k: Constants) -> float:
    """Share of elementwise passes and kernels that remains after compilation."""
    shares = {Compiler.TORCH: k.compiled_passes, Compiler.XLA: k.xla_passes}
    return shares.get(run.kernels.compiler, 1.0)


def _pass_width(run: Workload) -> float:
    """Elements per token and block that kernels of all tensor ranks read or write in forward.

    These are norms, residuals and the activation. Models with gated mlps also run RMSNorm in
    float32 by several kernels, and rotate queries and keys.
    """
    model = run.model
    whole = run.mesh.tensor * model.width if run.mesh.is_partial else model.width
    if model.gated:
        rotary = 6 * (model.query_width + model.kv_width)
        return 24 * whole + rotary + 5 * model.mlp_width
    return 12 * whole + 2 * model.mlp_width


def _ends(run: Workload, k: Constants) -> tuple[float, float]:
    """Seconds of the head's matmuls, and of passes over logits; forward and backward."""
    tokens = run.tokens_per_micro_batch / run.mesh.context
    tokens /= 1 if run.mesh.is_partial else run.mesh.tensor
    tokens /= run.mesh.pipeline  # the last stage computes them while the others work
    head = 3 * 2 * run.model.head_params * tokens / _rate(run, k)
    return head, k.logits_bytes * _fused(run, k) * run.model.vocab * tokens / run.device.bandwidth


def _launch(run: Workload, k: Constants) -> float:
    """Host time to launch a forward through the blocks; a TPU runs one program per step."""
    if run.device.is_tpu:
        return 0.0
    return k.launch_s * _fused(run, k) * run.model.layers / run.mesh.pipeline


def _update(run: Workload) -> float:
    """Seconds of the optimizer's update: bound by memory, or by the host under offload."""
    if run.tuning is not Tuning.FULL:
        return 0.0
    shard = run.mesh.shard if run.sharding is not Stage.NOTHING else 1
    held = run.model.num_params / (run.mesh.tensor * run.mesh.pipeline) / shard
    if run.offloads:
        return held * 16 / CPU_UPDATE
    return held * UPDATE_BYTES / run.device.bandwidth


# ---- communication -------------------------------------------------------------------------------


def _collective(
    run: Workload, num_bytes: float, ranks: int, stride: int, k: Constants, reach: float = 0.0
) -> float:
    """Seconds of an all-gather or reduce-scatter of so many bytes over ranks `stride` apart."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks
    inside = max(1, min(ranks, run.domain // stride))
    link = run.device.link * (reach or k.link_share)
    if inside >= ranks:
        return share * num_bytes / link
    fabric = run.fabric * k.fabric_share * inside
    return share * num_bytes / min(link, fabric)


def _wait(run: Workload, ranks: int, k: Constants) -> float:
    """Seconds until the slowest of the ranks joins a collective."""
    return TORUS_HOP * ranks if run.device.is_tpu else k.wait_s * log2(ranks)


def traffic(run: Workload, k: Constants = FITTED) -> tuple[float, float, float, float]:
    """Returns seconds of gathers in forward, gathers in backward, reductions, and once per step."""
    model, mesh, precision = run.model, run.mesh, run.precision
    gather_bytes = 0.6 if run.tuning is Tuning.QLORA else precision.gather
    gather = reduce = across = 0.0
    for held, shard, copies, stride in _parts(run):
        trained = held if run.tuning is Tuning.FULL else 0.01 * held
        waits = _wait(run, shard, k) * model.layers / mesh.pipeline
        gather += _collective(run, held * gather_bytes, shard, stride, k) + waits
        reduce += _collective(run, trained * precision.reduce, shard, stride, k) + waits
        if copies > 1:
            own = shard // mesh.context
            part = trained / (own if run.sharding.value >= Stage.OPTIMIZER.value else 1)
            across += 2 * _collective(run, part * precision.reduce, copies, stride * own, k)
            across += 2 * _wait(run, copies, k) * model.layers
    match run.sharding:
        case Stage.NOTHING:
            return 0.0, 0.0, 0.0, across
        case Stage.OPTIMIZER | Stage.GRADIENTS:
            return 0.0, 0.0, 0.0, across + reduce + gather
        case Stage.PARAMETERS:
            held = model.num_params / (mesh.tensor * mesh.pipeline)
            host = held * 2 / mesh.shard / HOST_BANDWIDTH if run.offloads else 0.0
            return gather + host, (gather if run.reshards else 0.0) + host, reduce + across, 0.0


def _parts(run: Workload) -> list[tuple[float, int, int, int]]:
    """Dense parameters, and experts with a mesh of their own.

    Of each: the parameters that a rank computes with, the ranks that share a copy, the number of
    copies, and how far apart the ranks are.
    """
    mesh, cut = run.mesh, run.mesh.tensor * run.mesh.pipeline
    experts = run.model.expert_params if mesh.expert > 1 else 0.0
    dense = (run.model.num_params - experts) / cut
    found = [(dense, mesh.state_ranks, mesh.replicate, mesh.tensor)]
    if experts:
        shard = max(1, mesh.state_ranks // mesh.expert)
        copies = mesh.state_ranks * mesh.replicate // mesh.expert // shard
        found.append((experts / cut / mesh.expert, shard, copies, mesh.tensor * mesh.expert))
    return found


def _tensor_traffic(run: Workload, k: Constants) -> float:
    """Seconds in which ranks exchange activations; they are exposed.

    Ranks of a tensor axis sum the outputs of two layers per block. Ranks that divide the experts
    send each token to its experts and back, and gather what a tensor axis has divided.
    """
    mesh, model = run.mesh, run.model
    tokens = run.tokens_per_micro_batch / mesh.context
    layers = model.layers / mesh.pipeline
    rounds = 4 + 2 * run.kernels.recompute
    size = tokens * model.width * 2
    tensor = layers * rounds * 2 * _collective(run, size, mesh.tensor, 1, k, ALONE)
    keys = tokens * model.kv_width * 2 * 2 * mesh.context
    context = layers * rounds / 2 * _collective(run, keys, mesh.context, mesh.tensor, k)
    if mesh.expert == 1:
        return tensor + context / 2
    group, sent = mesh.expert * mesh.tensor, size * max(1, model.chosen) / mesh.tensor
    tokens_s = _collective(run, sent, group, 1, k, ALONE) + _wait(run, group, k)
    whole = _collective(run, size, mesh.tensor, 1, k, ALONE)
    return tensor + context / 2 + layers * rounds * (tokens_s + whole / 2)
