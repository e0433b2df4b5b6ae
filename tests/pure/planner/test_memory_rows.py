"""The memory table against formulas, bounded from both sides; and the printed plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fullshard as fs
from support.sizes import sizes_of

ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2}
ALIGNMENT = 64
ADAM = 2
COUNT_BYTES = 4  # a float32 step count per parameter


class Model(nn.Module):
    """Blocks of one size, and a smaller root."""

    def __init__(self, num_blocks, width, *, frozen=0):
        super().__init__()
        self.stem = nn.Linear(width, 3)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.register_buffer("steps", nn.Linear(2, 8).weight.detach())
        for block in self.blocks[:frozen]:
            block.requires_grad_(requires_grad=False)


def rows_of(model, **fields):
    plan = fs.plan(model, **fields)
    return plan, {str(row["name"]): int(row["bytes"]) for row in plan.rows()}


def padded(params, parts):
    """Returns the minimum and maximum number of elements of one unit's buffer."""
    exact = sum(p.numel() for p in params)
    return exact, exact + (ALIGNMENT - 1) * len(params) + ALIGNMENT * parts


@given(
    num_blocks=st.integers(2, 6),
    width=st.integers(3, 40),
    frozen=st.integers(0, 2),
    world_size=st.sampled_from([1, 2, 3, 8, 64]),
    strategy=st.sampled_from(["full_shard", "shard_grad_op", "no_shard"]),
    depths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dtypes=st.sampled_from([("fp32", "fp32", "fp32"), ("fp32", "bf16", "fp32"),
                            ("fp32", "bf16", "bf16"), ("fp64", "fp64", "fp64")]),
)  # fmt: skip
def test_every_row_lies_between_its_formula_and_the_formula_with_padding(
    num_blocks, width, frozen, world_size, strategy, depths, dtypes
):
    model = Model(num_blocks, width, frozen=frozen)
    master, compute, reduce = (ITEMSIZE[name] for name in dtypes)
    plan, rows = rows_of(
        model,
        world_size=world_size,
        strategy=strategy,
        forward_prefetch=depths[0],
        backward_prefetch=depths[1],
        master_dtype=dtypes[0],
        param_dtype=dtypes[1],
        reduce_dtype=dtypes[2],
        wrap=["Linear"],
    )
    parts = 1 if strategy == "no_shard" else world_size
    units = [list(module.parameters()) for module in (model.stem, *model.blocks)]
    trained = [unit for unit in units if unit[0].requires_grad]
    sizes = {name: [padded(u, parts) for u in of] for name, of in (("", units), ("t", trained))}

    def bounds(which, itemsize):
        low, high = (sum(size[k] for size in sizes[which]) for k in (0, 1))
        return itemsize * low / parts, itemsize * high / parts

    def assert_within(name, low, high):
        assert low <= rows[name] <= high, (name, low, rows[name], high)

    assert_within("parameter shards", *bounds("", master))
    assert_within("gradient shards", *bounds("t", master))
    frozen_names = {n for n, p in model.named_parameters() if not p.requires_grad}
    held = [
        sum(s.numel for s in plan.view(rank).all_slices() if s.name not in frozen_names)
        for rank in range(world_size)
    ]
    counts = COUNT_BYTES * sum(len(unit) for unit in trained)
    assert rows["optimizer (AdamW)"] == ADAM * master * max(held) + counts
    assert rows["buffers"] == 16 * 4
    assert plan.peak_bytes == {"device": sum(rows.values()), "host": 0, "disk": 0}
    block = padded(units[1], parts)
    if parts == 1 and compute == master:
        assert rows["slots"] == 0
    else:
        whole = strategy != "full_shard"
        ring = num_blocks if whole else min(num_blocks, max(depths) + 1)
        most = (ring + 1) * block[1]  # the stem has its own slot, or an additional slot of the ring
        assert_within("slots", compute * ring * block[0], compute * most)
    if not trained:
        assert rows["gradient slots"] == 0
    else:
        least, most = (max(size[k] for size in sizes["t"]) for k in (0, 1))
        assert_within("gradient slots", reduce * least, reduce * 4 * most)  # two rings of two


@pytest.mark.parametrize(
    ("transport", "strategy", "peers"),
    [
        ("direct", "full_shard", 3),  # a part from each peer, for the one reduction in flight
        ("c10d", "full_shard", 0),  # received in gradient slots
        ("c10d", "no_shard", 0),
    ],
)
def test_receive_buffers_are_parts_of_the_units_that_are_reduced_at_once(
    transport, strategy, peers
):
    model = Model(5, 32)
    plan, rows = rows_of(
        model, world_size=4, transport=transport, strategy=strategy, wrap=["Linear"]
    )
    part = max(g.layout.part_numel for u in plan.units for g in u.groups)
    assert 4 * peers * part <= rows["communication buffers"] <= 2 * 4 * peers * part


# ---- the tree ------------------------------------------------------------------------------------

LLAMA = sizes_of(64, 172, 4, 2, layers=4, model_type="llama", vocab_size=4096)


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"world_size": 8, "param_dtype": "bf16"}, LLAMA),
        ({"world_size": 8, "local_world_size": 4, "strategy": "hybrid_shard"}, LLAMA),
        ({"world_size": 2, "strategy": "no_shard"}, {**LLAMA, "tie_word_embeddings": True}),
    ],
    ids=["full_shard", "hybrid_shard", "no_shard, tied"],
)
def test_the_tree_reads_as_before(fields, model, snapshot):
    assert fs.plan(model, **fields).tree() == snapshot


def test_equal_neighbours_are_folded_but_frozen_ones_are_separate():
    tree = fs.plan(Model(6, 32, frozen=2), world_size=2, wrap=["Linear"]).tree()
    assert "blocks.0 .. blocks.1 (2): Linear, block" in tree
    assert tree.count("frozen") == 1
    assert "blocks.2 .. blocks.5 (4): Linear, block" in tree


@pytest.mark.parametrize(
    ("grad_sync", "strategy", "replicate", "whole"),
    [
        ("every_micro_batch", "full_shard", None, None),
        ("last_micro_batch", "full_shard", None, True),
        ("last_micro_batch_outer", "full_shard", None, None),  # nothing is copied, so nothing waits
        ("last_micro_batch_outer", "hybrid_shard", 2, False),
    ],
)
def test_gradients_that_wait_for_the_last_micro_batch_are_planned(
    grad_sync, strategy, replicate, whole
):
    fields = {"grad_sync": grad_sync, "strategy": strategy, "replicate": replicate}
    plan, rows = rows_of(Model(3, 16), world_size=8, **fields)
    groups = [group for unit in plan.units for group in unit.groups]
    wanted = {None: 0, True: sum(g.layout.numel for g in groups) * 4}
    wanted[False] = sum(g.layout.part_numel for g in groups) * 4
    assert rows.get("deferred gradients", 0) == wanted[whole]


def test_neighbours_of_other_dtypes_or_meshes_have_separate_rows():
    for fields in ({"param_dtype": "bf16", "fp32_modules": ["blocks.3"]},
                   {"strategies": {"blocks.3": "no_shard"}}):  # fmt: skip
        plan, _ = rows_of(Model(4, 32), world_size=2, wrap=["Linear"], **fields)
        tree = plan.tree()
        assert "blocks.0 .. blocks.2 (3): Linear, block" in tree
        assert "  blocks.3: Linear, block" in tree
