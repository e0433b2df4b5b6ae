"""Models that do not run in registration order, or run differently on each rank."""

import itertools
import sys
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.engine import placing
from fullshard.engine.engine import engine_of
from fullshard.planner.memory import most_spilled_bytes
from fullshard.planner.schedule import EventKind
from fullshard.transport import shared
from support.grid import PAIRED, STRATEGIES, in_turn, marked, prefetching
from support.models import CHAIN, WIDTH, chain, mean_square, vectors
from support.parity import assert_parity, assert_planned_events, backward_alone, unlike_gradients
from support.ranks import on_ranks

DEPTHS = ((0, 0), (1, 1), (2, 1), (0, 2))
FEW_DEPTHS = ((0, 0), (2, 1))  # every order is tried with each
ALL = (0, 1, 2, 3)


# ---- a different order, repetitions --------------------------------------------------------------

ORDERS = {
    "backwards": (3, 2, 1, 0),
    "mixed": (2, 0, 3, 1),
    "one block is never called": (3, 0, 1),
    "each block three times": (0, 1, 2, 3) * 3,
    "alternating": (0, 1, 0, 1, 2, 3, 2),
    "one block alone": (1, 1, 1),
}
BUILDS = {name: partial(chain, 4, order) for name, order in ORDERS.items()}  # one object per name


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRED)
@on_ranks("world_size", timeout=100)
def test_the_order_is_learned_and_events_are_then_those_of_the_new_plan(strategy):
    for name, settings in in_turn(ORDERS, strategy, FEW_DEPTHS):
        model = assert_parity(BUILDS[name], CHAIN.work, settings, kinds=("adamw",))
        order = engine_of(model).plan.order
        called = [index for index in order.forward if index > 0 and index not in order.unused]
        assert called == [block + 1 for block in ORDERS[name]]
        assert set(order.forward) == set(range(5))  # other ranks may need the others later
        for step in (1, 2):
            assert_planned_events(model, step)


def two_graphs(model, step, rank):
    """Two forwards before two backwards, and a block's evaluation between them."""
    one, other = (mean_square(model(**vectors(at, rank))) for at in (step, step + 50))
    with torch.no_grad():
        model.blocks[2](torch.ones(1, WIDTH, dtype=torch.float64))
    other.backward()
    one.backward()
    return one.detach()


@on_ranks(2)
def test_an_order_is_not_learned_while_a_graph_waits_for_its_backward():
    assert_parity(BUILDS["backwards"], two_graphs, {"transport": "direct"}, kinds=("sgd",))


class Uneven(torch.nn.Module):
    """A block with two gradient buffers of one dtype; the first has a different size per block."""

    def __init__(self, inner):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, inner), torch.nn.Linear(inner, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x.float()).bfloat16()))).bfloat16()


class Falling(torch.nn.Sequential):
    """Runs its modules from the last to the first."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x.float()


def spilled(sample):
    """Returns first gradients, the number of spills, spilled bytes, and their planned bound."""
    torch.manual_seed(0)
    model, x = Falling(*map(Uneven, (33, 36, 40, 47))), torch.randn(3, WIDTH)
    settings = {"param_dtype": "bf16", "reduce_dtype": "fp32", "fp32_modules": ["*.norm"]}
    fs.shard(model, sample=sample, wrap=["Uneven"], transport="fake", shard=2, **settings)
    most, found, events = most_spilled_bytes(engine_of(model).plan), [], []
    for _ in range(2):
        model(x).square().mean().backward()
        found.append([param.grad.to_local().clone() for param in model.parameters()])
        ring = engine_of(model).recorder
        events.append(sum(event.kind is EventKind.SPILL for event in ring.events()))
        ring.clear()
        model.zero_grad()
    spills = fs.memory_stats(model)["spilled_gradients"]
    assert spills["now"] == 0
    return found, events, spills["peak"], most


def test_gradients_whose_slot_is_in_use_spill_within_the_planned_bound():
    """The first step's order is unknown unless it was traced, so gradients may spill."""
    found, events, used, most = spilled(None)
    assert events == [4, 0]  # two blocks of two buffers each
    assert used == most > 0
    planned, events, used, _ = spilled(torch.randn(3, WIDTH))
    assert (events, used) == ([0, 0], 0)
    for ours, theirs in zip(found, planned, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("part", ["none", "a frozen block", "an evaluation", "a block alone"])
def test_an_order_is_learned_despite_units_without_a_backward(part):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    if part == "a frozen block":
        model[0].requires_grad_(False)
    fs.shard(model, wrap=["Linear"], transport="fake", shard=2)
    for _ in range(3):
        if part in ("an evaluation", "a block alone"):
            with torch.no_grad():
                (model if part == "an evaluation" else model[2])(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
    assert engine_of(model).runtime.agreed


@on_ranks(2)
def test_units_with_new_slots_stay_open_in_their_forward():
    """The first step skips a block; later ones call all blocks."""

    def work(model, step, rank):
        order = (1, 3, 0) if step == 0 else (2, 3, 0, 1)
        return CHAIN.work(model, step, rank, order=order)

    settings = {"strategy": "shard_grad_op", "transport": "direct", "wrap": ("Block", "Linear")}
    settings |= {"forward_prefetch": 2, "backward_prefetch": 2}
    assert_parity(chain, work, settings, kinds=("sgd",))


# ---- a different order in every step -------------------------------------------------------------


def changing_order(model, step, rank):
    """Later steps run in a different order than the first one."""
    orders = [(0, 1, 2, 3), (3, 1, 0), (2, 2, 0, 1, 3)]
    return CHAIN.work(model, step, rank, order=orders[step])


def later_blocks(model, step, rank):
    """The first step, which learns the order, skips blocks that some ranks use later."""
    order = (2, 0) if step == 0 else [(0, 1), (2, 3), (3, 0)][(rank + step) % 3]
    return CHAIN.work(model, step, rank, order=order)


def shorter_evaluation(model, step, rank):
    """Exits early under no_grad, on one rank earlier than on the others."""
    with torch.no_grad():
        model(**vectors(step, rank), order=(0,) if rank == 0 else (0, 1, 2))
    loss = mean_square(model(**vectors(step, rank)))
    loss.backward()
    with torch.no_grad():
        model(**vectors(step, rank), order=(1,) if rank == 0 else ALL)
    return loss.detach()


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRED)
@on_ranks("world_size", timeout=100)
def test_orders_that_differ_from_the_first_step_or_other_ranks_stay_right(strategy):
    for work in (changing_order, later_blocks, shorter_evaluation):
        kinds, depths = ("sgd",), DEPTHS
        if work is later_blocks:
            kinds, depths = ("adamw",), FEW_DEPTHS
        for settings in prefetching(strategy, depths):
            assert_parity(chain, work, settings, kinds=kinds)


# ---- memory for learning an order ----------------------------------------------------------------


class NewSlots:
    """Records bytes of slots made inside, and whether the old ones were freed by then.

    The engine makes them with modes disabled.
    """

    def __init__(self, old):
        self.old, self.num_bytes, self.alive = old, 0, 0

    def __enter__(self):
        self.zeros = torch.zeros
        torch.zeros = self.counted
        return self

    def __exit__(self, *_):
        torch.zeros = self.zeros

    def counted(self, *args, **kwargs):
        self.alive = max(self.alive, len({slot() for slot in self.old} - {None}))
        made = self.zeros(*args, **kwargs)
        self.num_bytes += made.nbytes * (sys._getframe(1).f_globals["__name__"] == placing.__name__)
        return made


def learn(order):
    """Two steps of a chain that runs in a different order than it is registered."""
    model: Any = fs.shard(chain(), wrap=["Block"], transport="fake", shard=2)
    old = []
    for block in model.blocks:
        block.up.register_forward_pre_hook(
            lambda module, *_: old.append(weakref.ref(module.weight.untyped_storage()))
        )
    mean_square(model(**vectors(0, 0), order=order)).backward()
    model.zero_grad()
    with NewSlots(tuple(old)) as made:
        mean_square(model(**vectors(1, 0), order=order)).backward()
    return made


def test_unchanged_rings_are_reused():
    assert learn((3, 1, 2, 0)).num_bytes == 0


def test_rings_are_freed_before_others_are_made():
    made = learn((0, 1, 2, 3, 0, 1, 2, 3))  # each block then has its own ring
    assert made.num_bytes > 0
    assert made.alive == 0


def learn_beside_peers(order, is_alone, monkeypatch):
    """Like `learn`, with offloaded weights in shared memory; returns memory and its release.

    All ranks meet where segments are made; by then, no rank may map an old one.
    """
    made, old, alive, share = [], [], [], shared.share_segment

    def note(*given):
        alive.extend(mapping() is not None for mapping in old)
        segment = share(*given)
        made.append(weakref.ref(segment.mapping))
        return segment

    monkeypatch.setattr(shared, "share_segment", note)
    model: Any = fs.shard(chain(), wrap=["Block"], transport="shared", offload="cpu", poison=True)
    alone = chain()
    CHAIN.work(model, 0, dist.get_rank(), order=order)
    if is_alone:
        with torch.no_grad():  # prefetches units that are never entered
            model.blocks[order[0]](torch.ones(1, WIDTH, dtype=torch.float64))
    old += made[-2:]  # segments of gathered weights and of gradients
    model.zero_grad()
    CHAIN.work(model, 1, dist.get_rank(), order=order)
    assert engine_of(model).runtime.agreed
    backward_alone(lambda rank: CHAIN.loss(alone(**CHAIN.batch(1, rank), order=order)))
    assert unlike_gradients(model, alone) == []
    monkeypatch.undo()
    return [mapping() is not None for mapping in old], alive


@pytest.mark.short(1)
@pytest.mark.parametrize("is_alone", [False, True])
@on_ranks(2)
def test_slots_in_shared_memory_are_reused_or_freed_first(is_alone):
    patches = pytest.MonkeyPatch()
    assert learn_beside_peers((3, 1, 2, 0), is_alone, patches) == ([True, True], [])
    kept, alive = learn_beside_peers((0, 1, 2, 3, 0, 1, 2, 3), is_alone, patches)
    assert kept == [False, False]
    assert len(alive) > 0
    assert not any(alive)


# ---- blocks skipped on one rank ------------------------------------------------------------------

SKIPS = {  # blocks that the last rank calls, by step; other ranks call all
    "the first": {0: (1, 2, 3), 1: (1, 2, 3), 2: ALL},
    "one inside, from the second step on": {0: ALL, 1: (0, 2, 3), 2: (0, 1, 3)},
    "two inside": {0: (0, 3), 1: ALL, 2: (0, 3)},
    "the last": {0: (0, 1, 2), 1: (0, 1, 2), 2: ALL},
    "the last two, from the second step on": {0: ALL, 1: (0, 1), 2: (0, 1)},
    "all but the second": {0: (1,), 1: (1,), 2: (1,)},
    "all, from the second step on": {0: ALL, 1: (), 2: ALL},
}
FEW_SKIPS = ("two inside", "all, from the second step on")


def skipping(model, step, rank, name, world_size):
    order = SKIPS[name][step] if rank == world_size - 1 else ALL
    return CHAIN.work(model, step, rank, order=order)


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    marked(
        itertools.product(SKIPS, STRATEGIES, (2, 3)),
        lambda name, strategy, ranks: (
            ranks == 2 and (strategy == "full_shard" or name in FEW_SKIPS)
        ),
    ),
)
@on_ranks("world_size", timeout=60)
def test_blocks_skipped_on_one_rank_cause_no_hang_and_no_missed_reduction(name, strategy):
    work = partial(skipping, name=name, world_size=dist.get_world_size())
    for settings in prefetching(strategy, FEW_DEPTHS):
        assert_parity(chain, work, settings, kinds=("adamw",))


# ---- an order traced from a sample ---------------------------------------------------------------


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_an_order_traced_from_a_sample_is_run_from_the_first_step():
    """The first step's events are those of the plan."""
    for order in ORDERS.values():
        model = chain(4, order)
        fs.shard(model, sample=(torch.zeros(5, 12, dtype=torch.float64),), poison=True)
        CHAIN.work(model, 0, dist.get_rank())
        assert_planned_events(model, 0)


@pytest.mark.short(1)
@pytest.mark.parametrize("name", SKIPS)
@on_ranks(2, timeout=40)
def test_blocks_skipped_on_one_rank_are_gathered_from_host_and_disk(name, tmp_path):
    """A rank that skips a unit does not copy it, and must not block its peers."""
    work = partial(skipping, name=name, world_size=2)
    kinds = ("parameters", "gradients", "optimizer")
    on_disk = {**dict.fromkeys(kinds, "nvme"), "folder": str(tmp_path)}
    for settings, offload in itertools.product(
        prefetching("full_shard", FEW_DEPTHS), ("cpu", on_disk)
    ):
        offloaded = {**settings, "transport": "shared", "offload": offload}
        assert_parity(chain, work, offloaded, kinds=("sgd",))
