"""The plan of a run before it starts: its memory and time, and whether it fits.

`foresee` makes it for either engine. The end of this file traces the run's micro-batches.

[Note: traced in part]
Memory and compute of a micro-batch come from tracing the run's own model and loss. Only some blocks
of a deep model are traced. If blocks repeat with period p (1 if all are alike), the difference
between a model of 2p blocks and one of p is what every further p blocks add. If the full depth is r
more than a multiple of p, models of p + r and 2p + r blocks are traced. Blocks before the first
period (the dense ones of a mixture of experts) are in both.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fullshard as fs
from fullshard.config import host_memory
from fullshard.config.environment import cache_folder, read_launch_environment
from fullshard.config.schema import RunConfig, ShardConfig, TrainingConfig
from fullshard.config.values import (
    Backend,
    IntervalStrategy,
    RecomputeKind,
    Strategy,
    TransportKind,
)
from fullshard.engine.axes import LocalModel, has_experts, one_place, rules_of
from fullshard.engine.hugging_face import build_on_meta
from fullshard.engine.model_spec import spec_of
from fullshard.engine.tracing import trace_step, trace_work
from fullshard.errors import ConfigError, OutOfMemoryError, ran_out_of_memory
from fullshard.launch.machine import configured_topology, describe_machine
from fullshard.models.build import (
    given_model_config,
    model_config_of,
    model_on_meta,
    sharding_for,
    weights_source,
)
from fullshard.outlook.devices import (
    CALIBRATION_FILE,
    Calibration,
    Device,
    Gpus,
    find_device,
    read_calibration,
)
from fullshard.outlook.memory import (
    GIB,
    LAUNCHER_PROCESS,
    LOAD,
    RANK_PROCESS,
    WORKER_PROCESS,
    Fit,
    Storage,
)
from fullshard.outlook.predict import Lack, Machine, Outlook, PlannedStep, look, with_plan
from fullshard.outlook.search import AXES, MICRO_BATCH, PlanAt, Study, choose, study
from fullshard.outlook.workload import Batch, Shapes, decoder
from fullshard.planner.memory import MemoryRow
from fullshard.planner.mesh import Topology, mesh_of
from fullshard.planner.optimizers import OptimizerStates, states_of
from fullshard.planner.plan import Plan
from fullshard.planner.spec import is_inside, parent_name
from fullshard.planner.text import human_bytes
from fullshard.planner.tracing import Moment, Peaks, Work, between, peaks, peaks_between
from fullshard.planner.units import Place
from fullshard.planner.wrap import recomputed_modules, repeated_blocks
from fullshard.recipes.base import whole_logits_loss
from fullshard.recipes.context import check_context
from fullshard.recipes.distill.recipe import PlannedTeacher, settings_of
from fullshard.recipes.head import MOST_TRACED, Head, next_token, whole_logits
from fullshard.transport.segment import Host

if TYPE_CHECKING:
    from fullshard.run.xla_outlook import XlaOutlook

logger = logging.getLogger(__name__)


def job_of(
    model: nn.Module,
    training: TrainingConfig,
    num_batches: int,
    teacher: PlannedTeacher | None = None,
    chunk_size: int | None = None,
    place: LocalModel | None = None,
) -> PlannedStep:
    """The work of a step on one rank.

    Args:
        model: A Hugging Face model on meta.
        training: Training section of the run, with the batch size.
        num_batches: Number of batches that share train_batch_size.
        teacher: Teacher of the model, if any.
        chunk_size: Tokens whose logits are in memory at a time; None: all tokens.
        place: One rank's part of the model along other axes, which is traced; None: `model`.
    """
    training, states = training.divided(num_batches), states_of(training)
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
    place = place or LocalModel(model)
    length = training.max_seq_length // place.num_sequence_parts
    trace = Tracer(place.model, length, teacher, chunk_size, on_gpu=place.on_gpu)
    experts, chosen, active = _experts(model, config, numel)
    # The forecast of time includes no teacher and no owned optimizer; calibrations include no
    # exchange of activations between ranks.
    is_timed = teacher is None and states.owned is None
    is_alone = place.model is model and place.num_sequence_parts == 1
    return PlannedStep(
        model=replace(decoder(shapes, active), expert_params=experts, chosen=chosen),
        batch=Batch(
            training.max_seq_length,
            training.per_device_train_batch_size,
            training.gradient_accumulation_steps,
        ),
        trace=trace,
        work=trace.work if is_timed and is_alone else None,
        optimizer=states,
        beside=teacher.rows if teacher else None,
        is_timed=is_timed,
        chunk_size=chunk_size,
    )


def _number(config: Any, *names: str) -> int | None:
    """The first positive number of a configuration under these names."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _experts(model: nn.Module, config: Any, numel: int) -> tuple[int, int, float | None]:
    """Parameters of experts, experts that a token uses in a block, and all that it uses.

    (0, 0, None) for a model that is no mixture of experts.
    """
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    chosen = _number(config, "num_experts_per_tok", "num_experts_per_token")
    count = _num_experts(config)
    if not experts or chosen is None or count is None:
        return 0, 0, None
    return experts, chosen, numel - experts * (1 - chosen / count)


def _num_experts(config: Any) -> int | None:
    return _number(config, "num_experts", "num_local_experts", "n_routed_experts")


def machine_of(hardware: Gpus | None, own: Mapping[str, Device] | None = None) -> Machine:
    """A rank's machine, from a description of GPUs.

    Args:
        hardware: Name, number and memory of the GPUs.
        own: Devices that the user described, by name.
    """
    if hardware is None or hardware.memory_bytes is None:
        return Machine(None, None)
    device = (own or {}).get(hardware.name)
    if device is None and hardware.name:
        with contextlib.suppress(KeyError):
            device = find_device(hardware.name, hardware.memory_bytes / GIB)
    return Machine(device, hardware.memory_bytes)


def transport_here(config: ShardConfig, topology: Topology) -> ShardConfig:
    """The configuration with the transport that `auto` means on this machine.

    Decides like `resolve_transport`, but before there are ranks. Ranks of a host are neighbours.
    """
    kind = config.transport
    if topology.world_size == 1 and kind is not TransportKind.FAKE:
        kind = TransportKind.DIRECT
    elif kind is TransportKind.AUTO and torch.cuda.is_available():
        kind = TransportKind.C10D
    elif kind is TransportKind.AUTO:
        mesh = mesh_of(config, topology)
        together = topology.ranks_per_host % (mesh.shard * mesh.inner) == 0
        shares = mesh.shard > 1 and together
        kind = TransportKind.SHARED if shares and Host.here() is not None else TransportKind.DIRECT
    return config.model_copy(update={"transport": kind})


def this_machine(num_ranks: int) -> Machine:
    """The machine of a rank on this host: its GPU, or its part of the host's memory."""
    limit, each = host_memory.limit(), RANK_PROCESS + WORKER_PROCESS
    process = each + LAUNCHER_PROCESS // num_ranks
    left = limit.num_bytes // num_ranks - process
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found = machine_of(Gpus(num_ranks, facts.name, facts.total_memory))
    else:
        found = Machine(None, left, is_host=True)
    return replace(found, host_bytes=left, process_bytes=process, limit=str(limit))


def topology_of(config: RunConfig, world_size: int) -> Topology:
    """Number of ranks of a run, and number of those on this machine."""
    told = read_launch_environment() or configured_topology(config.launch)
    return Topology(world_size, told.local_world_size or world_size)


EXPERTS_OF_A_RANK = 4  # at least, on an expert axis that the search tries


@dataclass(frozen=True)
class View:
    """The plan of a run with its forecast, shown by `plan`, a dry run and the run itself.

    Attributes:
        config: Configuration of the run, with the planner's choices filled in.
        outlook: Memory and time of the plan.
        plan_at: Plans another configuration of the same model, on any number of ranks.
        machine: Machine of a rank.
        topology: Ranks of the run.
        storage: Files that the run reads and writes.
        whole_logits: Why the loss needs the logits of all tokens at once; None: it does not.
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
        """Plan of another sharding on the same ranks."""
        return self.plan_at(sharding, self.topology)

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        return self.outlook.rows

    def utilization(self) -> float | None:
        """Model FLOPs utilization at one token per second, relative to the devices' bf16 peaks.

        Multiply it by the tokens per second of all ranks. None if the device is not known.
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
        """The outlook with advice; if the run does not fit, from the needs of each phase."""
        outlook, machine, lack = self.outlook, self.machine, self.lack()
        if lack is not None and machine.memory_bytes is not None:
            tensors = lack.needed - lack.process
            beyond = max(0, tensors - outlook.peak_bytes[Place.DEVICE]) * machine.is_host
            machine = replace(machine, memory_bytes=max(1, machine.memory_bytes - beyond))
            outlook = replace(outlook, fit=Fit.NO, machine=machine)
        found = study(outlook, self.plan_at, self.topology, self.storage)
        return replace(found, outlook=replace(outlook, machine=self.machine))

    def advice(self) -> list[str]:
        """Changes that save at least a tenth of the memory, for a run that ran out of memory."""
        peak = self.outlook.peak_bytes[Place.DEVICE]
        machine = replace(self.machine, memory_bytes=min(self.machine.memory_bytes or peak, peak))
        before = replace(self.outlook, fit=Fit.TIGHT, machine=machine)  # as if tight
        found = study(before, self.plan_at, self.topology).advice
        return [one.sentence(self.outlook) for one in found]

    def lack(self) -> Lack | None:
        """The memory that is exceeded by most; None if all phases of the run fit."""
        phases = self.outlook.phases(self.storage)
        if self.machine.is_host:  # weights are loaded into the memory that they stay in
            return Lack.of(
                self.machine, 0, max(p.device + p.host * (p.name != LOAD) for p in phases)
            )
        return Lack.of(self.machine, max(p.device for p in phases), max(p.host for p in phases))


def view_of(
    config: RunConfig,
    model: nn.Module,
    topology: Topology,
    machine: Machine | None = None,
    optimizer: OptimizerStates | None = None,
) -> View:
    """Makes the plan of a run and its forecast. Ranks make the same plan again in `fs.shard`.

    `strategy: auto` and `per_device_train_batch_size: auto` become the fastest choice that fits
    (see `choose`), with the same number of sequences per update. Every rank makes the same choice,
    because hosts and devices of a run are assumed to be alike. Times of a CPU come from its
    calibration, if there is one.

    Args:
        config: Configuration of the run.
        model: Model of the run, on meta.
        topology: Ranks of the run.
        machine: Machine of a rank; None: this machine.
        optimizer: Optimizer states to plan for, in place of those of the configured optimizer.

    Raises:
        ConfigError: The mesh, the units or a glob are impossible for this model.
        WillNotFitError: A choice is left to the planner, and nothing fits.
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
        sharding = sharding_for(config.model_copy(update={"sharding": sharding}), model)
        sharding = resolved(sharding, topology)
        return fs.plan(model, sharding, world_size=world, local_world_size=local)

    sharding, training, free = _left_open(config, world)
    on_gpu = machine.device is not None or torch.cuda.is_available()
    teacher = PlannedTeacher.of(config, topology.local_world_size, on_gpu=on_gpu, resolved=resolved)
    beside = () if teacher is None or teacher.model is None else (teacher.model,)
    if not any(map(has_experts, beside)):  # otherwise the expert axis is the teacher's
        rules_of(model, config.sharding)
    for one in (model, *beside):
        check_context(one, sharding, training.max_seq_length)
    whole = whole_logits(model, config) if teacher is None else None
    chunk_size = None if whole else settings_of(config).tokens_at_once

    def job_at(sharding: ShardConfig) -> PlannedStep:
        named = sharding_for(config.model_copy(update={"sharding": sharding}), model)
        place = replace(one_place(model, named), num_sequence_parts=sharding.context, on_gpu=on_gpu)
        num_batches = sharding.num_batches(world)
        job = job_of(model, training, num_batches, teacher, chunk_size, place)
        return job if optimizer is None else replace(job, optimizer=optimizer)

    job = job_at(sharding)
    if teacher is None and machine.device is not None and config.lora is None:
        job = replace(job, divided=cache(partial(_ways, model, sharding, topology, job_at, job)))
    outlook = look(plan_at(sharding, topology), sharding, job, machine)
    if free:
        outlook = choose(outlook, lambda s: plan_at(s, topology), free, hosts=hosts)
        config = _with_choices(config, outlook, free)
    return View(config, outlook, plan_at, machine, topology, storage_of(config), whole)


def _left_open(config: RunConfig, world_size: int) -> tuple[ShardConfig, TrainingConfig, list[str]]:
    """The configuration with values in place of `auto`, and the keys that the planner chooses."""
    sharding, training, free = config.sharding, config.training, list[str]()
    if sharding.strategy is Strategy.AUTO:
        sharding = sharding.model_copy(update={"strategy": Strategy.FULL_SHARD})
        free += ["strategy", "sharding.expert"]
    if training.leaves_micro_batch:
        training = training.undivided(sharding.num_batches(world_size))
        free += [MICRO_BATCH, "sharding.tensor"] if free else [MICRO_BATCH]
    return sharding, training, free


def _ways(
    model: nn.Module,
    sharding: ShardConfig,
    topology: Topology,
    job_at: Callable[[ShardConfig], PlannedStep],
    job: PlannedStep,
) -> list[tuple[dict[str, int], PlannedStep]]:
    """Sizes of a tensor or an expert axis for a run that has none, and the step with each.

    An expert axis gives each rank several experts, because all wait for the rank with most tokens.
    """
    local, world = topology.ranks_per_host, topology.world_size
    sizes = sharding.tensor, sharding.expert, sharding.context, sharding.shard, sharding.replicate
    is_free = job.optimizer.owned is None and sharding.transport is not TransportKind.SHARED
    is_given = not sharding.model_fields_set.isdisjoint(AXES)
    if is_given or sizes != (1, 1, 1, None, None) or not is_free:
        return []
    tried = [{"tensor": size} for size in (2, 8)]
    if has_experts(model):
        settings: Any = model.config
        count = _num_experts(settings.get_text_config()) or 1
        most = max(1, count // EXPERTS_OF_A_RANK)
        fitting = [n for n in range(1, most + 1) if count % n == 0 and world % n == 0]
        expert = {max(n for n in fitting if n <= local * hosts) for hosts in (1, 8)} - {1}
        tried = [{"expert": size} for size in sorted(expert)]
    found = list[tuple[dict[str, int], PlannedStep]]()
    for axes in tried:
        with contextlib.suppress(ConfigError):  # it does not divide the model or the ranks
            divided = sharding.model_copy(update=axes)
            mesh_of(divided, topology)
            step, batch = job_at(divided), job.batch
            batch = replace(batch, accumulation=batch.accumulation * divided.tensor)
            found.append((axes, replace(step, batch=batch)))
    return found


def _with_choices(config: RunConfig, outlook: Outlook, free: Sequence[str]) -> RunConfig:
    """A configuration with the values that the planner chose."""
    changes: dict[str, object] = {"sharding": outlook.config} if "strategy" in free else {}
    if MICRO_BATCH in free:
        batch = outlook.job.batch
        micro, count = round(batch.micro_batch), round(batch.accumulation)
        changes["training"] = config.training.in_micro_batches(micro, count)
    return config.model_copy(update=changes)


def known_calibration(world_size: int) -> Calibration | None:
    """The result of `fullshard bench calibrate` for this machine and number of ranks, if any."""
    path = cache_folder() / CALIBRATION_FILE
    try:
        found = read_calibration(path) if path.is_file() else None
    except (ConfigError, OSError):  # `fullshard plan` reports it
        return None
    if found is None or found.machine != describe_machine() or found.of(world_size) is None:
        return None
    return found


def model_of(config: RunConfig) -> nn.Module:
    """The model of a run on meta, built without its data."""
    return model_on_meta(config, model_config_of(config))


def storage_of(config: RunConfig) -> Storage:
    """Files that a run reads and writes."""
    training = config.training
    source = weights_source(config, lambda: build_on_meta(given_model_config(config)))
    saves = training.saves is not IntervalStrategy.NO
    return Storage(source, saves, training.save_total_limit)


def look_at(config: RunConfig, world_size: int, machine: Machine) -> Outlook:
    """The outlook of a configuration on the ranks of one host."""
    return view_of(config, model_of(config), Topology(world_size), machine).outlook


def foresee(config: RunConfig, topology: Topology) -> View | XlaOutlook:
    """The plan and forecast of a run on this machine, for either engine.

    Raises:
        ConfigError: See `view_of`.
        WillNotFitError: See `view_of`.
    """
    if config.backend is not Backend.JAX:
        return view_of(config, model_of(config), topology)
    from fullshard.run.xla_outlook import look

    machine = this_machine(topology.ranks_per_host)
    world = topology.world_size
    return look(config, model_config_of(config), world, on_cpu=machine.is_host, machine=machine)


def leaves_choices(config: RunConfig) -> bool:
    """Whether a value of the configuration is `auto`, so that the planner chooses it."""
    return config.sharding.strategy is Strategy.AUTO or config.training.leaves_micro_batch


@contextlib.contextmanager
def explained_memory(view: Callable[[], View]) -> Iterator[None]:
    """Turn running out of memory inside the block into an error that suggests changes.

    Args:
        view: Returns the plan of the run; called only if memory runs out.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        found, said = view(), (str(error).splitlines() or ["no more memory"])[0]
        peak, memory = found.outlook.peak_bytes[Place.DEVICE], found.machine.memory_bytes or 0
        expected = f"{human_bytes(peak)} of {human_bytes(memory)} per rank"
        smaller = "a smaller per_device_train_batch_size, or activation_checkpointing: block"
        message = f"memory: expected to need {expected}; got: {said}"
        told = with_plan(message, found.rows, found.advice() or [smaller])
        raise OutOfMemoryError(told) from error


# ---- tracing a micro-batch

MOST_BLOCKS = 12  # deeper models are traced in part
MOST_SAMPLES = 3  # larger micro-batches are extrapolated from two traces


@dataclass(eq=False)
class Tracer:
    """Traces micro-batches of a causal language model, each kind once.

    Attributes:
        model: Model on meta; a copy, if its head is replaced.
        length: Tokens of a sample.
        teacher: Teacher of the model, if any.
        chunk_size: Tokens whose logits are in memory at a time; None: all tokens.
        on_gpu: Whether the steps will run on a GPU.
    """

    model: nn.Module
    length: int
    teacher: PlannedTeacher | None = None
    chunk_size: int | None = None
    on_gpu: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.model)
        if self.teacher is not None or self.chunk_size is not None:
            self.model = copy.deepcopy(self.model)
            Head(self.model)
        self._traces: dict[Any, list[Moment]] = {}
        self._found: dict[Any, Any] = {}

    def __call__(self, plan: Plan, config: ShardConfig, samples: float) -> Peaks | None:
        """The moments at which most memory is allocated; None if the model cannot be traced.

        Args:
            plan: Plan of the model.
            config: Sharding that the plan was made for, with its recompute.
            samples: Samples of a micro-batch.
        """
        what = "activations: computed from shapes"
        return self._once(self._find_peaks, what, len(plan.units), (plan, config, samples))

    def work(self, plan: Plan, config: ShardConfig, samples: float) -> Work | None:
        """The operations of every unit; None if the model cannot be traced.

        Blocks that were not traced compute what the traced blocks of their kind compute.
        """
        names = tuple(unit.name for unit in plan.units)
        return self._once(self.find_work, "step time: unknown", names, (plan, config, samples))

    def _once(
        self, find: Callable[..., Any], what: str, units: Any, of: tuple[Plan, ShardConfig, float]
    ) -> Any:
        """Calls `find` once per kind of plan; logs `what` and returns None if the trace fails."""
        plan, config, samples = of
        recompute = config.activation_checkpointing
        dtypes = frozenset(group.dtypes for unit in plan.units for group in unit.groups)
        key = (recompute, dtypes, units)
        if (key, samples) in self._found:
            return self._found[key, samples]
        found = None
        if recompute.kind is not RecomputeKind.OFFLOAD and samples == int(samples):
            plan = replace(plan, recompute=recomputed_modules(self.spec, recompute))
            try:
                found = find(plan, config, key, int(samples))
            except Exception as error:  # noqa: BLE001  a model's own code runs here
                said = (str(error).splitlines() or [""])[0]
                logger.info("%s, since a trace met %s", what, said)
        self._found[key, samples] = found
        return found

    def find_work(self, plan: Plan, config: ShardConfig, _: Any, samples: int) -> Work:
        work, blocks = self._work(samples, MOST_TRACED), repeated_blocks(self.spec)
        step, depth = self._depth(blocks, config)
        if depth is None:
            return trace_work(self.model, plan, config, work)
        model, part = _shallow(self.model, plan, blocks[depth:])
        found = trace_work(model, part, config, work)
        for at in range(depth, len(blocks)):
            like = blocks[at - step * -(-(at - depth + 1) // step)]
            alike = [name for name in found if is_inside(name, like)]
            found |= {blocks[at] + name[len(like) :]: found[name] for name in alike}
        return found

    def _find_peaks(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> Peaks | None:
        blocks = repeated_blocks(self.spec)
        step, depth = self._depth(blocks, config)
        if depth is None:
            return self._peaks(plan, config, (key, None), samples)
        depths = (depth - step, depth)
        ends = [self._peaks(plan, config, (key, depth), samples) for depth in depths]
        return between(ends[0], ends[1], depths, len(blocks))

    def _depth(self, blocks: Sequence[str], config: ShardConfig) -> tuple[int, int | None]:
        """Period of the blocks, and how many of them to trace; None: all."""
        first, period = self._pattern(blocks)
        step = math.lcm(period, config.activation_checkpointing.every)
        depth = first + 2 * step + (len(blocks) - first) % step
        return step, None if len(blocks) <= max(MOST_BLOCKS, depth) else depth

    def _pattern(self, blocks: Sequence[str]) -> tuple[int, int]:
        """Number of first blocks, and after how many blocks the others repeat."""
        if len(list(groupby(blocks, key=parent_name))) != 1:  # none, or in several lists
            return 0, len(blocks) or 1
        settings: Any = self.model.config
        kinds = getattr(settings.get_text_config(), "layer_types", None) or [None] * len(blocks)
        named = [self.model.get_submodule(block).named_parameters() for block in blocks]
        signs = [
            (kind, *((n, p.shape, p.requires_grad) for n, p in of_block))
            for kind, of_block in zip(kinds, named, strict=True)
        ]
        known: dict[Any, int] = {}  # small numbers compare faster
        marks = [known.setdefault(sign, len(known)) for sign in signs]
        pairs = product(range(len(marks)), range(1, len(marks) + 1))
        patterns = sorted(pairs, key=lambda at: at[0] + 2 * at[1])
        return next(at for at in patterns if marks[sum(at) :] == marks[at[0] : -at[1]])

    def _peaks(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> Peaks:
        """Peaks of a model with all blocks, or with the first ones."""
        if samples <= MOST_SAMPLES:
            return peaks(self.trace(plan, config, key, samples))
        at = (MOST_SAMPLES - 1, MOST_SAMPLES)
        ends = [self.trace(plan, config, key, size) for size in at]
        found = peaks_between(ends[0], ends[1], at, samples)
        return found or peaks(self.trace(plan, config, key, samples))

    def trace(self, plan: Plan, config: ShardConfig, key: Any, samples: int) -> list[Moment]:
        known = (key, samples)
        if known not in self._traces:
            model, depth = self.model, key[1]
            if depth is not None:
                model, plan = _shallow(model, plan, repeated_blocks(self.spec)[depth:])
            beside, work = self.teacher.beside if self.teacher else (), self._work(samples)
            ledger = trace_step(model, plan, config, work, beside, on_gpu=self.on_gpu)
            self._traces[known] = ledger.moments
        return self._traces[known]

    def _work(self, samples: int, most_chunks: int | None = None) -> Any:
        """Forward and loss of the recipe, or of the student next to its teacher.

        Chunks are larger if there would be more than `most_chunks`; they compute the same.
        """
        if self.teacher is not None:
            return self.teacher.work(samples, self.length)
        shape, size = (samples, self.length), self.chunk_size
        if size is not None and most_chunks is not None:
            size = max(size, -(-samples * self.length // most_chunks))

        def work(model: nn.Module) -> torch.Tensor:
            ids, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
            objective = whole_logits_loss if size is None else next_token(Head.of(model), size)
            return objective(model, {"input_ids": ids, "labels": labels})[0] * 1.0

        return work


def _shallow(model: Any, plan: Plan, dropped: Sequence[str]) -> tuple[nn.Module, Plan]:
    """A model and its plan without the last blocks; the dropped blocks are not copied."""
    blocks = model.get_submodule(parent_name(dropped[0]))
    short, memo = copy.copy(blocks), {}
    kept = list(blocks._modules.items())[: len(blocks) - len(dropped)]
    vars(short)["_modules"] = dict(kept)
    memo[id(blocks)] = blocks = copy.deepcopy(short, memo)
    model = copy.deepcopy(model, memo)
    model.config.get_text_config().num_hidden_layers = len(blocks)
    units = tuple(u for u in plan.units if not any(is_inside(u.name, d) for d in dropped))
    recompute = tuple(name for name in plan.recompute if name not in dropped)
    return model, replace(plan, units=units, recompute=recompute)
