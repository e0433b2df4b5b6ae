"""Other ways to run the same step: what fits, what is faster, and what to write for it.

    candidates = strategies x recompute x ways to cut a rank's samples into micro-batches
                 (x gradients on the wire in 16 bits, x offload, x all of it computed in bf16
                 without prefetch, where nothing else fits; then more hosts)

The samples of an update stay the same, so that every candidate trains the same model. `study`
is all that `fullshard plan` says: an outlook, advice, and the work of a rank at other scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fullshard.config.sharding import Offload, ShardConfig
from fullshard.config.values import DType, Home, Recompute, RecomputeKind, Strategy
from fullshard.errors import ConfigError, WillNotFitError, WrapError
from fullshard.outlook.memory import DEFAULT_STORAGE, Fit, Storage, peak_memory
from fullshard.outlook.predict import Job, Machine, Outlook, look
from fullshard.outlook.speed import step_times
from fullshard.outlook.workload import Parallelism, Workload
from fullshard.planner.homes import Place
from fullshard.planner.mesh import Topology
from fullshard.planner.plan import Plan
from fullshard.planner.strategy import row_of
from fullshard.planner.text import human_bytes

MICRO_BATCH = "per_device_train_batch_size"
WORTHWHILE = 0.97  # of the step time: less of a gain is within the forecast's error
SHOWN = 3
MAX_MICRO_BATCH = 256
MAX_WORLD = 1024  # ranks, at most, that advice names
RECOMPUTES = (Recompute(RecomputeKind.NONE), Recompute(RecomputeKind.BLOCK))
HYBRID = (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
FLAT = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)

ON_HOST = Offload(parameters=Home.CPU, gradients=Home.CPU, optimizer=Home.CPU)

PlanOf = Callable[[ShardConfig], Plan]
PlanAt = Callable[[ShardConfig, Topology], Plan]


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and what follows from it.

    Attributes:
        changes: Keys of the configuration and their values.
        outlook: The run with them.
    """

    changes: dict[str, str]
    outlook: Outlook

    @property
    def words(self) -> str:
        """What to add to the command line."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())

    def sentence(self, before: Outlook) -> str:
        """What it brings."""
        peak = human_bytes(self.outlook.peak_bytes[Place.DEVICE])
        if not self.changes:
            least = changes_between(before, self.outlook)
            how = f" ({Advice(least, self.outlook).words})" if least else ""
            return (
                f"nothing that was tried fits: the least is {peak} a device{how}. Use devices with "
                "more memory, a smaller model (hidden_size, num_hidden_layers, vocab_size) or "
                "shorter sequences (max_seq_length)"
            )
        told = f"{self.outlook.fit or 'takes'}: {peak} a device"
        host = self.outlook.peak_bytes[Place.HOST]
        if host > before.peak_bytes[Place.HOST]:
            told += f" and {human_bytes(host)} a rank on its host"
        now, then = before.step_time_s, self.outlook.step_time_s
        if now is not None and then is not None:
            told += f", {then:.3g} s a step ({now / then:.2f} x as fast)"
        now, then = (_samples(one) for one in (before, self.outlook))
        if now != then:
            told += f", {then / now:g} x the samples an update"
        return f"{self.words}: {told}"


def _samples(one: Outlook) -> float:
    """Of an update, on all ranks."""
    return one.job.batch.micro_batch * one.job.batch.accumulation * one.plan.mesh.world_size


def advise(current: Outlook, plan_of: PlanOf, *, hosts: int = 1) -> list[Advice]:
    """The cheapest changes that make a run fit, or faster.

    Fewer changes come first; of equally many, the fastest. Empty where nothing is known of the
    device, or nothing helps; for a run that does not fit, the least that was found is named then.
    """
    now = current.step_time_s
    if current.machine.memory_bytes is None or (current.fit is Fit.FITS and now is None):
        return []
    found = [
        Advice(changes_between(current, other), other)
        for other in _candidates(current, plan_of, hosts=hosts)
    ]
    wanted = (Fit.FITS, Fit.TIGHT) if current.fit is Fit.NO else (Fit.FITS,)
    fitting = [one for one in found if one.outlook.fit in wanted and one.changes]
    if current.fit is Fit.NO and not fitting:
        every = [current, *(one.outlook for one in found)]
        return [Advice({}, min(every, key=lambda one: one.peak_bytes[Place.DEVICE]))]
    if current.fit is Fit.FITS and now is not None:
        fitting = [one for one in fitting if (one.outlook.step_time_s or now) < WORTHWHILE * now]
    best: dict[int, Advice] = {}
    for one in sorted(fitting, key=_cost):
        best.setdefault(len(one.changes), one)
    out: list[Advice] = []
    for count in sorted(best):
        if not out or _cost(best[count]) < WORTHWHILE * _cost(out[-1]):
            out.append(best[count])
    return out[:SHOWN]


def on_more_hosts(current: Outlook, plan_at: PlanAt, topology: Topology) -> list[Advice]:
    """The fewest hosts, by doubling, that take a run that does not fit; [] where none do.

    Tried with each rank's work as it is, then with the least that a rank can be given.
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

        def at(world: int, config: ShardConfig = config, job: Job = job) -> Outlook:
            return look(plan_at(config, Topology(world, local)), config, job, machine)

        try:
            if at(worlds[-1]).fit is Fit.NO:
                continue
            fitting = next(one for one in map(at, worlds) if one.fit is not Fit.NO)
        except (ConfigError, WrapError):  # a mesh of given sizes, or nothing that repeats
            continue
        world = fitting.plan.mesh.world_size
        where = {"--nodes": str(world // local)}
        if machine.host_bytes is not None:
            where = {"launch.num_machines": f"{world // local} launch.num_processes={world}"}
        return [Advice({**where, **changes_between(current, fitting)}, fitting)]
    return []


def compare(current: Outlook, plan_of: PlanOf, *, hosts: int = 1) -> list[Outlook]:
    """The strategies with everything else as it is."""
    found = [
        other
        for other in _candidates(current, plan_of, hosts=hosts)
        if not set(changes_between(current, other)) - {"strategy"}
    ]
    return found or [current]


def choose(current: Outlook, plan_of: PlanOf, free: Sequence[str], *, hosts: int = 1) -> Outlook:
    """The fastest way that fits, of those that change nothing but what is left to the planner.

    Where speed is not known, that with the fewest micro-batches, and of these the smallest.

    Args:
        current: The run with any value where one is to be chosen.
        plan_of: Plans a configuration.
        free: Keys that may change, as `changes_between` names them.
        hosts: How many.

    Raises:
        WillNotFitError: No choice fits.
    """
    options = [current, *_candidates(current, plan_of, hosts=hosts)]
    allowed = [one for one in options if set(changes_between(current, one)) <= set(free)]
    fitting = [one for one in allowed if one.fit is not Fit.NO]
    if not fitting:
        least = min(allowed, key=lambda one: one.peak_bytes[Place.DEVICE])
        raise WillNotFitError(
            f"auto: expected a choice of {' and '.join(free)} that fits "
            f"{human_bytes(current.machine.memory_bytes or 0)}; the smallest takes "
            f"{human_bytes(least.peak_bytes[Place.DEVICE])}. Use more ranks, recompute or offload."
        )
    roomy = [one for one in fitting if one.fit is Fit.FITS] or fitting
    return min(roomy, key=_slowness)


def _slowness(one: Outlook) -> tuple[float, float, int]:
    return one.step_time_s or 0.0, one.job.batch.accumulation, one.peak_bytes[Place.DEVICE]


def changes_between(before: Outlook, after: Outlook) -> dict[str, str]:
    """What one would write to go from one to the other."""
    old, new = before.config, after.config
    values = {
        "strategy": (str(old.strategy), str(new.strategy)),
        "sharding.activation_checkpointing": (
            str(old.activation_checkpointing),
            str(new.activation_checkpointing),
        ),
        "sharding.param_dtype": (_said(old.param_dtype), _said(new.param_dtype)),
        "sharding.reduce_dtype": (_said(old.reduce_dtype), _said(new.reduce_dtype)),
        "sharding.forward_prefetch": (str(old.forward_prefetch), str(new.forward_prefetch)),
        "sharding.backward_prefetch": (str(old.backward_prefetch), str(new.backward_prefetch)),
        "sharding.offload": ("none", "cpu")
        if old.offload is None and new.offload is not None
        else ("", ""),
        MICRO_BATCH: (
            f"{before.job.batch.micro_batch:.12g}",
            f"{after.job.batch.micro_batch:.12g}",
        ),
    }
    changes = {key: then for key, (now, then) in values.items() if now != then}
    if before.job.batch.accumulation != after.job.batch.accumulation:
        # One decision in two keys: written together, counted once.
        micro = changes.pop(MICRO_BATCH)
        steps = f"gradient_accumulation_steps={after.job.batch.accumulation:.12g}"
        changes[MICRO_BATCH] = f"{micro} {steps}"
    return changes


def _said(dtype: DType | None) -> str:
    return "float32" if dtype is None else str(dtype)


def _cost(one: Advice) -> float:
    return one.outlook.step_time_s or float(one.outlook.peak_bytes[Place.DEVICE])


def _candidates(current: Outlook, plan_of: PlanOf, *, hosts: int) -> Iterator[Outlook]:
    """Every other way; offload only where nothing else fits."""
    machine = current.machine
    sized = current.config.shard is not None or current.config.replicate is not None
    strategies = (current.config.strategy,) if sized else (*FLAT, *(HYBRID if hosts > 1 else ()))
    recomputes = dict.fromkeys((current.config.activation_checkpointing, *RECOMPUTES))
    fits = False
    for relief in _reliefs(current.config, current.job, machine):
        for strategy in strategies:
            if _is_hopeless(strategy, current.job, machine):
                continue
            config = current.config.model_copy(update={"strategy": strategy, **relief})
            plan = plan_of(config)
            for recompute, job in product(recomputes, _splits(current.job)):
                other = config.model_copy(update={"activation_checkpointing": recompute})
                try:
                    outlook = look(plan, other, job, machine)
                except WrapError:  # nothing that repeats to recompute
                    continue
                fits = fits or outlook.fit is Fit.FITS
                yield outlook
        if fits:
            return


def _reliefs(config: ShardConfig, job: Job, machine: Machine) -> list[dict[str, Any]]:
    """What may change beside the strategy, one after the other until something fits."""
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


def _is_hopeless(strategy: Strategy, job: Job, machine: Machine) -> bool:
    """Whether the weights that a strategy keeps whole on every rank are more than a device has.

    In 16 bits: whatever else is kept depends on what is trained, by what, and where it lives.
    """
    kept = 0 if row_of(strategy).reshard_after_forward else 2
    return kept * job.model.num_params > (machine.memory_bytes or 0)


def _splits(job: Job) -> list[Job]:
    """The samples of a rank and an update in micro-batches of 1, 2, 4 ..., and as they are."""
    samples = round(job.batch.micro_batch * job.batch.accumulation)
    sizes = {2**power for power in range(MAX_MICRO_BATCH.bit_length()) if samples % 2**power == 0}
    sizes.add(samples if samples <= MAX_MICRO_BATCH else 1)
    batches = [
        replace(job.batch, micro_batch=size, accumulation=samples // size) for size in sorted(sizes)
    ]
    return [replace(job, batch=batch) for batch in batches]


# ---- the same work of a rank on other numbers of ranks -------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The same work of a rank on other numbers of ranks.

    Attributes:
        world_size: Ranks.
        step_time_s: Seconds per step.
        efficiency: Tokens a second and rank, of those at the best of all scales.
        peak_bytes: On a device; an estimate.
        fits: Whether that is less than the device has.
        reason: What most of the time that is lost goes into.
    """

    world_size: int
    step_time_s: float
    efficiency: float
    peak_bytes: int
    fits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Study:
    """What is known of a configuration before it runs."""

    outlook: Outlook
    advice: list[Advice]
    scaling: list[ScalePoint]
    storage: Storage


def study(
    outlook: Outlook, plan_at: PlanAt, topology: Topology, storage: Storage = DEFAULT_STORAGE
) -> Study:
    """Look around an outlook, and at other scales.

    Args:
        outlook: Outlook of a configuration that leaves nothing to choose.
        plan_at: Plans a configuration on a topology.
        topology: Ranks.
        storage: What the run reads and writes.
    """
    hosts = topology.num_hosts
    advice = advise(outlook, lambda config: plan_at(config, topology), hosts=hosts)
    if outlook.fit is Fit.NO:
        more = on_more_hosts(outlook, plan_at, topology)
        advice = [one for one in advice if one.changes or not more] + more
    return Study(outlook, advice, scaling(outlook, topology), storage)


def scaling(outlook: Outlook, topology: Topology) -> list[ScalePoint]:
    """Efficiency over the number of ranks, 1 to 1,024, with the work of a rank kept."""
    machine, mesh = outlook.machine, outlook.plan.mesh
    if machine.device is None or not outlook.job.is_timed:
        return []
    is_hybrid = mesh.replicate > 1 and mesh.shard > 1
    # Other scales differ from the plan by what they do from this.
    beyond = outlook.peak_bytes[Place.DEVICE], peak_memory(outlook.run).active
    points: list[ScalePoint] = []
    world = 1
    while world <= max(MAX_WORLD, topology.world_size):
        shard = min(world, topology.ranks_per_host) if is_hybrid else world
        shard = 1 if mesh.shard == 1 else shard
        run = replace(outlook.run, mesh=Parallelism(shard, world // shard))
        points.append(_at_scale(run, beyond, machine.memory_bytes or 0))
        world *= 2
    best = min(point.step_time_s for point in points)
    return [replace(point, efficiency=best / point.step_time_s) for point in points]


def _at_scale(run: Workload, here: tuple[int, float], limit: int) -> ScalePoint:
    """Of a run that takes `here[0]` bytes where formulas say `here[1]`."""
    times, held = step_times(run), peak_memory(run).active
    lost = {
        "traffic that work does not hide": times.exposed,
        "the host's launches": times.launch,
        "the update": times.update,
    }
    worst = max(lost, key=lambda name: lost[name])
    reason = worst if lost[worst] > 0.01 * times.step else "nothing above 1 %"
    peak, counted = here
    fits = not limit or peak + held - counted <= limit
    more = round(held - counted)
    return ScalePoint(run.mesh.world_size, times.step, 1.0, peak + more, fits, reason)
