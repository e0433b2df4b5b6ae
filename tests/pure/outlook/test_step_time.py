"""The step on a calibrated machine: work of units, time of messages, overlap."""

from dataclasses import asdict, replace

import pytest

from fullshard.config.schema import ShardConfig
from fullshard.config.values import DType, GradSync, TransportKind
from fullshard.outlook.devices import Calibration, Ceilings, HostOverhead, Table
from fullshard.outlook.player import step_time
from fullshard.planner.mesh import Topology
from fullshard.planner.optimizers import ADAMW, SGD
from fullshard.planner.plan import make_plan
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec
from fullshard.planner.tracing import Operation, UnitWork

NOTHING, FETCH_S, WORK_S = 1e-15, 1e-4, 10.0  # per byte, per fetched byte, per forward
WORKS = Operation("gelu", "float32", (1,))


def plan_of(world=2, **fields):
    """Returns a plan of a root with a small parameter and three blocks of equal size."""
    modules = [ModuleSpec("", "Model"), ModuleSpec("blocks", "ModuleList", is_container=True)]
    modules += [ModuleSpec(f"blocks.{index}", "Block") for index in range(3)]
    params = [ParamSpec(("scale",), (64,), DType.FLOAT32, trainable=True)]
    params += [
        ParamSpec((f"blocks.{index}.weight",), (32, 32), DType.FLOAT32, trainable=True)
        for index in range(3)
    ]
    config = ShardConfig.of(None, **{"wrap": ["Block"], "transport": "direct", **fields})
    return make_plan(ModelSpec("Model", tuple(modules), tuple(params)), config, Topology(world))


def work_of(plan, forward=1, backward=2):
    return {
        unit.name: UnitWork({WORKS: forward}, {WORKS: backward} if unit.index else {})
        for unit in plan.units
    }


def by_size(seconds):
    return Table((((1,), seconds),))


def calibrated(world=2, cores=64, host=None, **transfers):
    names = ("copy", "add", "norm", "update")
    operations = {f"{name} float32": by_size(NOTHING) for name in names}
    operations["gelu float32"] = by_size(WORK_S)
    tables = {name.replace("_", " "): by_size(seconds) for name, seconds in transfers.items()}
    measured = Ceilings(world, operations, tables, host or HostOverhead())
    return Calibration({"cores": cores}, {world: measured})


def gathered_bytes(plan, unit):
    return sum(4 * group.layout.numel for group in plan.units[unit].groups)


def told(plan, calibration, accumulation=1):
    found = step_time(plan, work_of(plan), calibration, accumulation)
    assert found is not None
    parts = asdict(found[0])
    step = parts.pop("step")
    assert sum(parts.values()) == pytest.approx(step)
    return found[0]


def test_without_messages_a_step_is_the_work_of_its_units():
    plan = plan_of(world=1)
    assert told(plan, calibrated(world=1)).step == pytest.approx((4 + 3 * 2) * WORK_S)


def test_gathers_without_prefetch_are_all_waited_for():
    plan = plan_of(forward_prefetch=0, backward_prefetch=0)
    times = told(plan, calibrated(direct_fetch=FETCH_S))
    gathers = [e.unit for e in plan.events if e.kind.value == "gather"]
    expected = sum(FETCH_S * gathered_bytes(plan, unit) for unit in gathers)
    assert times.exposed == pytest.approx(expected)
    assert times.step == pytest.approx(10 * WORK_S + expected)


def test_gathers_ahead_hide_behind_work_but_for_the_first():
    plan = plan_of(forward_prefetch=1, backward_prefetch=1)
    times = told(plan, calibrated(direct_fetch=FETCH_S))
    assert times.exposed == pytest.approx(FETCH_S * gathered_bytes(plan, 0))


def test_a_message_on_a_busy_machine_takes_processor_time_from_the_work():
    plan = plan_of(forward_prefetch=1, backward_prefetch=1)
    tables = {"direct_fetch": FETCH_S, "direct_fetch_cpu": FETCH_S / 2}
    idle, busy = (told(plan, calibrated(cores=cores, **tables)).step for cores in (4, 2))
    gathers = [e.unit for e in plan.events if e.kind.value == "gather"]
    taken = sum(FETCH_S / 2 * gathered_bytes(plan, unit) for unit in gathers)
    # The wait for the first message is filled by the compute of the first two.
    assert busy - idle == pytest.approx(taken - FETCH_S * gathered_bytes(plan, 0))


def test_a_shared_home_gathers_nothing_and_reads_when_it_accumulates():
    plan = plan_of(transport=TransportKind.SHARED)
    times = told(plan, calibrated(shared_fetch=1e-9, shared_reduce=FETCH_S, direct_fetch=1.0))
    pulled = sum(FETCH_S * gathered_bytes(plan, unit.index) for unit in plan.units)
    assert times.exposed == 0.0
    assert times.step == pytest.approx(10 * WORK_S + pulled)


def test_offloaded_weights_are_copied_from_every_rank_of_a_shared_home():
    plan, bare = (
        plan_of(transport=TransportKind.SHARED, offload="cpu"),
        calibrated(shared_reduce=NOTHING),
    )
    (measured,) = bare.hosts.values()
    tables = {"copy float32": by_size(FETCH_S)}
    measured = replace(measured, operations={**measured.operations, **tables})
    gathers = [e.unit for e in plan.events if e.kind.value == "gather"]
    copied = sum(2 * FETCH_S * gathered_bytes(plan, unit) for unit in gathers)  # read and written
    times = told(plan, Calibration({"cores": 64}, {2: measured}))
    assert times.step == pytest.approx(10 * WORK_S + copied)


def test_replicas_sum_full_gradients_during_backward():
    plan = plan_of(strategy="no_shard")
    times = told(plan, calibrated(direct_replicas=FETCH_S))
    late = [0, 1, 2]  # arrive when no backward is left; each waits for the reduction after it
    summed = sum(FETCH_S * gathered_bytes(plan, unit) for unit in late)
    assert times.step == pytest.approx(10 * WORK_S + summed)


@pytest.mark.parametrize(
    ("grad_sync", "reductions"), [(GradSync.EVERY_MICRO_BATCH, 3), (GradSync.LAST_MICRO_BATCH, 1)]
)
def test_micro_batches_reduce_as_often_as_configured(grad_sync, reductions):
    plan = plan_of(transport=TransportKind.SHARED, grad_sync=grad_sync)
    times = told(plan, calibrated(shared_reduce=FETCH_S), accumulation=3)
    pulled = sum(FETCH_S * gathered_bytes(plan, unit.index) for unit in plan.units)
    assert times.step == pytest.approx(3 * 10 * WORK_S + reductions * pulled)


def test_host_time_has_parts_per_operation_unit_and_step():
    plan = plan_of(world=1)
    host = HostOverhead(forward_s=1.0, backward_s=2.0, unit_s=3.0, step_s=5.0)
    more = told(plan, calibrated(world=1, host=host)).step - told(plan, calibrated(world=1)).step
    # 4 operations in forward, 6 in backward; 4 units with two turns each.
    assert more == pytest.approx(4 * 1.0 + 6 * 2.0 + 8 * 3.0 + 5.0)


def test_the_update_time_is_that_of_the_runs_optimizer():
    plan, bare = plan_of(world=1), calibrated(world=1)
    (measured,) = bare.hosts.values()
    update_s, add_s = 1e-3, 1e-6
    tables = {"update float32": by_size(update_s), "add float32": by_size(add_s)}
    measured = replace(measured, operations={**measured.operations, **tables})
    calibration = Calibration({"cores": 64}, {1: measured})
    numel = sum(group.layout.part_numel for unit in plan.units for group in unit.groups)
    clipping, sums = 2 * 4 * numel * add_s, 3 * 4 * numel * add_s
    found = {
        optimizer: told(plan.trained_by(optimizer), calibration).update
        for optimizer in (ADAMW, SGD, replace(ADAMW, num_averages=1))
    }
    expected = [clipping + numel * update_s, clipping + sums, clipping + numel * update_s + sums]
    assert list(found.values()) == pytest.approx(expected)


def test_work_outside_of_events_is_counted():
    plan = plan_of(world=1)
    events = tuple(event for event in plan.events if event.kind.value != "backward")
    cut = told(replace(plan, events=events), calibrated(world=1))
    assert cut.step == pytest.approx(10 * WORK_S)


def test_an_unmeasured_number_of_ranks_has_no_time():
    plan = plan_of(world=2)
    assert step_time(plan, work_of(plan), calibrated(world=1)) is None
