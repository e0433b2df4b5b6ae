"""Several backwards per step: deferred, reduced, mixed, and a different number on each rank.

tests/train/test_global_token_mean.py tests `grad_sync` in the loop.
"""

import contextlib
import itertools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.engine.engine import engine_of, is_sharded
from fullshard.planner.schedule import EventKind
from support.grid import STRATEGIES, marked, prefetching
from support.models import CHAIN, chain, mean_square, vectors
from support.parity import (
    assert_parity,
    assert_planned_events,
)
from support.ranks import on_ranks

SLOW = pytest.mark.slow
RANKED = marked(
    itertools.product(STRATEGIES, (1, 2, 3)),
    lambda strategy, ranks: ranks == 2 and strategy != "shard_grad_op",
)


def deferring(model, yes=True, **how):
    """Returns fs.no_sync if the model is sharded and `yes`; a null context otherwise."""
    is_deferred = yes and is_sharded(model)
    return fs.no_sync(model, **how) if is_deferred else contextlib.nullcontext()


def micro_step(model, step, rank, micro):
    return CHAIN.work(model, 10 * step + micro, rank)


# ---- which backwards defer -----------------------------------------------------------------------


def accumulate(model, step, rank, defers):
    """Runs one micro-batch per entry of `defers`; true keeps its gradients on the rank."""
    losses, block = [], contextlib.ExitStack()
    for micro, defer in enumerate(defers):
        before, block = block, contextlib.ExitStack()
        block.enter_context(deferring(model, defer))
        before.close()  # ends after the next begins, as in generators
        losses.append(micro_step(model, step, rank, micro))
    block.close()
    return torch.stack(losses)


PATTERNS = [
    (*first, False)
    for length in (1, 2, 3)
    for first in itertools.product((True, False), repeat=length)
]
WORKS = {pattern: partial(accumulate, defers=pattern) for pattern in PATTERNS}
ALONE = {n: partial(accumulate, defers=(False,) * n) for n in (2, 3, 4)}


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size", timeout=100)
def test_deferred_and_reduced_micro_batches_in_any_order_are_one_process(strategy):
    settings = {"strategy": strategy}
    few = dist.get_world_size() == 2
    for pattern, work in WORKS.items():
        if few and len(pattern) != 3 and pattern != (True, False, True, False):
            continue
        alone = ALONE[len(pattern)]
        assert_parity(chain, work, settings, alone=alone, kinds=("adamw",))


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_accumulation_holds_at_every_prefetch_depth(strategy):
    pattern = (True, True, False)
    for settings in prefetching(strategy):
        assert_parity(chain, WORKS[pattern], settings, alone=ALONE[3], kinds=("sgd",))


# ---- parameters that only a deferred micro-batch used --------------------------------------------


def all_deferred_and_some_reduced(model, step, rank, some):
    """The reducing micro-batch skips blocks that the deferred one used."""
    with deferring(model):
        micro_step(model, step, rank, 0)
    return CHAIN.work(model, 10 * step + 1, rank, order=some)


# Without blocks, the reducing backward reaches only the root's parameters.
SOME = [partial(all_deferred_and_some_reduced, some=some) for some in ((0, 3), ())]


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size")
def test_gradients_of_only_a_deferred_backward_are_reduced_too(strategy):
    for work in SOME:
        assert_parity(chain, work, {"strategy": strategy}, kinds=("adamw",))


# ---- unequal numbers of backwards ----------------------------------------------------------------


def as_many_as_the_rank(model, step, rank, with_dummies):
    """Rank r runs r + 1 deferred micro-batches of three.

    Forwards of sharded parameters are collectives, so every rank runs equally many. If backward
    gathers too, a surplus micro-batch is scaled by zero.
    """
    for micro in range(3):
        if is_sharded(model):
            with fs.no_sync(model):
                loss = CHAIN.loss(model(**CHAIN.batch(10 * step + micro, rank)))
                if micro <= rank:
                    loss.backward()
                elif with_dummies:
                    (0.0 * loss).backward()
        elif micro <= rank:
            micro_step(model, step, rank, micro)
    return micro_step(model, step, rank, 3)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    ("strategy", "with_dummies"),
    [("full_shard", True), ("shard_grad_op", True), ("shard_grad_op", False), ("no_shard", False)],
)
@on_ranks("world_size")
def test_ranks_may_defer_unequal_numbers_of_backwards(strategy, with_dummies):
    work = partial(as_many_as_the_rank, with_dummies=with_dummies)
    assert_parity(chain, work, {"strategy": strategy}, kinds=("adamw",))


def fewer_forwards_too(model, step, rank):
    """If nothing is gathered, a rank may skip whole micro-batches."""
    for micro in range(rank):
        with deferring(model):
            micro_step(model, step, rank, micro)
    return micro_step(model, step, rank, 3)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size", timeout=60)
def test_replicas_may_skip_micro_batches():
    assert_parity(chain, fewer_forwards_too, {"strategy": "no_shard"}, kinds=("adamw",))


# ---- events and memory ---------------------------------------------------------------------------


UNITS = 5  # the root and four blocks


@pytest.mark.parametrize(
    ("defers", "wanted"),
    [
        ((False, False, False), [3 * UNITS, 3 * UNITS, 0, 3]),
        ((True, True, False), [UNITS, UNITS, 2 * UNITS, 1]),
        ((False, True, False), [2 * UNITS, 2 * UNITS, UNITS, 2]),
    ],
)
@on_ranks(2)
def test_a_deferred_backward_reduces_nothing_and_settles_nothing(defers, wanted):
    model = fs.shard(chain(), poison=True)
    engine = engine_of(model)
    for step in range(3):
        engine.recorder.clear()
        accumulate(model, step, dist.get_rank(), defers)
    counts = Counter(event.kind for event in engine.recorder.events())
    kinds = (EventKind.REDUCE, EventKind.ACCUMULATE, EventKind.DEFER, EventKind.SETTLE)
    assert [counts[kind] for kind in kinds] == wanted
    engine.recorder.clear()
    CHAIN.work(model, 9, dist.get_rank())
    assert_planned_events(model, engine.runtime.step - 1)


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("settings", "itemsize"),
    [
        ({"model_dtype": torch.float64}, 8),
        ({"model_dtype": torch.float32}, 4),
        ({"model_dtype": torch.float32, "param_dtype": "bf16", "reduce_dtype": "bf16"}, 4),
        ({"model_dtype": torch.float64, "strategy": "no_shard"}, 8),
    ],
)
@on_ranks(2)
def test_deferred_gradients_are_whole_in_the_accumulate_dtype_and_freed(settings, itemsize):
    """Compares bytes of deferred gradients after each micro-batch of three steps, and the peak."""
    model = fs.shard(chain().to(settings.pop("model_dtype")), poison=True, **settings)
    dtype = next(model.parameters()).dtype
    found = []
    for step in range(3):
        for micro in range(3):
            with deferring(model, micro < 2):
                x = vectors(10 * step + micro, dist.get_rank())["x"].to(dtype)
                mean_square(model(x)).backward()
            row = fs.memory_stats(model)["deferred_gradients"]
            found.append((row["now"], row["peak"]))
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    numel = sum(unit.numel for unit in engine_of(model).plan.units)
    held = itemsize * numel
    assert [now for now, _ in found] == [held, held, 0] * 3
    assert {peak for _, peak in found} == {held}  # the peak does not grow over steps


# ---- only the replicate axis waits ---------------------------------------------------------------


def outer_waits(model, step, rank):
    """The sum over replicas of two micro-batches waits for the third."""
    losses = []
    for micro in range(3):
        with deferring(model, micro < 2, outer_only=True):
            losses.append(micro_step(model, step, rank, micro))
    return torch.stack(losses).sum()


KEPT = []


def outer_waits_beside_kept_gradients(model, step, rank):
    """The caller keeps the last step's gradients, so sums need new memory."""
    losses = outer_waits(model, step, rank)
    KEPT[:] = [param.grad for param in model.parameters()]
    return losses


@on_ranks(2)
def test_sums_wait_for_replicas_while_the_caller_keeps_gradients():
    try:
        settings = {"strategy": "no_shard"}
        assert_parity(CHAIN.build, outer_waits_beside_kept_gradients, settings)
    finally:
        KEPT.clear()


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("transport", "reduction"),
    [
        ("direct", "ordered"),
        ("c10d", "native"),
        pytest.param("direct", "native", marks=SLOW),
        pytest.param("c10d", "ordered", marks=SLOW),
    ],
)
@on_ranks(4, timeout=100)
def test_the_sum_over_replicas_may_wait_alone(transport, reduction):
    settings = {"transport": transport, "reduction": reduction, "replicate": 2}
    settings["strategy"] = "hybrid_shard"
    kinds = ("adamw",) if transport == "direct" else ("sgd",)
    model = assert_parity(CHAIN.build, outer_waits, settings, kinds=kinds)
    ring = engine_of(model).recorder.events(2)
    kinds = Counter(event.kind for event in ring)
    sent = [event.num_bytes for event in ring if event.kind is EventKind.REDUCE]
    assert (kinds[EventKind.DEFER], kinds[EventKind.SETTLE]) == (0, 1)
    assert sum(sent[:UNITS]) < sum(sent[-UNITS:])  # the last one also reduces across replicas
    assert len(sent) == 3 * UNITS
    stats = fs.memory_stats(model)
    shards = stats["gradient_shards"]["now"]
    assert stats["deferred_gradients"] == {"now": 0, "peak": shards}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=SLOW), 2])
@on_ranks("world_size")
def test_nothing_is_lost_where_no_sum_over_replicas_waits():
    for strategy, kinds in (("full_shard", ("adamw",)), ("no_shard", ("sgd",))):
        for mixed in ({}, {"strategies": {"blocks.1": "no_shard"}}):
            assert_parity(CHAIN.build, outer_waits, {"strategy": strategy, **mixed}, kinds=kinds)
