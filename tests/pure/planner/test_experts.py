"""Plans of mixtures whose experts are sharded over an axis of the mesh."""

from dataclasses import replace

import pytest

from fullshard.config.schema import ShardConfig
from fullshard.config.values import DType
from fullshard.errors import ConfigError, WrapError
from fullshard.planner.mesh import Mesh, Topology
from fullshard.planner.plan import Plan, make_plan
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec


@pytest.mark.parametrize(
    ("dense", "groups", "experts"),
    [
        (Mesh(1, 4), [(0, 1), (2, 3)], Mesh(1, 2, (), 2)),
        (Mesh(1, 4), [(0, 1, 2, 3)], Mesh(1, 1, (), 4)),
        (Mesh(1, 4), [(1, 3), (0, 2)], Mesh(1, 2, (0, 2, 1, 3), 2)),
        (Mesh(2, 2), [(0, 1), (2, 3)], Mesh(2, 1, (), 2)),
        (Mesh(4, 1), [(0, 1), (2, 3)], Mesh(2, 1, (), 2)),
        (Mesh(2, 2), [(0, 1, 2, 3)], Mesh(1, 1, (), 4)),
        (Mesh(2, 4), [(0, 1), (2, 3), (4, 5), (6, 7)], Mesh(2, 2, (), 2)),
        (Mesh(1, 2, (), 2), [(0, 1, 2, 3)], Mesh(1, 1, (), 4)),
        (Mesh(1, 4, (3, 2, 1, 0)), [(0, 1), (2, 3)], Mesh(1, 2, (2, 3, 0, 1), 2)),
    ],
)
def test_experts_are_sharded_over_ranks_with_the_same_experts(dense, groups, experts):
    found = dense.of_experts(groups)
    assert found == experts
    held = {rank: group.index(rank) for group in groups for rank in group}
    for same in (*found.shard_groups(), *found.replicate_groups()):
        assert len({held[rank] for rank in same}) == 1
    for rank in range(dense.world_size):
        assert found.place(rank) % found.inner == held[rank]


@pytest.mark.parametrize(
    ("dense", "groups"),
    [
        (Mesh(1, 4), [(0, 1), (1, 2), (3, 0)]),
        (Mesh(1, 4), [(0, 1, 2), (3,)]),
        (Mesh(1, 4), [(0, 1)]),
        (Mesh(2, 3), [(0, 1), (2, 3), (4, 5)]),
        (Mesh(1, 2, (), 2), [(0, 2), (1, 3)]),
    ],
)
def test_groups_that_do_not_divide_the_ranks_are_refused(dense, groups):
    with pytest.raises(ConfigError, match="expert axis: expected groups of equal size"):
        dense.of_experts(groups)


def spec(*, directly=False):
    """Two blocks; the experts are in a module below the one that reads them."""
    own = Mesh(1, 2, (), 2)
    modules, params = [ModuleSpec("", "Net"), ModuleSpec("layers", "ModuleList", True, False)], []
    for layer in ("layers.0", "layers.1"):
        paths = {layer: "Block", f"{layer}.moe": "Moe", f"{layer}.moe.experts": "Experts"}
        paths[f"{layer}.moe.experts.mlp"] = "Weights"
        modules += [ModuleSpec(path, kind) for path, kind in paths.items()]
        dense = ParamSpec((f"{layer}.moe.router",), (8, 3), DType.FLOAT32, trainable=True)
        names = (f"{layer}.moe.experts.mlp.up", f"{layer}.moe.experts.mlp.down")
        params += [dense, *(replace(dense, names=(name,), mesh=own) for name in names)]
        if directly:
            params.append(replace(dense, names=(f"{layer}.moe.bias",), mesh=own))
    return ModelSpec("Net", tuple(modules), tuple(params))


def test_the_outermost_modules_of_experts_become_units_with_their_mesh():
    plan = make_plan(spec(), ShardConfig(), Topology(4))
    blocks = [f"layers.{i}" for i in (0, 1)]
    assert [unit.name for unit in plan.units] == [
        "",
        *(name for block in blocks for name in (block, f"{block}.moe.experts")),
    ]
    for unit in plan.units[1:]:
        is_experts = unit.name.endswith("experts")
        assert unit.mesh == (Mesh(1, 2, (), 2) if is_experts else Mesh(1, 4))
        assert {group.layout.num_parts for group in unit.groups} == {2 if is_experts else 4}
    assert [len(plan.view(rank).slices[2][0]) for rank in range(4)] == [2] * 4
    assert plan.view(0).slices[2] == plan.view(1).slices[2] != plan.view(2).slices[2]
    assert Plan.from_json(plan.to_json()) == plan
    assert "layers.0.moe.experts: Experts, block, 128 elements" in plan.tree()
    assert ", on 1 x 2 x 2 (experts)" in plan.tree()


def test_numbers_of_experts_do_not_change_the_choice_of_units():
    """Ranks that share five experts store one, two or none of them."""
    names = []
    for experts in (0, 1, 2, 100):
        whole = spec()
        params = [replace(p, shape=(experts, 8, 3)) if p.mesh else p for p in whole.params]
        plan = make_plan(replace(whole, params=tuple(params)), ShardConfig(), Topology(4))
        names.append([unit.name for unit in plan.units])
    assert all(found == names[0] for found in names)
    assert "layers.1.moe.experts" in names[0]


def test_no_shard_replicates_experts_over_ranks_with_the_same_experts():
    plan = make_plan(spec(), ShardConfig(strategies={"layers.0": "no_shard"}), Topology(4))
    assert plan.units[2].mesh == Mesh(2, 1, (), 2)


def test_experts_beside_dense_parameters_of_one_module_are_refused():
    with pytest.raises(WrapError, match=r"unit layers.0: .*got layers.0.moe.router and layers.0.m"):
        make_plan(spec(directly=True), ShardConfig(), Topology(4))
