"""Slots: which units may share one, their number and their size."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.schema import ShardConfig
from fullshard.config.values import DType
from fullshard.planner.mesh import Topology
from fullshard.planner.plan import make_plan
from fullshard.planner.spec import ITEMSIZE, ModelSpec, ModuleSpec, ParamSpec
from fullshard.planner.units import ancestors_of

NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=9)
NESTS = st.lists(st.integers(0, 2), min_size=9, max_size=9)
TRAINED = st.lists(st.booleans(), min_size=9, max_size=9)
DEPTHS = st.tuples(st.integers(0, 4), st.integers(0, 4))
WORLDS = st.sampled_from([1, 2, 3, 8])


def spec_of(numels, nests, trained):
    """Blocks of these sizes, some with smaller ones inside, in a root with a parameter."""
    modules = [ModuleSpec("", "Model"), ModuleSpec("blocks", "ModuleList", is_container=True)]
    params = [ParamSpec(("scale",), (7,), DType.FLOAT32, trainable=True)]
    for at, numel in enumerate(numels):
        names = [f"blocks.{at}", *(f"blocks.{at}.inner{k}" for k in range(nests[at]))]
        for name, size in zip(names, (numel, *[1 + numel // 3] * nests[at]), strict=True):
            modules.append(ModuleSpec(name, "Inner" if "inner" in name else "Block"))
            params.append(ParamSpec((f"{name}.weight",), (size,), DType.FLOAT32, trained[at]))
    return ModelSpec("Model", tuple(modules), tuple(params))


def plan_of(spec, world_size, depths, **fields):
    config = ShardConfig.of(
        None,
        wrap=[kind for kind in ("Block", "Inner") if any(m.kind == kind for m in spec.modules)],
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
        **fields,
    )
    return make_plan(spec, config, Topology(world_size))


def slots_of(plan, unit, *, gradients=False):
    groups = plan.units[unit].groups
    refs = (group.grad_slot if gradients else group.slot for group in groups)
    return {(ref.ring, ref.index) for ref in refs if ref is not None}


def by_depth(plan):
    """Units of equal nesting depth in forward order, which are neighbours."""
    found: dict[int, list[int]] = defaultdict(list)
    for unit in plan.units:
        found[len(ancestors_of(plan.units, unit))].append(unit.index)
    return list(found.values())


@given(numels=NUMELS, nests=NESTS, trained=TRAINED, depths=DEPTHS)
def test_neighbours_within_the_window_never_share_a_slot(numels, nests, trained, depths):
    plan = plan_of(spec_of(numels, nests, trained), 2, depths)
    window = max(depths) + 1
    for peers in by_depth(plan):
        for start in range(len(peers)):
            near = peers[start : start + window]
            slots = [slot for unit in near for slot in slots_of(plan, unit)]
            assert len(slots) == len(set(slots)), near


@given(numels=NUMELS, nests=NESTS, trained=TRAINED, depths=DEPTHS)
def test_a_unit_never_shares_a_slot_with_one_around_it(numels, nests, trained, depths):
    plan = plan_of(spec_of(numels, nests, trained), 2, depths)
    for unit in plan.units:
        for above in ancestors_of(plan.units, unit):
            for gradients in (False, True):
                own, others = (
                    slots_of(plan, index, gradients=gradients) for index in (unit.index, above)
                )
                assert not own & others


@given(numels=NUMELS, nests=NESTS, trained=TRAINED, depths=DEPTHS)
def test_gradient_slots_are_two_in_turn_and_none_for_frozen_units(numels, nests, trained, depths):
    plan = plan_of(spec_of(numels, nests, trained), 2, depths)
    for unit in plan.units:
        assert bool(slots_of(plan, unit.index, gradients=True)) is unit.trainable
    for peers in by_depth(plan):
        trainable = [index for index in peers if plan.units[index].trainable]
        for one, two in pairwise(trainable):
            own, next_ = (slots_of(plan, index, gradients=True) for index in (one, two))
            assert not own & next_
    assert all(ring.count <= 2 for ring in plan.rings if ring.name.endswith(".grad"))


@given(
    numels=NUMELS,
    nests=NESTS,
    depths=DEPTHS,
    world_size=WORLDS,
    strategy=st.sampled_from(["full_shard", "shard_grad_op", "no_shard"]),
    param_dtype=st.sampled_from([None, "bf16"]),
)
def test_every_ring_is_as_large_as_its_largest_unit_and_no_unit_is_half_of_it(
    numels, nests, depths, world_size, strategy, param_dtype
):
    spec = spec_of(numels, nests, [True] * 9)
    plan = plan_of(spec, world_size, depths, strategy=strategy, param_dtype=param_dtype)
    users: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for unit in plan.units:
        for group in unit.groups:
            aliased = group.slot is None
            assert aliased is (plan.mesh.shard == 1 and param_dtype is None)
            for ref in (group.slot, group.grad_slot):
                if ref is not None:
                    users[ref.ring].append((ref.index, ref.base + group.layout.numel))
    assert users.keys() == {ring.name for ring in plan.rings}
    for ring in plan.rings:
        ends = [end for _, end in users[ring.name]]
        assert ring.numel == max(ends)
        assert 2 * min(ends) >= ring.numel, "a small unit in a large slot"
        assert {index for index, _ in users[ring.name]} == set(range(ring.count))
        assert ring.num_bytes == ring.count * ring.numel * ITEMSIZE[ring.dtype]


@given(numels=NUMELS, nests=NESTS, depths=DEPTHS)
def test_without_resharding_every_unit_has_its_own_slot(numels, nests, depths):
    spec = spec_of(numels, nests, [True] * 9)
    plan = plan_of(spec, 2, depths, strategy="shard_grad_op")
    slots = [slot for unit in plan.units for slot in slots_of(plan, unit.index)]
    assert len(slots) == len(set(slots)) == len(plan.units)


@given(
    numels=st.lists(st.integers(1, 5000), min_size=2, max_size=6),
    repeats=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    depths=DEPTHS,
)
def test_units_that_are_called_again_are_resident(numels, repeats, depths):
    plan = plan_of(spec_of(numels, [0] * 9, [True] * 9), 2, depths)
    blocks = list(range(1, len(plan.units)))
    called = [block for block in blocks for _ in range(repeats[block - 1])]
    again = plan.reordered([0, *called], [0, *reversed(called)])
    owners: dict[tuple[str, int], set[int]] = defaultdict(set)
    for unit in again.units:
        for slot in slots_of(again, unit.index):
            owners[slot].add(unit.index)
    for block in blocks:
        (slot,) = slots_of(again, block)
        if repeats[block - 1] > 1:
            assert slot == (f"resident{block}.float32", 0)
            assert owners[slot] == {block}
        else:
            assert not slot[0].startswith("resident")
    assert again.order.learned


@pytest.mark.parametrize(
    ("numels", "classes"),
    [
        ([1000, 1000, 1000, 1000], 1),
        ([1000, 600, 1000, 600], 1),  # within a factor of two
        ([4096, 1024, 4096, 1024], 2),
        ([8192, 2048, 512, 8192, 2048, 512], 3),
    ],
)
def test_units_of_similar_size_share_a_ring(numels, classes):
    plan = plan_of(spec_of(numels, [0] * 9, [True] * 9), 2, (1, 1))
    rings = [
        ring for ring in plan.rings if ring.name.startswith("block") and "grad" not in ring.name
    ]
    assert len(rings) == classes


def test_turns_follow_the_order_of_forward_not_of_registration():
    plan = plan_of(spec_of([500] * 4, [0] * 9, [True] * 9), 2, (1, 1))
    assert [index for u in (1, 2, 3, 4) for _, index in slots_of(plan, u)] == [0, 1, 0, 1]
    other = plan.reordered([0, 1, 3, 2, 4], [0, 4, 2, 3, 1])
    assert [index for u in (1, 3, 2, 4) for _, index in slots_of(other, u)] == [0, 1, 0, 1]
