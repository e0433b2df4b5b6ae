"""The forecast of a plan on a machine: memory with activations, step time, and whether it fits.

State comes from the plan, exact to the byte. Activations, logits and temporary gradients come from
a trace of the module, or from the model's shapes without a module. Time comes from a calibration of
the machine (`outlook/player.py`) or from formulas for its device (`outlook/speed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import GradSync, RecomputeKind
from fullshard.outlook.devices import Calibration, Device
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
from fullshard.outlook.player import Bar, divided_bars, step_time
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
from fullshard.planner.memory import (
    WHOLES,
    MemoryRow,
    communication_bytes,
    optimizer_bytes,
    sum_by_place,
)
from fullshard.planner.mesh import row_of
from fullshard.planner.optimizers import ADAMW, OptimizerStates
from fullshard.planner.plan import Plan
from fullshard.planner.spec import ITEMSIZE
from fullshard.planner.text import human_bytes
from fullshard.planner.tracing import TensorKind, TraceOf, WorkOf
from fullshard.planner.units import Place

# Share of a block's forward that is recomputed, and share of its activations that is kept.
_KERNELS = {
    RecomputeKind.NONE: Kernels(),
    RecomputeKind.BLOCK: Kernels(recompute=1.0, kept=0.0),
    # The outputs of matmuls and attention are about 12 of the 26 widths that a block keeps.
    RecomputeKind.SELECTIVE: Kernels(recompute=0.3, kept=0.45),
    RecomputeKind.OFFLOAD: Kernels(offloads_activations=True),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one rank.

    Attributes:
        device: The device's speed; None if it is unknown.
        memory_bytes: Memory of the device for tensors; None if it is unknown. Negative if the
            processes alone exceed it.
        calibration: Measurements of this machine, which give the time of a step.
        host_bytes: The rank's part of the host's memory, without the processes' own; None for a
            machine other than this one.
        is_host: Whether the rank computes on the CPU, in the host's memory.
        process_bytes: Memory of a rank's process without tensors, and its part of the launcher's.
        limit: The host's memory or the container's limit, in words.
    """

    device: Device | None
    memory_bytes: int | None
    calibration: Calibration | None = None
    host_bytes: int | None = None
    is_host: bool = False
    process_bytes: int = 0
    limit: str = "this machine"


RowsOf = Callable[[Plan, ShardConfig], tuple[MemoryRow, ...]]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One training step of a rank, as far as forecasts need it.

    Attributes:
        model: Shapes of the model.
        batch: Batch of one rank.
        trace: Traces the memory of a micro-batch; None: it is estimated from shapes.
        work: Traces the operations of a micro-batch; None: they are unknown.
        optimizer: State sizes of the optimizer.
        beside: Returns memory of auxiliary models, such as a teacher.
        is_timed: Whether the formulas for time cover everything that the step computes.
        chunk_size: Tokens whose logits exist at the same time; None: all tokens.
        divided: Returns other ways to divide the model over ranks: sizes of axes, and the step of
            the model that is cut by them, with the same number of samples.
    """

    model: Architecture
    batch: Batch
    trace: TraceOf | None = None
    work: WorkOf | None = None
    optimizer: OptimizerStates = ADAMW
    beside: RowsOf | None = None
    is_timed: bool = True
    chunk_size: int | None = None
    divided: Callable[[], Sequence[tuple[Mapping[str, int], PlannedStep]]] = tuple


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of a plan on a machine.

    Attributes:
        config: The configuration.
        job: The training step.
        machine: The hardware of one rank.
        plan: The plan.
        run: The plan as a workload, for formulas.
        rows: Memory of the largest rank by kind, activations included.
        is_traced: Whether activations come from a trace, not from shapes.
        reserved_bytes: Bytes that the allocator reserves at most, holes between tensors included.
        times: Seconds of a step by cause; None if the device is unknown.
        fit: Whether the plan fits; None if the memory is unknown.
        measured: Schedule of a micro-batch; empty unless `times` come from a calibration.
        forward_bytes: Peak bytes of the micro-batch before its backward begins.
    """

    config: ShardConfig
    job: PlannedStep
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
        """Whether its times come from a calibration."""
        return bool(self.measured)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """Peak bytes of the largest rank by place."""
        return sum_by_place(self.rows)

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of the memory that a rank computes in, which may be the host's."""
        peaks = self.peak_bytes
        return peaks[Place.DEVICE] + peaks[Place.HOST] * self.machine.is_host

    @property
    def step_time_s(self) -> float | None:
        """Seconds of a step; None if unknown."""
        return None if self.times is None else self.times.step

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks; None if unknown."""
        if self.times is None:
            return None
        batch = self.job.batch
        tokens = batch.seq_len * batch.micro_batch * batch.accumulation
        return tokens * self.plan.mesh.num_copies / self.config.context / self.times.step

    def bars(self) -> tuple[Bar, ...]:
        """Returns the schedule of one micro-batch; empty if the device is unknown."""
        if self.measured or self.times is None:
            return self.measured
        return divided_bars(self.plan, self.run, self.times)

    def phases(self, storage: Storage) -> tuple[Phase, ...]:
        """Returns the peak of the largest rank in each phase of a run with this storage."""
        return phases_of(self.plan, self.rows, self.forward_bytes, storage)

    def overhead(self) -> tuple[Overhead, ...]:
        """Returns estimates of memory beyond the rows; none for a device outside of the table."""
        if self.machine.device is None:
            return ()
        return overhead_of(self.plan, self.reserved_bytes - self.peak_bytes[Place.DEVICE])


def look(plan: Plan, config: ShardConfig, job: PlannedStep, machine: Machine) -> Outlook:
    """Returns the forecast of a plan on a machine."""
    plan = plan.trained_by(job.optimizer)
    run = workload(plan, config, job, machine)
    held = peak_memory(run)
    trace, state = job.trace, sum_by_place(plan.memory)[Place.DEVICE]
    if machine.memory_bytes is not None and state > machine.memory_bytes:
        trace = None  # even the state does not fit
    traced = trace(plan, config, job.batch.micro_batch) if trace is not None else None
    counted = _counted(run, held, job.chunk_size) if traced is None else traced.whole.rows()
    forward = sum(counted.values()) if traced is None else traced.forward.total
    counted["accumulation buffers"] = _accumulation_bytes(plan, job.batch)
    if machine.device is not None:
        counted[WORKSPACES] = held.base
    passing = round(sum(size for name, size in counted.items() if name in list(TensorKind)))
    # Owners' whole tensors are allocated in an update, when the micro-batch has freed its own.
    owners = [row for row in plan.memory if row.name == WHOLES and row.num_bytes > passing]
    rows = (
        *(row for row in plan.memory if row.name != WHOLES),
        *(replace(row, num_bytes=row.num_bytes - passing) for row in owners),
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
    measured = None
    if fit is not Fit.NO and machine.calibration is not None and job.work is not None:
        work = job.work(plan, config, job.batch.micro_batch)
        count = round(job.batch.accumulation)
        measured = None if work is None else step_time(plan, work, machine.calibration, count)
    times, bars = measured or (None, ())
    if measured is None and machine.device is not None and job.is_timed:
        times = step_times(run)
    found = (rows, traced is not None, reserved, times, fit, bars, round(forward))
    return Outlook(config, job, machine, plan, run, *found)


def time_by_formulas(
    plan: Plan, config: ShardConfig, job: PlannedStep, machine: Machine
) -> float | None:
    """Returns the seconds of a step of `look`; None if they are measured or unknown."""
    if machine.device is None or machine.calibration is not None or not job.is_timed:
        return None
    return step_times(workload(plan.trained_by(job.optimizer), config, job, machine)).step


def workload(plan: Plan, config: ShardConfig, job: PlannedStep, machine: Machine) -> Workload:
    """Returns the plan as a workload for formulas."""
    row = row_of(plan.strategy)
    sizes = Precision()
    for dtypes in (group.dtypes for group in plan.groups[:1]):
        sizes = Precision(
            gather=ITEMSIZE[dtypes.compute],
            reduce=ITEMSIZE[dtypes.reduce],
            master=ITEMSIZE[dtypes.master],
            math=Math.HALF if ITEMSIZE[dtypes.compute] == 2 else Math.FLOAT32,
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
        mesh=_parallelism(plan, config.context),
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


def _parallelism(plan: Plan, context: int) -> Parallelism:
    """The mesh of a plan, for formulas."""
    mesh, expert = plan.mesh, plan.most_parts // plan.mesh.inner
    shard, replicate = mesh.shard // context, mesh.replicate
    if mesh.shard % context:  # the context axis is a part of the replicate axis
        shard, replicate = mesh.shard, max(1, mesh.replicate // context)
    sizes = Parallelism(shard, replicate, tensor=mesh.inner, context=context, expert=expert)
    return replace(sizes, is_partial=mesh.inner > 1)


def _state_bytes(plan: Plan) -> float:
    """Bytes of optimizer state per trained parameter."""
    optimizer = plan.optimizer
    if optimizer.owned is None:
        return optimizer.kept_bytes(4)
    trained = [group for group in plan.groups if group.trainable]
    numel = sum(group.layout.part_numel for group in trained)
    return optimizer_bytes(trained, optimizer) / max(1, numel) + 4 * optimizer.num_averages


# Stands for an unknown device where only memory is computed.
_UNKNOWN = Device("unknown", 1.0, 1.0, 1.0, 1024 * GIB, 1.0, 1.0)


def _accumulation_bytes(plan: Plan, batch: Batch) -> int:
    """Receive buffers that accumulation adds to those of one micro-batch."""
    if batch.accumulation <= 1 or plan.grad_sync is GradSync.LAST_MICRO_BATCH:
        return 0
    return communication_bytes(plan, accumulates=True) - communication_bytes(plan)


def _counted(run: Workload, held: PeakMemory, chunk_size: int | None) -> dict[str, float]:
    """Estimate from shapes: at the peak there are logits or a block's activations, not both.

    There are logits and their gradient in the compute dtype, log-probabilities and theirs in
    float32. A loss in chunks also accumulates the gradient of the head's weight, in float32.
    """
    element = 4 if run.precision.math is Math.FLOAT32 else 2
    tokens, wide = run.tokens_per_micro_batch / run.mesh.context, 0.0
    if chunk_size is not None and chunk_size < tokens:
        tokens, wide = chunk_size, 4 * run.model.head_params
    logits = (2 * element + 8) * run.model.vocab * tokens + wide
    return {
        TensorKind.ACTIVATIONS: held.kept + max(0.0, held.block - logits),
        TensorKind.LOGITS: logits,
    }


@dataclass(frozen=True)
class Lack:
    """A memory that is too small for a run.

    Attributes:
        where: The memory in words: the device, this machine, or the container's limit.
        needed: Bytes that a rank needs.
        memory: Bytes that a rank has.
        process: The part of `needed` that is no tensor's.
    """

    where: str
    needed: int
    memory: int
    process: int = 0

    @classmethod
    def of(cls, machine: Machine, device: int, host: int) -> Lack | None:
        """The memory that is exceeded by most; None if both are large enough, or not known.

        Args:
            machine: Machine of a rank.
            device: Bytes of a rank's tensors on a device with a memory of its own.
            host: Bytes of a rank's tensors in the host's memory.
        """
        found, process, own = list[Lack](), machine.process_bytes, machine.memory_bytes
        if not machine.is_host and own is not None and device > own:
            found.append(cls("the device", device, own))
        if machine.host_bytes is not None and host > machine.host_bytes:
            found.append(cls(machine.limit, host + process, machine.host_bytes + process, process))
        return max(found, key=lambda one: one.needed / max(1, one.memory), default=None)

    def refusal(self, rows: Sequence[MemoryRow], advice: Sequence[str]) -> str:
        """Why a run is not started, with the plan's rows and advice in sentences."""
        message = (
            f"memory: expected at most {human_bytes(self.memory)} per rank of {self.where}; "
            f"the run takes {human_bytes(self.needed)}: "
            f"{Fit.NO.sentence(self.needed, self.memory)}"
        )
        if self.process:
            message += (
                f" Tensors take {human_bytes(self.needed - self.process)} per rank; its process "
                f"and its share of the launcher take {human_bytes(self.process)}."
            )
        smaller = "more devices, a smaller model or batch, or shorter sequences (max_seq_length)"
        return with_plan(message, rows, advice or [smaller])


def with_plan(message: str, rows: Sequence[MemoryRow], advice: Sequence[str]) -> str:
    """A message about memory, followed by the plan's table of memory and by advice."""
    most = max(rows, key=lambda row: row.num_bytes)
    return "\n".join(
        [
            message,
            "planned for the largest rank:",
            *(
                f"  {row.name:<28}{human_bytes(row.num_bytes):>12}"
                + ("   <- the largest" if row is most else "")
                for row in rows
            ),
            "what would help:",
            *(f"  {line}" for line in advice),
        ]
    )
