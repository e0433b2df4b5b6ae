"""Everything that `fullshard plan` says of a configuration: outlook, advice, scaling."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fullshard.outlook.hardware import Fit
from fullshard.outlook.memory import peak_memory
from fullshard.outlook.phases import Storage
from fullshard.outlook.predict import Machine, Outlook, workload
from fullshard.outlook.search import Advice, PlanAt, advise, on_more_hosts
from fullshard.outlook.speed import step_times
from fullshard.outlook.workload import Mesh
from fullshard.planner.homes import Place
from fullshard.planner.mesh import Topology

MAX_SCALE = 1024


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
    machine: Machine
    hosts: int
    storage: Storage = field(default_factory=Storage)


def study(
    outlook: Outlook,
    plan_at: PlanAt,
    machine: Machine,
    topology: Topology,
    storage: Storage | None = None,
) -> Study:
    """Look around an outlook, and at other scales.

    Args:
        outlook: Outlook of a configuration that leaves nothing to choose.
        plan_at: Plans a configuration on a topology.
        machine: What a rank runs on.
        topology: Ranks.
        storage: What the run reads and writes.
    """
    hosts = -(-topology.world_size // (topology.local_world_size or topology.world_size))
    advice = advise(outlook, lambda config: plan_at(config, topology), machine, hosts=hosts)
    if outlook.fit is Fit.NO:
        more = on_more_hosts(outlook, plan_at, machine, topology)
        advice = [one for one in advice if one.changes or not more] + more
    points = scaling(outlook, machine, topology)
    return Study(outlook, advice, points, machine, hosts, storage or Storage())


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
