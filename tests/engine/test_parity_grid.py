"""Sharded training equals one process: models, strategies, depths, units."""

import itertools

import pytest
import torch.distributed as dist

from support.grid import PAIRED, STRATEGIES, marked, prefetching
from support.models import CASES, CHAIN
from support.parity import assert_parity, assert_planned_events
from support.ranks import on_ranks

LONG, SLOW = pytest.mark.long, pytest.mark.slow
DEPTHS = tuple(itertools.product((0, 1, 2), (0, 1, 2)))
FEW_DEPTHS = ((0, 0), (0, 2), (1, 1), (2, 1))
STRANGE = ("t5", "albert")  # their first step differs from the registration order


def inner_modules(module):
    """A callable wrap: units inside of blocks that are not units themselves."""
    return type(module).__name__ in ("LlamaMLP", "LlamaAttention")


WRAPS = (
    "auto",
    "none",
    ["LlamaDecoderLayer"],
    ["LlamaDecoderLayer", "LlamaMLP"],
    ["LlamaDecoderLayer", "LlamaMLP", "Linear"],
    ["Linear", "Embedding"],
    inner_modules,
)


SHORT = {  # three ranks cut inside parameters; one rank sends nothing with any model
    1: ("chain",),
    2: ("tied llama",),
    3: ("convolutional net",),
}
KINDS = {"shard_grad_op": ("sgd",), "no_shard": ("adamw",)}  # full_shard: both


@pytest.mark.parametrize(
    ("name", "world_size"),
    marked(
        itertools.product(CASES, (1, 2, 3)),
        lambda name, size: name in SHORT[size],
        LONG,
    ),
)
@on_ranks("world_size", timeout=100)
def test_model_trains_as_in_one_process(name):
    case = CASES[name]
    for strategy in STRATEGIES:
        kinds = KINDS.get(strategy, ("sgd", "adamw"))
        model = assert_parity(case.build, case.work, {"strategy": strategy}, kinds=kinds)
        for step in range(1 if name in STRANGE else 0, 3):
            assert_planned_events(model, step)


HYBRID = (
    {"strategy": "hybrid_shard", "replicate": 2},
    {"strategy": "hybrid_shard", "replicate": 4},
    {"strategy": "hybrid_shard_zero2", "replicate": 2},
    {"strategy": "hybrid_shard_zero2", "shard": 4},
    {"strategy": "hybrid_shard", "replicate": 2, "transport": "c10d", "reduction": "ordered"},
    {"strategy": "full_shard", "replicate": 2, "transport": "c10d"},
)
MIXED = (
    {"strategies": {"blocks.1": "no_shard"}},
    {"strategies": {"blocks.*": "no_shard", "blocks.2": "shard_grad_op"}},
    {"strategy": "shard_grad_op", "strategies": {"blocks.0": "full_shard"}},
    {"strategies": {"head": "no_shard", "stem": "shard_grad_op"}},  # units, chosen by name
    {"strategy": "hybrid_shard", "replicate": 2, "strategies": {"blocks.1": "no_shard"}},
)


def check_meshes(name, settings):
    case = CASES[name]
    for fields in settings:
        if dist.get_world_size() % fields.get("replicate", 1):
            continue
        model = assert_parity(case.build, case.work, fields, kinds=("adamw",))
        assert_planned_events(model, 1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tied llama", marks=SLOW),
        pytest.param("mixture of experts", marks=SLOW),
        "convolutional net",
    ],
)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=LONG)])
def test_copies_of_shards_train_as_in_one_process(ranks, name, half):
    ranks(4)(check_meshes, name, HYBRID[half::2], timeout=100)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=LONG), 4])
@pytest.mark.parametrize("half", [pytest.param(0, marks=LONG), 1])
def test_units_of_different_strategies_train_as_in_one_process(ranks, world_size, half):
    ranks(world_size)(check_meshes, "chain", MIXED[half::2], timeout=100)


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRED)
@on_ranks("world_size", timeout=100)
def test_every_prefetch_depth_trains_as_in_one_process(strategy):
    case = CHAIN
    for settings in prefetching(strategy, FEW_DEPTHS if dist.get_world_size() == 2 else DEPTHS):
        model = assert_parity(case.build, case.work, settings, kinds=("sgd",))
        for step in range(3):
            assert_planned_events(model, step)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        pytest.param("full_shard", 1, marks=LONG),
        ("full_shard", 2),
        pytest.param("shard_grad_op", 2, marks=LONG),
        pytest.param("no_shard", 2, marks=LONG),
        *(pytest.param(strategy, 3, marks=SLOW) for strategy in STRATEGIES),
    ],
)
@pytest.mark.parametrize("wraps", [WRAPS[::2], pytest.param(WRAPS[1::2], marks=LONG)], ids=len)
@on_ranks("world_size", timeout=100)
def test_every_choice_of_units_trains_as_in_one_process(strategy, wraps):
    case = CASES["llama"]
    for wrap in wraps:
        settings = {"strategy": strategy, "wrap": wrap}
        model = assert_parity(case.build, case.work, settings, kinds=("sgd",))
        for step in range(3):
            assert_planned_events(model, step)
