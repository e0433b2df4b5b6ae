"""The search for configurations that fit or are faster: advice, `auto`, and scaling.

    candidates = strategies x recompute x ways to divide a rank's samples into micro-batches
               + full_shard and shard_grad_op with a tensor or an expert axis
                 (x gradients reduced in 16 bits, x offload, x everything computed in bf16 without
                 prefetch, only if nothing else fits; then more hosts)

The samples of an update stay the same, so every candidate trains the same model. `study` returns
everything that `fullshard plan` prints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fullshard.config.sharding import Offload, ShardConfig
from fullshard.config.values import DType, HomeKind, Recompute, RecomputeKind, Strategy
from fullshard.errors import ConfigError, WillNotFitError, WrapError
from fullshard.outlook.memory import DEFAULT_STORAGE, Fit, Storage, peak_memory
from fullshard.outlook.predict import Machine, Outlook, PlannedStep, look, time_by_formulas
from fullshard.outlook.speed import step_times
from fullshard.outlook.workload import Parallelism, Workload
from fullshard.planner.mesh import Topology, row_of
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.planner.units import Place

MICRO_BATCH = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
WORTHWHILE = 0.97  # of the step time: a smaller gain is within the forecast's error
SHOWN = 3
AXES = ("tensor", "expert")
MAX_MICRO_BATCH = 256
MAX_WORLD = 1024  # the most ranks that advice names
RECOMPUTES = (Recompute(RecomputeKind.NONE), Recompute(RecomputeKind.BLOCK))
HYBRID = (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
FLAT = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)

ON_HOST = Offload(parameters=HomeKind.CPU, gradients=HomeKind.CPU, optimizer=HomeKind.CPU)

PlanOf = Callable[[ShardConfig], Plan]
PlanAt = Callable[[ShardConfig, Topology], Plan]


@dataclass(frozen=True, slots=True)
class PlanAdvice:
    """A change of the configuration and its forecast.

    Attributes:
        changes: Keys and values; empty if nothing fits.
        outlook: The forecast with the changes.
    """

    changes: dict[str, str]
    outlook: Outlook

    @property
    def words(self) -> str:
        """The words to add to the command line."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())

    def sentence(self, before: Outlook) -> str:
        """Returns the change and its effect in one sentence."""
        peak = human_bytes(self.outlook.peak_bytes[Place.DEVICE])
        if not self.changes:
            least = changes_between(before, self.outlook)
            how = f" ({PlanAdvice(least, self.outlook).words})" if least else ""
            return (
                f"no tried configuration fits: the smallest has {peak} of tensors per device{how}. "
                "Use devices with more memory, a smaller model (hidden_size, num_hidden_layers, "
                "vocab_size) or shorter sequences (max_seq_length)"
            )
        effect = f"{self.outlook.fit or 'takes'}: {peak} per device"
        host = self.outlook.peak_bytes[Place.HOST]
        if host > before.peak_bytes[Place.HOST]:
            effect += f" and {human_bytes(host)} of host memory per rank"
        now, then = before.step_time_s, self.outlook.step_time_s
        if now is not None and then is not None:
            effect += f", {then:.3g} s per step ({now / then:.2f} x as fast)"
        now, then = (_samples(one) for one in (before, self.outlook))
        if now != then:
            effect += f", {then / now:g} x the samples per update"
        return f"{self.words}: {effect}"


def _samples(one: Outlook) -> float:
    """Samples per update, on all ranks."""
    batch, copies = one.job.batch, one.plan.mesh.num_copies // one.config.context
    return batch.micro_batch * batch.accumulation * copies


def advise(current: Outlook, plan_of: PlanOf, *, hosts: int = 1) -> list[PlanAdvice]:
    """Returns the cheapest changes that make a run fit, or make it faster.

    Fewer changes come first; for each number of changes the fastest is returned. The list is empty
    if the device's memory is unknown or nothing helps. If nothing fits, the smallest candidate is
    returned without changes.
    """
    now = current.step_time_s
    if current.machine.memory_bytes is None or (current.fit is Fit.FITS and now is None):
        return []
    wanted = (Fit.FITS, Fit.TIGHT) if current.fit is Fit.NO else (Fit.FITS,)
    every = _tried(current, plan_of, wanted, hosts=hosts)
    found = [PlanAdvice(changes_between(current, other), other) for other in every[1:]]
    fitting = [one for one in found if one.outlook.fit in wanted and one.changes]
    if current.fit is Fit.NO and not fitting:
        return [PlanAdvice({}, min(every, key=lambda one: one.peak_bytes[Place.DEVICE]))]
    if current.fit is Fit.FITS and now is not None:
        fitting = [one for one in fitting if (one.outlook.step_time_s or now) < WORTHWHILE * now]
    best: dict[int, PlanAdvice] = {}
    for one in sorted(fitting, key=_cost):
        best.setdefault(len(one.changes), one)
    out: list[PlanAdvice] = []
    for count in sorted(best):
        if not out or _cost(best[count]) < WORTHWHILE * _cost(out[-1]):
            out.append(best[count])
    return out[:SHOWN]


def _tried(
    current: Outlook, plan_of: PlanOf, wanted: Sequence[Fit], *, hosts: int
) -> list[Outlook]:
    """The run, then every other configuration that may be advised.

    Reliefs such as offload are tried only if nothing else fits.
    """
    every = [current]
    for relief in _reliefs(current.config, current.job, current.machine):
        later: list[_Option] = []
        for option in sorted(_options(current, plan_of, relief, hosts=hosts), key=_Option.order):
            if _is_needless(option, every, wanted):
                later.append(option)
            else:
                every += option.looked()
        while later and not any(one.fit is Fit.FITS for one in every):
            every += later.pop().looked()  # slow ones take less memory
        if any(one.fit is Fit.FITS for one in every):
            break
    return every


def _is_needless(option: _Option, known: Sequence[Outlook], wanted: Sequence[Fit]) -> bool:
    """Whether an option is too slow to be advised, so that its memory need not be traced."""
    time_s, (current, *others) = option.time_s, known
    if time_s is None:
        return False
    if current.fit is Fit.FITS:
        return current.step_time_s is not None and time_s >= WORTHWHILE * current.step_time_s
    count = len(changes_between(current, option))
    alike = [one for one in others if len(changes_between(current, one)) == count]
    return any(one.fit in wanted and (one.step_time_s or 0.0) <= time_s for one in alike)


def on_more_hosts(current: Outlook, plan_at: PlanAt, topology: Topology) -> list[PlanAdvice]:
    """Returns the fewest hosts, by doubling, on which a run fits; empty if there are none.

    The work of each rank is kept first, then reduced to the least that a rank can have.
    """
    local, machine = topology.ranks_per_host, current.machine
    worlds = [topology.world_size << power for power in range(1, MAX_WORLD.bit_length())]
    worlds = [world for world in worlds if world <= MAX_WORLD]
    least = current.config.model_copy(
        update={"strategy": Strategy.FULL_SHARD, "activation_checkpointing": RECOMPUTES[1]}
    )
    most_relief = _reliefs(least, current.job, machine)[-1]
    ways = [
        (current.config, current.job),
        (least, _splits(current.job)[0]),
        (least.model_copy(update=most_relief), _splits(current.job)[0]),
    ]
    for config, job in ways if worlds else ():

        def at(world: int, config: ShardConfig = config, job: PlannedStep = job) -> Outlook:
            return look(plan_at(config, Topology(world, local)), config, job, machine)

        try:
            if at(worlds[-1]).fit is Fit.NO:
                continue
            fitting = next(one for one in map(at, worlds) if one.fit is not Fit.NO)
        except (ConfigError, WrapError):  # the mesh's sizes are given, or no block repeats
            continue
        world = fitting.plan.mesh.world_size
        where = {"--nodes": str(world // local)}
        if machine.host_bytes is not None:
            where = {"launch.num_machines": f"{world // local} launch.num_processes={world}"}
        return [PlanAdvice({**where, **changes_between(current, fitting)}, fitting)]
    return []


def compare(current: Outlook, plan_of: PlanOf, *, hosts: int = 1) -> list[Outlook]:
    """Returns the forecasts of all strategies with everything else unchanged."""
    options = _options(current, plan_of, {}, hosts=hosts, axes=frozenset())
    alike = [one for one in options if not set(changes_between(current, one)) - {"strategy"}]
    return [found for one in alike for found in one.looked()] or [current]


def choose(current: Outlook, plan_of: PlanOf, free: Sequence[str], *, hosts: int = 1) -> Outlook:
    """Returns the fastest candidate that fits and changes only the free keys.

    If speed is unknown, it is the candidate with the fewest micro-batches, then the smallest.

    Args:
        current: The run, with any values for the free keys.
        plan_of: Returns the plan of a configuration.
        free: Keys that may change, named as in `changes_between`.
        hosts: Number of hosts.

    Raises:
        WillNotFitError: No choice fits.
    """
    axes = {axis for axis in AXES if f"sharding.{axis}" in free}
    options = _options(current, plan_of, {}, hosts=hosts, axes=axes)
    options = [one for one in options if set(changes_between(current, one)) <= set(free)]
    allowed = [current]
    for option in sorted(options, key=_Option.order):
        ahead = [_slowness(one)[:2] for one in allowed if one.fit is Fit.FITS]
        if current.machine.calibration is None and ahead and option.order() > min(ahead):
            break
        allowed += option.looked()
    fitting = [one for one in allowed if one.fit is not Fit.NO]
    if not fitting:
        least = min(allowed, key=lambda one: one.peak_bytes[Place.DEVICE])
        asked = [key for key in free if not key.startswith("sharding.")]
        machine, where = current.machine, ""
        if machine.is_host:
            processes = human_bytes(machine.process_bytes)
            where = f" per rank of {machine.limit}, without {processes} for its processes"
        raise WillNotFitError(
            f"auto: expected a choice of {' and '.join(asked)} that fits "
            f"{human_bytes(max(0, machine.memory_bytes or 0))}{where}; the smallest needs "
            f"{human_bytes(least.peak_bytes[Place.DEVICE])}. Use more ranks, recompute or offload."
        )
    roomy = [one for one in fitting if one.fit is Fit.FITS] or fitting
    return min(roomy, key=_slowness)


def _slowness(one: Outlook) -> tuple[float, float, int]:
    return one.step_time_s or 0.0, one.job.batch.accumulation, one.peak_bytes[Place.DEVICE]


def changes_between(before: Outlook, after: Outlook | _Option) -> dict[str, str]:
    """Returns the keys, with their values, that turn one configuration into the other."""
    old, new = _settings(before), _settings(after)
    changes = {key: value for key, value in new.items() if value != old[key]}
    if before.job.batch.accumulation != after.job.batch.accumulation:
        # One decision in two keys: written together, counted once.
        steps = f"{STEPS}={after.job.batch.accumulation:.12g}"
        changes[MICRO_BATCH] = f"{new[MICRO_BATCH]} {steps}"
    return changes


def choice_of(one: Outlook) -> str:
    """The values that replace `auto`, as words of a command line."""
    values = _settings(one) | {STEPS: f"{one.job.batch.accumulation:.12g}"}
    axes = [f"sharding.{axis}" for axis in AXES if values[f"sharding.{axis}"] != "1"]
    return " ".join(f"{name}={values[name]}" for name in ("strategy", *axes, MICRO_BATCH, STEPS))


def _settings(one: Outlook | _Option) -> dict[str, str]:
    config = one.config
    return {
        "strategy": str(config.strategy),
        "sharding.tensor": str(config.tensor),
        "sharding.expert": str(config.expert),
        "sharding.activation_checkpointing": str(config.activation_checkpointing),
        "sharding.param_dtype": str(config.param_dtype or DType.FLOAT32),
        "sharding.reduce_dtype": str(config.reduce_dtype or DType.FLOAT32),
        "sharding.forward_prefetch": str(config.forward_prefetch),
        "sharding.backward_prefetch": str(config.backward_prefetch),
        "sharding.offload": "none" if config.offload is None else "cpu",
        MICRO_BATCH: f"{one.job.batch.micro_batch:.12g}",
    }


def _cost(one: PlanAdvice) -> float:
    return one.outlook.step_time_s or float(one.outlook.peak_bytes[Place.DEVICE])


@dataclass(frozen=True, slots=True)
class _Option:
    """A configuration whose forecast is made where it is needed, because it takes traces.

    Attributes:
        time_s: Seconds of a step by formulas; None if they do not give it.
    """

    plan: Plan
    config: ShardConfig
    job: PlannedStep
    machine: Machine
    time_s: float | None

    def order(self) -> tuple[float, float]:
        """As of `_slowness`, as far as it is known."""
        return self.time_s or 0.0, self.job.batch.accumulation

    def looked(self) -> list[Outlook]:
        """The forecast; none if no block repeats, so that there is nothing to recompute."""
        with contextlib.suppress(WrapError):
            return [look(self.plan, self.config, self.job, self.machine)]
        return []


def _options(
    current: Outlook,
    plan_of: PlanOf,
    relief: Mapping[str, Any],
    *,
    hosts: int,
    axes: Set[str] = frozenset(AXES),
) -> Iterator[_Option]:
    """Every other configuration with a relief, and with the axes that may be tried."""
    machine = current.machine
    sized = current.config.shard is not None or current.config.replicate is not None
    strategies = (current.config.strategy,) if sized else (*FLAT, *(HYBRID if hosts > 1 else ()))
    recomputes = dict.fromkeys((current.config.activation_checkpointing, *RECOMPUTES))
    for way, step in _ways(current.job, strategies, axes):
        if _is_hopeless(way["strategy"], current.job, machine):
            continue
        config = current.config.model_copy(update={**way, **relief})
        try:
            plan = plan_of(config)
        except ConfigError:
            if len(way) == 1:
                raise
            continue  # with an axis that was not configured
        for recompute, job in product(recomputes, _splits(step)):
            other = config.model_copy(update={"activation_checkpointing": recompute})
            time_s = time_by_formulas(plan, other, job, machine)
            yield _Option(plan, other, job, machine, time_s)


def _ways(
    job: PlannedStep, strategies: Sequence[Strategy], axes: Set[str]
) -> list[tuple[dict[str, Any], PlannedStep]]:
    """Changes of strategy and axes, and the step with each."""
    divided = job.divided() if axes else ()
    return [({"strategy": strategy}, job) for strategy in strategies] + [
        ({"strategy": strategy, **sizes}, step)
        for sizes, step in divided
        if axes >= set(sizes)
        for strategy in FLAT[:2]
    ]


def _reliefs(config: ShardConfig, job: PlannedStep, machine: Machine) -> list[dict[str, Any]]:
    """Further changes of the configuration, tried one after the other until something fits."""
    found: list[dict[str, Any]] = [{}]
    if config.param_dtype is DType.BFLOAT16 and config.reduce_dtype in (None, DType.FLOAT32):
        found.append({"reduce_dtype": DType.BFLOAT16})
    offload: dict[str, Any] = {}
    if config.offload is None and job.optimizer.owned is None and not machine.is_host:
        offload = {"offload": ON_HOST}
        found.append(offload)
    halves = {"reduce_dtype": DType.BFLOAT16}
    if config.param_dtype is not DType.FLOAT16:
        halves["param_dtype"] = DType.BFLOAT16
    found.append({**offload, **halves, "forward_prefetch": 0, "backward_prefetch": 0})
    return found


def _is_hopeless(strategy: Strategy, job: PlannedStep, machine: Machine) -> bool:
    """Whether the weights that a strategy keeps gathered exceed the device's memory, in 16 bits."""
    kept = 0 if row_of(strategy).reshard_after_forward else 2
    return kept * job.model.num_params > (machine.memory_bytes or 0)


def _splits(job: PlannedStep) -> list[PlannedStep]:
    """A rank's samples per update in micro-batches of 1, 2, 4 ..., and all at once."""
    samples = round(job.batch.micro_batch * job.batch.accumulation)
    sizes = {2**power for power in range(MAX_MICRO_BATCH.bit_length()) if samples % 2**power == 0}
    sizes.add(samples if samples <= MAX_MICRO_BATCH else 1)
    batches = [
        replace(job.batch, micro_batch=size, accumulation=samples // size) for size in sorted(sizes)
    ]
    return [replace(job, batch=batch) for batch in batches]


# ---- other numbers of ranks ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The forecast for another number of ranks, with the work of a rank unchanged.

    Attributes:
        world_size: Number of ranks.
        step_time_s: Seconds per step.
        efficiency: Tokens per second and rank, relative to the best number of ranks.
        peak_bytes: Estimated peak of a device.
        fits: Whether the peak is within the device's memory.
        reason: Largest cause of lost time.
    """

    world_size: int
    step_time_s: float
    efficiency: float
    peak_bytes: int
    fits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that is known about a run before it starts."""

    outlook: Outlook
    advice: list[PlanAdvice]
    scaling: list[ScalePoint]
    storage: Storage


def study(
    outlook: Outlook, plan_at: PlanAt, topology: Topology, storage: Storage = DEFAULT_STORAGE
) -> Study:
    """Returns an outlook with advice and scaling.

    Args:
        outlook: Forecast of the run.
        plan_at: Returns the plan of a configuration on a topology.
        topology: The run's ranks.
        storage: The run's weights and checkpoints.
    """
    hosts = topology.num_hosts
    advice = advise(outlook, lambda config: plan_at(config, topology), hosts=hosts)
    if outlook.fit is Fit.NO:
        more = on_more_hosts(outlook, plan_at, topology)
        advice = [one for one in advice if one.changes or not more] + more
    return Study(outlook, advice, scaling(outlook, topology), storage)


def scaling(outlook: Outlook, topology: Topology) -> list[ScalePoint]:
    """Returns the efficiency for 1 to 1,024 ranks, with the work of a rank unchanged.

    None with a tensor or an expert axis, whose size would have to change, too.
    """
    machine, mesh, axes = outlook.machine, outlook.plan.mesh, outlook.run.mesh
    if machine.device is None or not outlook.job.is_timed or axes.tensor * axes.expert > 1:
        return []
    is_hybrid = mesh.replicate > 1 and mesh.shard > 1
    # Formulas give the difference to the plan's own peak.
    here = outlook.peak_bytes[Place.DEVICE], peak_memory(outlook.run).active
    points: list[ScalePoint] = []
    world = 1
    while world <= max(MAX_WORLD, topology.world_size):
        shard = min(world, topology.ranks_per_host) if is_hybrid else world
        shard = 1 if mesh.shard == 1 else shard
        run = replace(outlook.run, mesh=Parallelism(shard, world // shard))
        points.append(_at_scale(run, here, machine.memory_bytes or 0))
        world *= 2
    best = min(point.step_time_s for point in points)
    return [replace(point, efficiency=best / point.step_time_s) for point in points]


def _at_scale(run: Workload, here: tuple[int, float], limit: int) -> ScalePoint:
    """The point of a run that needs `here[0]` bytes where formulas give `here[1]`."""
    times, held = step_times(run), peak_memory(run).active
    lost = {
        "exposed communication": times.exposed,
        "kernel launches": times.launch,
        "optimizer update": times.update,
    }
    worst = max(lost, key=lambda name: lost[name])
    reason = worst if lost[worst] > 0.01 * times.step else "nothing above 1 %"
    peak, counted = here
    fits = not limit or peak + held - counted <= limit
    more = round(held - counted)
    return ScalePoint(run.mesh.world_size, times.step, 1.0, peak + more, fits, reason)
