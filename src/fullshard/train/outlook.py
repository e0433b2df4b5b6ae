"""What a configuration's step is to the planner: the model's shapes and a rank's batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import nn

import fullshard as fs
from fullshard.config.environment import cache_folder, read_launch_environment
from fullshard.config.schema import RunConfig, ShardConfig, TrainingConfig
from fullshard.config.values import Backend, IntervalStrategy, Strategy, Transport
from fullshard.engine.collectives.shared_home.segment import Host
from fullshard.errors import ConfigError
from fullshard.launch.machine import describe_machine
from fullshard.launch.topology import configured_topology
from fullshard.planner.calibration import FILE_NAME, Calibration, read_calibration
from fullshard.planner.forecast.architecture import Shapes, decoder
from fullshard.planner.forecast.devices import Device, find_device
from fullshard.planner.forecast.memory import GIB
from fullshard.planner.forecast.workload import Batch
from fullshard.planner.hardware import Fit, Gpus
from fullshard.planner.homes import Place
from fullshard.planner.optimizers import states_of
from fullshard.planner.outlook import Job, Machine, Outlook, look
from fullshard.planner.phases import Storage
from fullshard.planner.plan import Plan
from fullshard.planner.search import MICRO_BATCH, PlanOf, advise, choose
from fullshard.planner.strategy import row_of
from fullshard.train.build import model_on_meta, weights_source
from fullshard.train.model import build_on_meta, quiet_libraries, require_transformers
from fullshard.train.prepare import Prepared, given_model_config
from fullshard.train.taught import Taught
from fullshard.train.tracing import Tracer

logger = logging.getLogger(__name__)


def job_of(
    model: nn.Module, training: TrainingConfig, world_size: int, taught: Taught | None = None
) -> Job:
    """A step's work on one rank.

    Args:
        model: A Hugging Face model; steps of one on meta are traced.
        training: Its batch.
        world_size: Ranks that share train_batch_size.
        taught: What it learns from, where that is a teacher.
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
    trace = Tracer(model, training.max_seq_length, taught) if on_meta else None
    model_shapes = decoder(shapes, _active_params(model, config, numel))
    job = Job(model_shapes, batch, trace, optimizer=states_of(training))
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


def on_one_host(config: ShardConfig, world_size: int) -> ShardConfig:
    """With the transport that ranks of one host take to compute on its CPU, where it was left open.

    As `resolve_transport` does it, before there are ranks.
    """
    if config.transport is not Transport.AUTO or world_size == 1:
        return config
    shares = row_of(config.strategy).shard_params and config.offload is None
    shared = shares and Host.here() is not None
    transport = Transport.SHARED if shared else Transport.DIRECT
    return config.model_copy(update={"transport": transport})


def this_machine(num_ranks: int) -> Machine:
    """What a rank of this host runs on: its GPU, or its part of the host's memory."""
    if not torch.cuda.is_available():
        return Machine(None, psutil.virtual_memory().total // num_ranks)
    facts = torch.cuda.get_device_properties(0)
    return machine_of(Gpus(num_ranks, facts.name, facts.total_memory))


@dataclass(frozen=True)
class View:
    """A run as the planner sees it, and how to see others.

    Attributes:
        outlook: What it takes.
        plan_of: Plans another configuration of the same model and ranks.
        machine: What a rank runs on.
        hosts: How many.
    """

    outlook: Outlook
    plan_of: PlanOf
    machine: Machine
    hosts: int

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

    def advice(self) -> list[str]:
        """What takes a tenth less at least, in words, of a run that found no more memory."""
        peak = self.outlook.peak_bytes[Place.DEVICE]
        machine = replace(self.machine, memory_bytes=min(self.machine.memory_bytes or peak, peak))
        before = replace(self.outlook, fit=Fit.TIGHT)  # whatever was planned
        found = advise(before, self.plan_of, machine, hosts=self.hosts)
        return [one.sentence(self.outlook) for one in found]


def view_of(config: RunConfig, model: nn.Module, world_size: int) -> View:
    """A run on this machine.

    A CPU's time is what was measured on it, where that is known.

    Args:
        config: Its configuration; `strategy: auto` stands for full_shard.
        model: Its model, on meta.
        world_size: All ranks.
    """
    launched = read_launch_environment()
    told = launched or configured_topology(config.launch)
    local = told.local_world_size or world_size

    hosts, on_gpu = -(-world_size // local), torch.cuda.is_available()

    def plan_of(sharding: ShardConfig) -> Plan:
        if hosts == 1 and not on_gpu:
            sharding = on_one_host(sharding, world_size)
        return fs.plan(model, sharding, world_size=world_size, local_world_size=local)

    sharding = config.sharding
    if sharding.strategy is Strategy.AUTO:
        sharding = sharding.model_copy(update={"strategy": Strategy.FULL_SHARD})
    machine = this_machine(local)
    if hosts == 1 and not on_gpu:
        machine = replace(machine, calibration=known_calibration(world_size))
    taught = Taught.of(config, local, on_gpu=on_gpu)
    job = job_of(model, config.training, world_size, taught)
    outlook = look(plan_of(sharding), sharding, job, machine)
    return View(outlook, plan_of, machine, hosts)


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
    return model_on_meta(config, given_model_config(config))


def storage_of(config: RunConfig) -> Storage:
    """What a run reads and writes."""
    training = config.training
    source = weights_source(config, lambda: build_on_meta(given_model_config(config)))
    saves = training.saves is not IntervalStrategy.NO
    return Storage(source, saves, training.save_total_limit)


def look_at(config: RunConfig, world_size: int, machine: Machine) -> Outlook:
    """What `fullshard plan` says of a configuration on ranks of one host."""
    model = model_of(config)
    plan = fs.plan(model, config.sharding, world_size=world_size)
    taught = Taught.of(config, world_size, on_gpu=machine.device is not None)
    job = job_of(model, config.training, world_size, taught)
    return look(plan, config.sharding, job, machine)


def outlook_of(prepared: Prepared, world_size: int) -> Outlook | None:
    """What a run takes; None for a backend whose memory the compiler lays out."""
    if prepared.config.backend is Backend.JAX:
        return None
    model = model_on_meta(prepared.config, prepared.model_config)
    return view_of(prepared.config, model, world_size).outlook


def leaves_something(config: RunConfig) -> bool:
    """Whether the planner chooses a part of a configuration."""
    return config.sharding.strategy is Strategy.AUTO or config.training.leaves_micro_batch


def with_choices(config: RunConfig, model: nn.Module, world_size: int) -> RunConfig:
    """What a configuration leaves to the planner, as the fastest that fits (see `choose`).

    `strategy: auto`, `per_device_train_batch_size: auto`. The sequences of an update are kept.
    Every rank comes to the same choice: hosts and devices of a run are taken to be alike.

    Raises:
        WillNotFitError: Nothing fits.
    """
    training, free = config.training, ["strategy"] * (config.sharding.strategy is Strategy.AUTO)
    if training.leaves_micro_batch:
        free.append(MICRO_BATCH)
        config = config.model_copy(update={"training": training.undivided(world_size)})
    if not free:
        return config
    view = view_of(config, model, world_size)
    chosen = choose(view.outlook, view.plan_of, view.machine, free, hosts=view.hosts)
    changes: dict[str, object] = {"sharding": chosen.config}
    if config.sharding.strategy is Strategy.AUTO:
        logger.info("strategy: auto is %s here", chosen.config.strategy)
    if training.leaves_micro_batch:
        batch = chosen.job.batch
        micro, count = round(batch.micro_batch), round(batch.accumulation)
        changes["training"] = config.training.in_micro_batches(micro, count)
        logger.info(
            "per_device_train_batch_size: auto is %d here, in %d micro-batch(es)", micro, count
        )
    return config.model_copy(update=changes)
