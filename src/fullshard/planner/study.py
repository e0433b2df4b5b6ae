"""Everything that `fullshard plan` says of a configuration: outlook, advice, scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import Strategy
from fullshard.planner.forecast.memory import peak_memory
from fullshard.planner.forecast.speed import step_times
from fullshard.planner.forecast.workload import Mesh
from fullshard.planner.hardware import Fit
from fullshard.planner.homes import Place
from fullshard.planner.mesh import Topology
from fullshard.planner.outlook import Job, Machine, Outlook, look, workload
from fullshard.planner.phases import Storage
from fullshard.planner.plan import Plan
from fullshard.planner.search import MICRO_BATCH, Advice, PlanOf, advise, choose

MAX_SCALE = 1024
FAR_OFF = 1.5  # of the memory: an estimate above it is not planned


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The same work of a rank on other numbers of ranks.

    Attributes:
        world_size: Ranks.
        step_time_s: Of a step.
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
    machine: Machine
    hosts: int
    storage: Storage = field(default_factory=Storage)


def study(
    config: ShardConfig,
    plan_of: PlanOf,
    job: Job,
    machine: Machine,
    topology: Topology,
    *,
    leaves_micro_batch: bool = False,
) -> Study:
    """Plan, look around, and look at other scales.

    Args:
        config: What is asked for; `strategy: auto` is chosen.
        plan_of: Plans a configuration on the topology.
        job: One rank's step.
        machine: What a rank runs on.
        topology: Ranks.
        leaves_micro_batch: Whether the job's micro-batch is all that a rank has for an update, to
            be divided.

    Raises:
        WillNotFitError: `auto`, and nothing fits.
    """
    hosts = -(-topology.world_size // (topology.local_world_size or topology.world_size))
    asked = config.strategy
    if asked is Strategy.AUTO:
        config = config.model_copy(update={"strategy": Strategy.FULL_SHARD})
    outlook = look(plan_of(config), config, job, machine)
    free = ["strategy"] * (asked is Strategy.AUTO) + [MICRO_BATCH] * leaves_micro_batch
    if free:
        outlook = choose(outlook, plan_of, machine, free, hosts=hosts)
    advice = advise(outlook, plan_of, machine, hosts=hosts)
    return Study(outlook, advice, scaling(outlook, machine, topology), machine, hosts)


def on_more_ranks(
    study: Study, topology: Topology, plan_at: Callable[[Topology], Plan]
) -> list[Advice]:
    """The fewest hosts that take what does not fit, each rank's work kept; none where it fits."""
    local = topology.local_world_size or topology.world_size
    before, limit = study.outlook, FAR_OFF * (study.machine.memory_bytes or 0)
    for point in study.scaling if before.fit is Fit.NO else ():
        is_larger = point.world_size > topology.world_size and point.world_size % local == 0
        if is_larger and point.peak_bytes < limit:
            plan = plan_at(Topology(point.world_size, local))
            outlook = look(plan, before.config, before.job, study.machine)
            if outlook.fit is not Fit.NO:
                return [Advice({"--nodes": str(point.world_size // local)}, outlook)]
    return []


def scaling(outlook: Outlook, machine: Machine, topology: Topology) -> list[ScalePoint]:
    """Efficiency over the number of ranks, 1 to 1,024, with the work of a rank kept."""
    if machine.device is None or not outlook.job.is_timed:
        return []
    peak = outlook.peak_bytes[Place.DEVICE]
    base = workload(outlook.plan, outlook.config, outlook.job, machine)
    hybrid = outlook.plan.mesh.replicate > 1 and outlook.plan.mesh.shard > 1
    local = topology.local_world_size or topology.world_size
    here = peak_memory(base).active  # other scales differ from the plan by what they do from this
    points: list[ScalePoint] = []
    world = 1
    while world <= max(MAX_SCALE, topology.world_size):
        shard = min(world, local) if hybrid else world
        mesh = Mesh(shard, world // shard)
        if outlook.plan.mesh.shard == 1:
            mesh = Mesh(1, world)
        run = replace(base, mesh=mesh)
        times, held = step_times(run), peak_memory(run)
        lost = {
            "traffic that work does not hide": times.exposed,
            "the host's launches": times.launch,
            "the update": times.update,
        }
        worst = max(lost, key=lambda name: lost[name])
        reason = worst if lost[worst] > 0.01 * times.step else "nothing above 1 %"
        limit = machine.memory_bytes or 0
        points.append(
            ScalePoint(
                world,
                times.step,
                1.0,
                peak + round(held.active - here),
                not limit or peak + held.active - here <= limit,
                reason,
            )
        )
        world *= 2
    best = min(point.step_time_s for point in points)
    return [replace(point, efficiency=best / point.step_time_s) for point in points]
