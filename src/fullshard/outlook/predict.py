"""What a plan takes on a device: memory with activations, time, and whether it fits.

State is the plan's own, to the byte. Activations, logits and what backward makes on its way are
traced on the module where it is at hand, else counted from the model's shapes; time is the
forecast's (`outlook/speed.py`), of the plan's mesh and strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import DType, GradSync, RecomputeKind
from fullshard.outlook.calibration import Calibration
from fullshard.outlook.devices import Device
from fullshard.outlook.memory import (
    GIB,
    WORKSPACES,
    Fit,
    Overhead,
    PeakMemory,
    Phase,
    Storage,
    judge_fit,
    overhead_of,
    peak_memory,
    phases_of,
)
from fullshard.outlook.player import Bar, share_out, step_time
from fullshard.outlook.speed import Times, step_times
from fullshard.outlook.workload import (
    Architecture,
    Batch,
    Kernels,
    Math,
    Parallelism,
    Precision,
    Stage,
    Workload,
)
from fullshard.planner.homes import Place
from fullshard.planner.memory import (
    WHOLES,
    MemoryRow,
    communication_bytes,
    optimizer_bytes,
    sum_by_place,
)
from fullshard.planner.optimizers import ADAMW, OptimizerStates
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.strategy import row_of
from fullshard.planner.tracing import Kind, TraceOf, WorkOf

# Share of a block's forward that runs again, share of its activations that is kept.
_KERNELS = {
    RecomputeKind.NONE: Kernels(),
    RecomputeKind.BLOCK: Kernels(recompute=1.0, kept=0.0),
    # What all matmuls and attention return is about 12 of the 26 widths that a block keeps.
    RecomputeKind.SELECTIVE: Kernels(recompute=0.3, kept=0.45),
    RecomputeKind.OFFLOAD: Kernels(offloads_activations=True),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank runs on.

    Attributes:
        device: Its abilities; None where only its memory is known, or nothing.
        memory_bytes: What it holds; None where nobody said.
        calibration: What was measured on it, which then says the time of a step.
        host_bytes: A rank's part of the host's memory; None on a machine other than this one.
        is_host: Whether ranks compute on the host itself, in the host's memory.
    """

    device: Device | None
    memory_bytes: int | None
    calibration: Calibration | None = None
    host_bytes: int | None = None
    is_host: bool = False


RowsOf = Callable[[Plan, ShardConfig], tuple[MemoryRow, ...]]


@dataclass(frozen=True, slots=True)
class Job:
    """What a step is.

    Attributes:
        model: Its shapes.
        batch: One rank's.
        trace: Traces what a micro-batch holds; None: counted from shapes.
        work: Traces what it computes.
        optimizer: What it keeps.
        beside: What other models keep beside the trained one, under a configuration.
        is_timed: Whether the forecast knows all that a step computes.
        chunk_size: Tokens whose logits are held at a time; None: those of all tokens.
    """

    model: Architecture
    batch: Batch
    trace: TraceOf | None = None
    work: WorkOf | None = None
    optimizer: OptimizerStates = ADAMW
    beside: RowsOf | None = None
    is_timed: bool = True
    chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan on a machine.

    Attributes:
        config: What was asked for.
        job: Its step.
        machine: What a rank runs on.
        plan: What follows.
        run: The same as formulas see it.
        rows: Memory of the largest rank by kind, activations and all.
        is_traced: Whether activations come from the module, not from shapes.
        reserved_bytes: What the allocator holds at most, the holes between tensors too.
        times: Seconds of a step by what they are spent on; None without a known device.
        fit: Whether it fits; None where the memory is not known.
        measured: The schedule of a micro-batch, where `times` are of a calibration.
        forward_bytes: Peak bytes of the micro-batch before its backward begins.
    """

    config: ShardConfig
    job: Job
    machine: Machine
    plan: Plan
    run: Workload
    rows: tuple[MemoryRow, ...]
    is_traced: bool
    reserved_bytes: int
    times: Times | None
    fit: Fit | None
    measured: tuple[Bar, ...]
    forward_bytes: int

    @property
    def is_calibrated(self) -> bool:
        """Whether its time is that of a measured machine."""
        return bool(self.measured)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """Bytes by place."""
        return sum_by_place(self.rows)

    @property
    def step_time_s(self) -> float | None:
        return None if self.times is None else self.times.step

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks."""
        if self.times is None:
            return None
        batch = self.job.batch
        tokens = batch.seq_len * batch.micro_batch * batch.accumulation
        return tokens * self.plan.mesh.world_size / self.times.step

    def bars(self) -> tuple[Bar, ...]:
        """The schedule of one micro-batch; empty where nothing is known of the device."""
        if self.measured or self.times is None:
            return self.measured
        return share_out(self.plan, self.run, self.times)

    def phases(self, storage: Storage) -> tuple[Phase, ...]:
        """What the largest rank holds in each phase of a run that reads and writes this."""
        return phases_of(self.plan, self.rows, self.forward_bytes, storage)

    def overhead(self) -> tuple[Overhead, ...]:
        """Beside the rows; nothing is known of what is no GPU of the table."""
        if self.machine.device is None:
            return ()
        return overhead_of(self.plan, self.reserved_bytes - self.peak_bytes[Place.DEVICE])


def look(plan: Plan, config: ShardConfig, job: Job, machine: Machine) -> Outlook:
    """Say what a plan takes."""
    plan = plan.trained_by(job.optimizer)
    run = workload(plan, config, job, machine)
    held = peak_memory(run)
    trace, state = job.trace, sum_by_place(plan.memory)[Place.DEVICE]
    if machine.memory_bytes is not None and state > machine.memory_bytes:
        trace = None  # whatever a step computes, it does not fit
    traced = trace(plan, config, job.batch.micro_batch) if trace is not None else None
    counted = _counted(run, held, job.chunk_size) if traced is None else traced.whole.rows()
    forward = sum(counted.values()) if traced is None else traced.forward.total
    counted["accumulation buffers"] = _accumulation_bytes(plan, job.batch)
    if machine.device is not None:
        counted[WORKSPACES] = held.base
    passing = round(sum(size for name, size in counted.items() if name in list(Kind)))
    rows = (
        *(row for row in plan.memory if row.name != WHOLES),
        *_beyond(plan.memory, passing),
        *(job.beside(plan, config) if job.beside is not None else ()),
        *(MemoryRow(name, round(size)) for name, size in counted.items() if size),
    )
    peaks = sum_by_place(rows)
    peak = peaks[Place.DEVICE]
    reserved = peak + round(max(0.0, held.reserved - held.active - held.base))
    fit = None
    if machine.memory_bytes is not None:
        reserved = max(peak, min(reserved, machine.memory_bytes))
        fit = judge_fit(peak, machine.memory_bytes)
        if machine.host_bytes is not None and peaks[Place.HOST] > machine.host_bytes:
            fit = Fit.NO
    measured = _measured(plan, config, job, machine) if fit is not Fit.NO else None
    times, bars = measured or (None, ())
    if measured is None and machine.device is not None and job.is_timed:
        times = step_times(run)
    is_traced = traced is not None
    found = (rows, is_traced, reserved, times, fit, bars, round(forward))
    return Outlook(config, job, machine, plan, run, *found)


def _beyond(rows: Iterable[MemoryRow], passing: int) -> list[MemoryRow]:
    """Of what owners hold in an update that which is more than a micro-batch had at its peak."""
    return [
        replace(row, num_bytes=row.num_bytes - passing)
        for row in rows
        if row.name == WHOLES and row.num_bytes > passing
    ]


def _measured(
    plan: Plan, config: ShardConfig, job: Job, machine: Machine
) -> tuple[Times, tuple[Bar, ...]] | None:
    """The step on a calibrated machine; None where that does not tell."""
    if machine.calibration is None or job.work is None:
        return None
    work = job.work(plan, config, job.batch.micro_batch)
    if work is None:
        return None
    return step_time(plan, work, machine.calibration, round(job.batch.accumulation))


def workload(plan: Plan, config: ShardConfig, job: Job, machine: Machine) -> Workload:
    """The plan as the forecast sees it."""
    row = row_of(plan.strategy)
    contract = next((group.dtypes for group in plan.groups), None)
    sizes = Precision()
    if contract is not None:
        full = contract.compute not in (DType.BFLOAT16, DType.FLOAT16)
        sizes = Precision(
            gather=ITEMSIZE[contract.compute],
            reduce=ITEMSIZE[contract.reduce],
            master=ITEMSIZE[contract.master],
            math=Math.FLOAT32 if full else Math.HALF,
        )
    recompute = config.activation_checkpointing
    kernels = _KERNELS[recompute.kind]
    if recompute.every > 1:
        share = 1 / recompute.every
        kernels = Kernels(recompute=share, kept=1 - share)
    device = machine.device or _UNKNOWN
    return Workload(
        model=job.model,
        device=device,
        mesh=Parallelism(plan.mesh.shard, plan.mesh.replicate),
        sharding=Stage.PARAMETERS if row.shard_params else Stage.NOTHING,
        batch=job.batch,
        precision=sizes,
        state_bytes=_state_bytes(plan),
        kernels=kernels,
        fabric=device.fabric,
        domain=device.domain,
        offloads=plan.homes.offloads,
        reshards=row.reshard_after_forward,
    )


def _state_bytes(plan: Plan) -> float:
    """Of the optimizer, an element."""
    optimizer = plan.optimizer
    if optimizer.owned is None:
        return optimizer.kept_bytes(4)
    trained = [group for group in plan.groups if group.trainable]
    numel = sum(group.layout.part_numel for group in trained)
    return optimizer_bytes(trained, optimizer) / max(1, numel) + 4 * optimizer.num_averages


# Memory alone is asked of it.
_UNKNOWN = Device("unknown", 1.0, 1.0, 1.0, 1024 * GIB, 1.0, 1.0)


def _accumulation_bytes(plan: Plan, batch: Batch) -> int:
    """What a transport receives into when sums of several micro-batches are added, beyond one's."""
    if batch.accumulation <= 1 or plan.grad_sync is GradSync.LAST_MICRO_BATCH:
        return 0
    once, again = (
        communication_bytes(
            plan.units, plan.events, plan.transport, plan.homes, accumulates=accumulates
        )
        for accumulates in (False, True)
    )
    return again - once


def _counted(run: Workload, held: PeakMemory, chunk_size: int | None) -> dict[str, float]:
    """From shapes: at the peak there are logits, or a block's inside, not both."""
    logits = _logits_bytes(run, chunk_size)
    return {
        Kind.ACTIVATIONS: held.kept + max(0.0, held.block - logits),
        Kind.LOGITS: logits,
    }


def _logits_bytes(run: Workload, chunk_size: int | None) -> float:
    """Our loss: logits and their gradient as computed, log-probabilities and theirs in float32.

    A loss in chunks makes the gradient of the head's weight beside them, in float32.
    """
    element = 4 if run.precision.math is Math.FLOAT32 else 2
    tokens, wide = run.tokens_per_micro_batch, 0.0
    if chunk_size is not None and chunk_size < tokens:
        tokens, wide = chunk_size, 4 * run.model.head_params
    return (2 * element + 8) * run.model.vocab * tokens + wide
