"""The user's view of a sharded model: names, counts, hooks, memory."""

import gc
import inspect
import itertools
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import get_rank as rank

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import EngineError
from support.grid import STRATEGIES, marked
from support.ranks import on_ranks
from support.scripts import Run, Tiny, compare, error_of, sharded_run


def test_the_public_names_and_their_arguments_are_these(snapshot):
    shown = {}
    for name in sorted(fs.__all__):
        value = getattr(fs, name)
        is_function = inspect.isfunction(value)
        shown[name] = str(inspect.signature(value)) if is_function else type(value).__name__
    assert shown == snapshot


# ---- names and identity -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_names_order_and_identity_of_parameters_never_change(strategy):
    run = Run(torch.distributed.get_world_size(), rank())
    model, twin = run.model(tied=True), run.model(tied=True)
    before = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    assert run.shard(model, strategy=strategy) is model
    assert type(model) is Tiny
    assert list(model.state_dict()) == list(twin.state_dict())
    for _ in range(2):
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert model.head.weight is model.embed.weight is before["embed.weight"]
        assert all(value is buffers[name] for name, value in model.named_buffers())
        run.loss(model, 0).backward()
    assert fs.num_parameters(model) == fs.num_parameters(twin)
    assert fs.num_parameters(twin) == sum(p.numel() for p in twin.parameters())
    cut = 0
    for (name, param), whole in zip(before.items(), twin.parameters(), strict=True):
        place = fs.sharding(param)
        assert (place.name, place.shape) == (name, tuple(whole.shape))
        assert param.ndim == max(whole.ndim, 0 if strategy == "no_shard" else 1)
        assert param.numel() == place.stop - place.start
        assert param.requires_grad is whole.requires_grad
        assert (param.dtype, param.device) == (whole.dtype, whole.device)
        mine = whole.detach().reshape(-1)[place.start : place.stop]
        assert torch.equal(param.to_local().reshape(-1), mine)
        assert torch.equal(param.full_tensor(), whole)
        cut += 0 < param.numel() < whole.numel()
    assert cut == (0 if strategy == "no_shard" else 3)  # one matrix per block: the tests do shard
    assert fs.sharding(before["blocks.1.up.weight"]).unit == "blocks.1"


# ---- deferred gradients -----------------------------------------------------------------------


def grads_by_name(run, model):
    return {
        n: p.grad if p.grad is None or not run.sharded else p.grad.full_tensor()
        for n, p in model.named_parameters()
    }


def deferred(run):
    """Nested no_sync, an exception inside, and a backward outside that reduces everything."""
    model = run.shard(run.model())
    shown = []
    no_sync = partial(fs.no_sync, model) if run.sharded else partial(torch.enable_grad)
    with no_sync():
        run.loss(model, 0).backward()
        with no_sync():
            run.loss(model, 1).backward()
        run.loss(model, 2).backward()
        if run.sharded:
            shown = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(shown) > 1
    with pytest.raises(ZeroDivisionError), no_sync():
        raise ZeroDivisionError
    run.loss(model, 3).backward()
    for grad in shown:
        with pytest.raises(EngineError, match="no_sync"):
            grad.sum()
    first = {n: g if g is None else g.clone() for n, g in grads_by_name(run, model).items()}
    run.loss(model, 4).backward()
    return [first, grads_by_name(run, model)]


def test_no_sync_nests_and_the_next_backward_reduces_everything(ranks):
    ranks(2)(compare, deferred)


# ---- hooks ------------------------------------------------------------------------------------


def hooks(run):
    """Post-accumulate hooks registered before and after sharding, removed by their handles."""
    model = run.model()
    seen: list[Any] = []
    given: list[nn.Parameter] = []

    def see(name, param):
        grad = param.grad.full_tensor() if run.sharded else param.grad
        given.append(param)
        seen.append((name, tuple(grad.shape), grad.clone()))

    early = model.head.weight.register_post_accumulate_grad_hook(partial(see, "early"))
    model.unused.register_post_accumulate_grad_hook(partial(see, "never"))
    run.shard(model)
    late = model.head.weight.register_post_accumulate_grad_hook(partial(see, "late"))
    run.loss(model, 0).backward()
    early.remove()
    run.loss(model, 1).backward()  # adds to the first gradient
    if run.sharded:
        with fs.no_sync(model):  # an unreduced gradient is no gradient yet
            run.loss(model, 2).backward()
    model.zero_grad()
    late.remove()
    run.loss(model, 2).backward()
    names = [name for name, *_ in seen]
    assert names == ["early", "late", "late"]
    assert all(param is model.head.weight for param in given)
    return run.result(model, seen=seen)


def test_post_accumulate_hooks_see_the_reduced_gradient(ranks):
    ranks(2)(compare, hooks)


# ---- memory -----------------------------------------------------------------------------------


def live_bytes():
    """Returns bytes of all storages of live tensors, each counted once."""
    time.sleep(0.1)  # gloo's thread frees the last collective's tensor a little later
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        kind = type(thing)  # other tests of this process may have left tensors of the compiler
        if issubclass(kind, torch.Tensor) and not thing.is_meta and kind is not FakeTensor:
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory(strategy, dtype):
    """Returns memory_stats, the bytes in this process, and the planned bytes.

    Without a shared home, in which a tensor's storage covers all ranks (see test_shared_home.py).
    """
    run = Run(torch.distributed.get_world_size(), rank())
    live_bytes()
    before = live_bytes()
    model = run.model()
    whole = live_bytes() - before
    run.shard(model, strategy=strategy, param_dtype=dtype, transport="direct")
    grown = [live_bytes() - before]
    stats = [fs.memory_stats(model)]
    for step in range(0 if dtype else 2):
        model.zero_grad()
        run.loss(model, step).backward()
    grown.append(live_bytes() - before)
    stats.append(fs.memory_stats(model))
    planned = {row["name"].replace(" ", "_"): row["bytes"] for row in engine_of(model).plan.rows()}
    return {"whole": whole, "grown": grown, "stats": stats, "planned": planned}


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    marked(
        itertools.product(STRATEGIES, [None, "float32"]),
        lambda strategy, dtype: not (strategy == "shard_grad_op" and dtype),
    ),
)
def test_memory_stats_equal_live_bytes_and_the_plan(ranks, strategy, dtype):
    numel = sum(p.numel() for p in Tiny().parameters())
    for found in ranks(2)(memory, strategy, dtype):
        start, stats = found["stats"]
        norms = 0 if dtype else 8 * len(list(Tiny().parameters()))  # one square per parameter
        kinds = {kind: row for kind, row in stats.items() if kind != "total"}
        assert stats["total"]["now"] == sum(row["now"] for row in kinds.values())
        assert found["grown"] == [start["total"]["now"], stats["total"]["now"] + norms]
        planned = found["planned"]
        for kind, row in kinds.items():
            if kind == "communication_buffers":  # allocated at first use
                assert (not dtype) <= row["now"] <= planned[kind]
            else:
                assert row["now"] == planned.get(kind, 0), kind
        assert planned.keys() - kinds.keys() == {"optimizer_(AdamW)"}
        parts = 1 if strategy == "no_shard" else 2
        shards = stats["parameter_shards"]["now"]
        padding = 63 * len(list(Tiny().parameters())) + 4 * 64 * parts  # at most two of four units
        assert 8 * numel / parts <= shards <= 8 * (numel + padding) / parts
        assert stats["gradient_shards"]["now"] == shards
        assert math.isclose(found["whole"], 8 * numel, rel_tol=0.02)


def _train_and_drop():
    run, model = sharded_run()
    optimizer = torch.optim.AdamW(model.parameters())
    run.loss(model, 0).backward()
    optimizer.step()


@on_ranks(2)
def test_a_dropped_model_leaves_nothing_behind():
    """Compares bytes before and after a model was sharded, trained and dropped."""
    _train_and_drop()
    before = live_bytes()
    _train_and_drop()
    assert live_bytes() - before == 0


@on_ranks(2)
def test_the_one_process_wide_hook_goes_with_the_last_model():
    from torch.optim.optimizer import _foreach_supported_types
    from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks

    gc.collect()
    run = Run(2, rank())
    first, second = run.shard(run.model()), run.shard(run.model())
    alive = len({*pre_hooks, *post_hooks})
    del first
    gc.collect()
    assert len({*pre_hooks, *post_hooks}) == alive
    assert ShardedParameter in _foreach_supported_types
    del second
    gc.collect()
    assert ShardedParameter not in _foreach_supported_types
    assert (alive, len({*pre_hooks, *post_hooks})) == (2, 0)


def test_untyped_errors_are_shown_in_failures_of_tests():
    assert error_of(lambda: [].pop()) == "UNTYPED IndexError: pop from empty list"
    assert error_of(lambda: None) == "NO ERROR: NoneType"
