"""The events of a plan, replayed by a checker that is independent of the scheduler."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fullshard as fs
from fullshard.planner.schedule import EventKind, nominal_trace

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")


class Block(nn.Module):
    """A block with an optional unit inside."""

    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)
        self.inner = Inner(width)


class Inner(nn.Module):
    """A nested unit."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Linear(width, width)


class Model(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, num_blocks, frozen):
        super().__init__()
        self.embed = nn.Embedding(200, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(num_blocks)])
        self.head = nn.Linear(8, 200)
        for block in self.blocks[:frozen]:
            block.requires_grad_(requires_grad=False)


class Checker:
    """Tracks the unit in each slot, and the gradients in each gradient slot."""

    def __init__(self, plan):
        self.plan = plan
        self.holder: dict[Any, int] = {}
        self.filling: dict[Any, int] = {}
        self.reduced: list[int] = []

    def slots(self, unit):
        groups = self.plan.units[unit].groups
        return {(g.slot.ring, g.slot.index) for g in groups if g.slot}

    def grad_slots(self, unit):
        groups = self.plan.units[unit].groups
        return {(g.grad_slot.ring, g.grad_slot.index) for g in groups if g.grad_slot}

    def gather(self, unit):
        assert all(self.holder.get(slot, unit) == unit for slot in self.slots(unit))
        self.holder.update(dict.fromkeys(self.slots(unit), unit))

    def forward(self, unit):
        assert all(self.holder.get(slot) == unit for slot in self.slots(unit))

    def backward(self, unit):
        if self.plan.units[unit].reads_weight_in_backward:
            self.forward(unit)
        self.fill(unit)  # at its first gradient, so that no gradient spills

    def release(self, unit):
        for slot in self.slots(unit):
            assert self.holder.pop(slot) == unit

    def fill(self, unit):
        assert all(self.filling.get(slot, unit) == unit for slot in self.grad_slots(unit))
        self.filling.update(dict.fromkeys(self.grad_slots(unit), unit))

    def reduce(self, unit):
        self.fill(unit)
        self.reduced.append(unit)

    def accumulate(self, unit):
        for slot in self.grad_slots(unit):
            assert self.filling.pop(slot) == unit


def replay(plan):
    """Asserts that slots and gradient slots have one use at a time."""
    checker = Checker(plan)
    for event in plan.events:
        if event.kind is not EventKind.SETTLE:
            getattr(checker, event.kind.value)(event.unit)
    assert not checker.holder, "a slot is held when the step is over"
    assert not checker.filling, "a reduction has not landed when the step is over"
    assert checker.reduced == list(plan.order.reduce)
    assert sorted(checker.reduced) == [unit.index for unit in plan.units if unit.trainable]


@given(
    num_blocks=st.integers(2, 7),
    frozen=st.integers(0, 3),
    depths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    strategy=st.sampled_from(STRATEGIES),
    nested=st.booleans(),
)
def test_no_event_uses_a_slot_of_another_unit(num_blocks, frozen, depths, strategy, nested):
    plan = fs.plan(
        Model(num_blocks, min(frozen, num_blocks)),
        world_size=4,
        local_world_size=2,
        strategy=strategy,
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
        wrap=["Block", "Inner"] if nested else "auto",
    )
    replay(plan)


def travels(plan, called, used):
    """Gathers and reductions of a rank that calls some units and uses some of their outputs."""
    scheduler, order = plan.scheduler(), plan.order
    events = scheduler.begin_forward()
    for what, index in nominal_trace(plan.units, [i for i in order.forward if i in called]):
        if what == "enter":
            events += scheduler.enter_forward(index)
        else:
            events += scheduler.leave_forward(index, training=True)
    scheduler.begin_backward([unit.index for unit in plan.units if unit.index not in used])
    for what, index in nominal_trace(plan.units, [i for i in order.backward if i in used]):
        if what == "enter":
            events += scheduler.enter_backward(index)
        elif plan.units[index].trainable:
            events += scheduler.complete(index)
    events += scheduler.end_backward()
    return [(e.kind, e.unit) for e in events if e.kind in (EventKind.GATHER, EventKind.REDUCE)]


@given(
    num_blocks=st.integers(2, 7),
    depths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    strategy=st.sampled_from(STRATEGIES),
    skipped=st.sets(st.integers(1, 7)),
    dropped=st.sets(st.integers(1, 7)),
)
def test_gathers_and_reductions_alternate_equally_on_a_rank_that_skips_blocks(
    num_blocks, depths, strategy, skipped, dropped
):
    plan = fs.plan(
        Model(num_blocks, 0),
        world_size=4,
        local_world_size=2,
        strategy=strategy,
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
    )
    every = {unit.index for unit in plan.units}
    blocks = {unit.index for unit in plan.units if unit.name.startswith("blocks.")}
    called = every - (skipped & blocks)
    assert travels(plan, called, called - (dropped & blocks)) == travels(plan, every, every)


def test_a_ring_has_one_slot_more_than_the_larger_depth():
    for forward, backward in [(0, 0), (1, 0), (2, 1), (1, 3)]:
        plan = fs.plan(
            Model(7, 0), world_size=2, forward_prefetch=forward, backward_prefetch=backward
        )
        counts = {r.name: r.count for r in plan.rings if r.name.startswith("block")}
        assert counts["block0.0.float32"] == max(forward, backward) + 1


def test_the_checker_finds_a_missing_gather():
    from dataclasses import replace

    plan = fs.plan(Model(4, 0), world_size=2)
    at = next(i for i, e in enumerate(plan.events) if e.kind is EventKind.GATHER and e.unit == 3)
    broken = replace(plan, events=plan.events[:at] + plan.events[at + 1 :])
    with pytest.raises(AssertionError):
        replay(broken)


def test_strategies_differ_only_in_slots_and_gathers():
    """Sharded strategies differ only in slots and gathers: the units and reductions are equal."""
    found = defaultdict(set)
    for strategy in STRATEGIES[:2]:
        plan = fs.plan(Model(4, 0), world_size=2, strategy=strategy)
        found["units"].add(tuple(unit.name for unit in plan.units))
        found["reductions"].add(plan.order.reduce)
        found["slots"].add(sum(ring.count for ring in plan.rings))
    assert len(found["units"]) == len(found["reductions"]) == 1
    assert len(found["slots"]) == 2
