"""What a configuration's step is to the planner: the model's shapes and a rank's batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fullshard as fs
from fullshard.config import host_memory
from fullshard.config.environment import cache_folder, read_launch_environment
from fullshard.config.schema import RunConfig, ShardConfig, TrainingConfig
from fullshard.config.values import Backend, IntervalStrategy, Strategy, Transport
from fullshard.engine.hugging_face import build_on_meta
from fullshard.errors import ConfigError, OutOfMemoryError, ran_out_of_memory
from fullshard.launch.machine import configured_topology, describe_machine
from fullshard.models.build import (
    given_model_config,
    model_config_of,
    model_on_meta,
    weights_source,
)
from fullshard.models.config import quiet_libraries, require_transformers
from fullshard.outlook.calibration import FILE_NAME, Calibration, read_calibration
from fullshard.outlook.devices import Device, Gpus, find_device
from fullshard.outlook.memory import GIB, LOAD, Fit, Storage
from fullshard.outlook.predict import Job, Machine, Outlook, look
from fullshard.outlook.search import MICRO_BATCH, PlanAt, Study, choose, study
from fullshard.outlook.workload import Batch, Shapes, decoder
from fullshard.planner.homes import Place
from fullshard.planner.memory import MemoryRow
from fullshard.planner.mesh import Topology, resolve_mesh
from fullshard.planner.optimizers import OptimizerStates, states_of
from fullshard.planner.plan import Plan
from fullshard.planner.strategy import row_of
from fullshard.planner.text import human_bytes
from fullshard.recipes.distill.planned import Taught
from fullshard.recipes.distill.teacher import settings_of
from fullshard.recipes.head import whole_logits
from fullshard.run.tracing import Tracer
from fullshard.transport.shared.segment import Host

if TYPE_CHECKING:
    from fullshard.run.xla_outlook import XlaOutlook


def job_of(
    model: nn.Module,
    training: TrainingConfig,
    world_size: int,
    taught: Taught | None = None,
    chunk_size: int | None = None,
) -> Job:
    """A step's work on one rank.

    Args:
        model: A Hugging Face model; steps of one on meta are traced.
        training: Its batch.
        world_size: Ranks that share train_batch_size.
        taught: What it learns from, where that is a teacher.
        chunk_size: Tokens whose logits are held at a time; None: those of all tokens.
    """
    training = training.divided(world_size)
    batch = Batch(
        training.max_seq_length,
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
    )
    config: Any = model.config
    config = getattr(config, "text_config", config)
    numel = sum(param.numel() for param in model.parameters())
    width = _number(config, "hidden_size")
    shapes = Shapes(
        num_params=numel,
        layers=_number(config, "num_hidden_layers"),
        width=width,
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads"),
        mlp_width=_number(config, "intermediate_size", "n_inner") or (4 * width if width else None),
        vocab=_number(config, "vocab_size"),
    )
    on_meta = all(param.is_meta for param in model.parameters())
    trace = Tracer(model, training.max_seq_length, taught, chunk_size) if on_meta else None
    model_shapes = decoder(shapes, _active_params(model, config, numel))
    job = Job(model_shapes, batch, trace, optimizer=states_of(training), chunk_size=chunk_size)
    if taught is not None:  # what a teacher computes is in no forecast
        return replace(job, beside=taught.rows, is_timed=False)
    if job.optimizer.owned is not None:  # nor what an owner does
        return replace(job, is_timed=False)
    return replace(job, work=trace.work if trace else None)


def _number(config: Any, *names: str) -> int | None:
    """The first of these that a configuration holds."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _active_params(model: nn.Module, config: Any, numel: int) -> float | None:
    """Parameters that a token uses, where some are experts'."""
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    chosen = _number(config, "num_experts_per_tok", "num_experts_per_token")
    count = _number(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts or chosen is None or count is None:
        return None
    return numel - experts * (1 - chosen / count)


def machine_of(hardware: Gpus | None, own: Mapping[str, Device] | None = None) -> Machine:
    """What a rank runs on, as far as the description of a machine's GPUs says.

    Args:
        hardware: The description.
        own: Devices that the user has described, by name.
    """
    if hardware is None or hardware.memory_bytes is None:
        return Machine(None, None)
    if own and hardware.name in own:
        return Machine(own[hardware.name], hardware.memory_bytes)
    try:
        device = find_device(hardware.name, hardware.memory_bytes / GIB) if hardware.name else None
    except KeyError:
        device = None
    return Machine(device, hardware.memory_bytes)


def transport_here(config: ShardConfig, topology: Topology) -> ShardConfig:
    """With the transport that ranks of this machine take where it was left open.

    As `resolve_transport` does it, before there are ranks; ranks of a host are neighbours.
    """
    world = topology.world_size
    if config.transport is Transport.FAKE:
        return config
    kind = config.transport
    if world == 1:
        kind = Transport.DIRECT
    elif kind is Transport.AUTO and torch.cuda.is_available():
        kind = Transport.C10D
    elif kind is Transport.AUTO:
        mesh = resolve_mesh(row_of(config.strategy), topology, config.replicate, config.shard)
        together = topology.ranks_per_host % mesh.shard == 0
        shares = mesh.shard > 1 and together and config.offload is None
        kind = Transport.SHARED if shares and Host.here() is not None else Transport.DIRECT
    return config.model_copy(update={"transport": kind})


def this_machine(num_ranks: int) -> Machine:
    """What a rank of this host runs on: its GPU, or its part of the host's memory."""
    host_bytes = host_memory.total_bytes() // num_ranks
    if not torch.cuda.is_available():
        return Machine(None, host_bytes, host_bytes=host_bytes, is_host=True)
    facts = torch.cuda.get_device_properties(0)
    found = machine_of(Gpus(num_ranks, facts.name, facts.total_memory))
    return replace(found, host_bytes=host_bytes)


def topology_of(config: RunConfig, world_size: int) -> Topology:
    """A run's ranks, and how many of them are on this machine."""
    told = read_launch_environment() or configured_topology(config.launch)
    return Topology(world_size, told.local_world_size or world_size)


@dataclass(frozen=True)
class View:
    """A run as the planner sees it: what `plan`, a dry run and the run itself show.

    Attributes:
        config: Configuration of the run; what was left to the planner is filled in.
        outlook: What it takes.
        plan_at: Plans another configuration of the same model, on any ranks.
        machine: What a rank runs on.
        topology: Its ranks.
        storage: What it reads and writes.
        whole_logits: Why its loss holds the logits of all tokens; None: it does not.
    """

    config: RunConfig
    outlook: Outlook
    plan_at: PlanAt
    machine: Machine
    topology: Topology
    storage: Storage
    whole_logits: str | None = None

    @property
    def plan(self) -> Plan:
        return self.outlook.plan

    def plan_of(self, sharding: ShardConfig) -> Plan:
        """Another configuration on the same ranks."""
        return self.plan_at(sharding, self.topology)

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        return self.outlook.rows

    def utilization(self) -> float | None:
        """What one token a second of all ranks is, as a share of the devices' bf16 peaks.

        Times the speed it is model FLOPs utilization. None where the device is not known.
        """
        device, job = self.machine.device, self.outlook.job
        if device is None:
            return None
        units = self.outlook.plan.units
        trained = sum(unit.numel for unit in units if unit.trainable)
        share = trained / sum(unit.numel for unit in units)
        flops = job.model.flops_per_token(job.batch.seq_len, share)
        return flops / (device.peak * self.outlook.plan.mesh.world_size)

    def study(self) -> Study:
        """With advice: for a run that does not fit, from what each phase of it needs."""
        outlook, machine, lack = self.outlook, self.machine, self.lack()
        if lack is not None and machine.memory_bytes is not None:
            beyond = max(0, lack.needed - outlook.peak_bytes[Place.DEVICE]) * machine.is_host
            machine = replace(machine, memory_bytes=max(1, machine.memory_bytes - beyond))
            outlook = replace(outlook, fit=Fit.NO, machine=machine)
        found = study(outlook, self.plan_at, self.topology, self.storage)
        return replace(found, outlook=replace(outlook, machine=self.machine))

    def advice(self) -> list[str]:
        """What takes a tenth less at least, in words, of a run that found no more memory."""
        peak = self.outlook.peak_bytes[Place.DEVICE]
        machine = replace(self.machine, memory_bytes=min(self.machine.memory_bytes or peak, peak))
        before = replace(self.outlook, fit=Fit.TIGHT, machine=machine)  # whatever was planned
        found = study(before, self.plan_at, self.topology).advice
        return [one.sentence(self.outlook) for one in found]

    def lack(self) -> Lack | None:
        """The memory that is short by most; None where all phases of the run fit."""
        phases, machine = self.outlook.phases(self.storage), self.machine
        if machine.is_host:  # weights come in where they stay
            needed = max(p.device + (p.host if p.name != LOAD else 0) for p in phases)
            found = [("this machine", needed, machine.memory_bytes)]
        else:
            found = [
                ("the device", max(p.device for p in phases), machine.memory_bytes),
                ("the host", max(p.host for p in phases), machine.host_bytes),
            ]
        lacks = [Lack(where, n, has) for where, n, has in found if has is not None and n > has]
        return max(lacks, key=lambda one: one.needed / max(1, one.memory), default=None)


@dataclass(frozen=True)
class Lack:
    """More than there is.

    Attributes:
        where: Whose memory it is.
        needed: Bytes that a rank needs.
        memory: Bytes that a rank has.
    """

    where: str
    needed: int
    memory: int

    def refusal(self, rows: Sequence[MemoryRow], advice: Sequence[str]) -> str:
        """Why a run is not started, with the plan's rows and advice in sentences."""
        told = (
            f"memory: expected at most {human_bytes(self.memory)} a rank, which is what "
            f"{self.where} has for it; the plan takes {human_bytes(self.needed)}: "
            f"{Fit.NO.sentence(self.needed, self.memory)}"
        )
        smaller = "more devices, a smaller model or batch, or shorter sequences (max_seq_length)"
        return with_plan(told, rows, advice or [smaller])


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


def view_of(
    config: RunConfig,
    model: nn.Module,
    topology: Topology,
    machine: Machine | None = None,
    optimizer: OptimizerStates | None = None,
) -> View:
    """What a run will do and take: the one place where its plan is made.

    `strategy: auto` and `per_device_train_batch_size: auto` are chosen: the fastest that fits (see
    `choose`), with the sequences of an update kept. Every rank comes to the same choice: hosts and
    devices of a run are taken to be alike. A CPU's time is what was measured on it, where known.

    Args:
        config: Configuration of the run.
        model: Its model, on meta.
        topology: Its ranks.
        machine: What a rank runs on; None: this machine.
        optimizer: States other than those of the configuration's optimizer.

    Raises:
        ConfigError: The mesh, the units or a glob are impossible for this model.
        WillNotFitError: Something is left to the planner, and nothing fits.
    """
    world, hosts = topology.world_size, topology.num_hosts
    if machine is None:
        machine = this_machine(topology.ranks_per_host)
        if hosts == 1 and machine.is_host:
            machine = replace(machine, calibration=known_calibration(world))
    is_here = machine.host_bytes is not None

    def resolved(sharding: ShardConfig, topology: Topology = topology) -> ShardConfig:
        return transport_here(sharding, topology) if is_here else sharding

    def plan_at(sharding: ShardConfig, topology: Topology) -> Plan:
        world, local = topology.world_size, topology.local_world_size
        sharding = resolved(sharding, topology)
        return fs.plan(model, sharding, world_size=world, local_world_size=local)

    sharding, training, free = config.sharding, config.training, list[str]()
    if sharding.strategy is Strategy.AUTO:
        sharding = sharding.model_copy(update={"strategy": Strategy.FULL_SHARD})
        free.append("strategy")
    if training.leaves_micro_batch:
        training = training.undivided(world)
        free.append(MICRO_BATCH)
    on_gpu = machine.device is not None or torch.cuda.is_available()
    taught = Taught.of(config, topology.local_world_size, on_gpu=on_gpu, resolved=resolved)
    whole = whole_logits(model, config) if taught is None else None
    chunk_size = None if whole else settings_of(config).tokens_at_once
    job = job_of(model, training, world, taught, chunk_size)
    if optimizer is not None:
        job = replace(job, optimizer=optimizer)
    outlook = look(plan_at(sharding, topology), sharding, job, machine)
    if free:
        outlook = choose(outlook, lambda s: plan_at(s, topology), free, hosts=hosts)
        config = _with_choices(config, outlook, free)
    return View(config, outlook, plan_at, machine, topology, storage_of(config), whole)


def _with_choices(config: RunConfig, outlook: Outlook, free: Sequence[str]) -> RunConfig:
    """A configuration with the values that the planner chose."""
    changes: dict[str, object] = {"sharding": outlook.config} if "strategy" in free else {}
    if MICRO_BATCH in free:
        batch = outlook.job.batch
        micro, count = round(batch.micro_batch), round(batch.accumulation)
        changes["training"] = config.training.in_micro_batches(micro, count)
    return config.model_copy(update=changes)


def known_calibration(world_size: int) -> Calibration | None:
    """What `fullshard bench calibrate` found on this machine with so many ranks, if it did."""
    path = cache_folder() / FILE_NAME
    try:
        found = read_calibration(path) if path.is_file() else None
    except ConfigError:  # `fullshard plan` says what is wrong with it
        return None
    if found is None or found.machine != describe_machine() or found.of(world_size) is None:
        return None
    return found


def model_of(config: RunConfig) -> nn.Module:
    """The model as it will be trained, of a configuration alone: without storage or data."""
    require_transformers()
    quiet_libraries()
    return model_on_meta(config, model_config_of(config))


def storage_of(config: RunConfig) -> Storage:
    """What a run reads and writes."""
    training = config.training
    source = weights_source(config, lambda: build_on_meta(given_model_config(config)))
    saves = training.saves is not IntervalStrategy.NO
    return Storage(source, saves, training.save_total_limit)


def look_at(config: RunConfig, world_size: int, machine: Machine) -> Outlook:
    """What `fullshard plan` says of a configuration on ranks of one host."""
    return view_of(config, model_of(config), Topology(world_size), machine).outlook


def foresee(config: RunConfig, topology: Topology) -> View | XlaOutlook:
    """A run on this machine, on either engine.

    Raises:
        ConfigError: See `view_of`.
        WillNotFitError: See `view_of`.
    """
    if config.backend is not Backend.JAX:
        return view_of(config, model_of(config), topology)
    from fullshard.run.xla_outlook import look

    require_transformers()
    quiet_libraries()
    machine = this_machine(topology.ranks_per_host)
    world = topology.world_size
    return look(config, model_config_of(config), world, on_cpu=machine.is_host, machine=machine)


def leaves_something(config: RunConfig) -> bool:
    """Whether the planner chooses a part of a configuration."""
    return config.sharding.strategy is Strategy.AUTO or config.training.leaves_micro_batch


@contextlib.contextmanager
def answered(view: Callable[[], View]) -> Iterator[None]:
    """Turn running out of memory inside the block into an error that says what to change.

    Args:
        view: The run as it was planned; asked only if memory runs out.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(_answer(view(), error)) from error


def _answer(view: View, error: BaseException) -> str:
    peak, memory = view.outlook.peak_bytes[Place.DEVICE], view.machine.memory_bytes or 0
    said = (str(error).splitlines() or ["no more memory"])[0]
    expected = f"{human_bytes(peak)} of {human_bytes(memory)} a rank"
    smaller = "a smaller per_device_train_batch_size, or activation_checkpointing: block"
    message = f"memory: expected to need {expected}; got: {said}"
    return with_plan(message, view.outlook.rows, view.advice() or [smaller])
