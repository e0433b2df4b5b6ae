"""Schedules of three blocks, drawn by hand."""

from itertools import combinations

import pytest

from fullshard.config.schema import ShardConfig
from fullshard.config.values import DType
from fullshard.planner.mesh import Topology
from fullshard.planner.plan import make_plan
from fullshard.planner.schedule import EventKind
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec

SIGNS = {
    EventKind.GATHER: "G",
    EventKind.FORWARD: "F",
    EventKind.RELEASE: "R",
    EventKind.BACKWARD: "B",
    EventKind.REDUCE: "+",
    EventKind.ACCUMULATE: "=",
    EventKind.SETTLE: "*",
}


def plan_of(depth, frozen=(), **fields):
    """A root (0) with its own parameter and three blocks (1, 2, 3) of one size, on 2 ranks."""
    names = ["", "blocks", "blocks.0", "blocks.1", "blocks.2"]
    kinds = ["Model", "ModuleList", "Block", "Block", "Block"]
    modules = tuple(
        ModuleSpec(name, kind, is_container=kind == "ModuleList", can_be_unit=kind != "ModuleList")
        for name, kind in zip(names, kinds, strict=True)
    )
    params = [ParamSpec(("scale",), (100,), DType.FLOAT32, trainable=0 not in frozen)]
    for block in (1, 2, 3):
        name = f"blocks.{block - 1}.weight"
        params.append(ParamSpec((name,), (30, 40), DType.FLOAT32, trainable=block not in frozen))
    forward, backward = depth if isinstance(depth, tuple) else (depth, depth)
    config = ShardConfig.of(
        None, wrap=["Block"], forward_prefetch=forward, backward_prefetch=backward, **fields
    )
    return make_plan(ModelSpec("Model", modules, tuple(params)), config, Topology(2))


def drawn(plan):
    return " ".join(f"{SIGNS[e.kind]}{e.unit if e.unit >= 0 else ''}" for e in plan.events)


# G gather   F forward   R release   B backward   + reduction begins   = it has arrived   * settle
EXAMPLES = {
    # One slot: the blocks use it in turn; the last one keeps it for its backward.
    0: """G0 F0 G1 F1 R1 G2 F2 R2 G3 F3
          B0 B3 +3 R3 G2 B2 +2 =3 R2 G1 B1 +1 =2 +0 =1 =0 R0 R1 *""",
    # Two slots: block 3 uses the slot of block 1, hence R1; blocks 2 and 3 stay for backward.
    1: """G0 G1 F0 G2 F1 R1 G3 F2 F3
          B0 B3 +3 R3 G1 B2 +2 =3 R2 B1 +1 =2 +0 =1 =0 R0 R1 *""",
    # Three slots for three blocks: nothing is gathered twice.
    2: """G0 G1 G2 F0 G3 F1 F2 F3
          B0 B3 +3 R3 B2 +2 =3 R2 B1 +1 =2 +0 =1 =0 R0 R1 *""",
}


@pytest.mark.parametrize("depth", EXAMPLES)
def test_full_shard_at_each_depth(depth):
    assert drawn(plan_of(depth)) == " ".join(EXAMPLES[depth].split())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_shard_grad_op_gathers_once_and_frees_after_backward(depth):
    forward = {
        0: "G0 F0 G1 F1 G2 F2 G3 F3",
        1: "G0 G1 F0 G2 F1 G3 F2 F3",
        2: "G0 G1 G2 F0 G3 F1 F2 F3",
    }[depth]
    backward = "B0 B3 +3 R3 B2 +2 =3 R2 B1 +1 =2 +0 =1 =0 R0 R1 *"
    assert drawn(plan_of(depth, strategy="shard_grad_op")) == f"{forward} {backward}"


def test_no_shard_gathers_nothing():
    assert drawn(plan_of(1, strategy="no_shard")) == (
        "F0 F1 F2 F3 B0 B3 +3 B2 +2 =3 B1 +1 =2 +0 =1 =0 *"
    )


def test_no_shard_with_another_compute_dtype_fills_slots_without_messages():
    plan = plan_of(1, strategy="no_shard", param_dtype="bf16")
    gathers = [event for event in plan.events if event.kind is EventKind.GATHER]
    assert [event.unit for event in gathers] == [0, 1, 2, 3]
    assert {event.num_bytes for event in gathers} == {0}


def test_depths_of_forward_and_backward_differ():
    assert drawn(plan_of((0, 1))) == (
        "G0 F0 G1 F1 R1 G2 F2 G3 F3 B0 B3 +3 R3 G1 B2 +2 =3 R2 B1 +1 =2 +0 =1 =0 R0 R1 *"
    )
    assert drawn(plan_of((1, 0))) == (
        "G0 G1 F0 G2 F1 R1 G3 F2 F3 B0 B3 +3 R3 B2 +2 =3 R2 G1 B1 +1 =2 +0 =1 =0 R0 R1 *"
    )


def test_a_frozen_block_is_gathered_for_backward_and_not_reduced():
    assert drawn(plan_of(0, frozen=(2,))) == (
        "G0 F0 G1 F1 R1 G2 F2 R2 G3 F3 B0 B3 +3 R3 G2 B2 R2 G1 B1 +1 =3 +0 =1 =0 R0 R1 *"
    )


def test_blocks_before_the_first_trained_one_have_no_backward():
    assert drawn(plan_of(0, frozen=(1, 2))) == (
        "G0 F0 G1 F1 R1 G2 F2 R2 G3 F3 B0 B3 +3 +0 =3 =0 R0 R3 *"
    )


def test_a_frozen_model_has_no_backward():
    assert "B" not in drawn(plan_of(1, frozen=(0, 1, 2, 3)))


def test_a_gather_receives_a_part_from_each_peer():
    plan = plan_of(1)
    part = plan.units[1].groups[0].layout.part_numel
    assert 4 * 600 <= 4 * part <= 4 * (600 + 64)  # half of 30 x 40
    for kind in (EventKind.GATHER, EventKind.REDUCE):
        assert {e.num_bytes for e in plan.events if e.kind is kind and e.unit} == {4 * part}


def collectives(events):
    return [event for event in events if event.kind in (EventKind.GATHER, EventKind.REDUCE)]


def step_with(plan, used):
    """The collectives of a rank that uses only some blocks."""
    machine = plan.scheduler()
    events = [*machine.begin_forward(), *machine.enter_forward(0)]
    for block in used:
        events += [*machine.enter_forward(block), *machine.leave_forward(block, training=True)]
    events += machine.leave_forward(0, training=True)
    machine.begin_backward({1, 2, 3}.difference(used))
    events += machine.enter_backward(0)
    for block in reversed(used):
        events += [*machine.enter_backward(block), *machine.complete(block)]
    return collectives([*events, *machine.complete(0), *machine.end_backward()])


@pytest.mark.parametrize("seen", [(3,), (2, 1), (1, 3), (3, 2, 1)])
@pytest.mark.parametrize("depth", EXAMPLES)
def test_ranks_issue_one_sequence_for_any_used_blocks(depth, seen):
    plan = plan_of(depth).reordered((0, *seen), (0, *reversed(seen)))
    blocks = list(dict.fromkeys([*plan.order.forward[1:], 1, 2, 3]))
    for number in range(4):
        for used in combinations(blocks, number):
            assert step_with(plan, used) == collectives(plan.events)
