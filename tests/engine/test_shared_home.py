"""Ranks that map one copy of the weights: order of reads and writes, cost, failures."""

import io
import time

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.bench.measurement import proportional_bytes, return_free_memory
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from fullshard.planner.schedule import EventKind
from support.models import Chain, perturbed, vectors
from support.parity import whole_gradients, whole_params
from support.ranks import on_ranks

SHARED = {"transport": "shared", "poison": True}
HOLD_S = 0.4


def chain(**settings):
    return fs.shard(perturbed(Chain(3).double()), **{**SHARED, **settings})


# ---- sharing -------------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_of_one_host_share_and_gather_nothing():
    model = fs.shard(perturbed(Chain(3)))
    engine = engine_of(model)
    kinds = {event.kind for event in engine.plan.events}
    assert engine.transport.name == "shared"
    assert EventKind.GATHER not in kinds
    assert EventKind.PUBLISH in kinds


@on_ranks(3)
def test_every_rank_maps_all_parts():
    """Every rank reads writes of any rank."""
    model = chain()
    engine, rank = engine_of(model), dist.get_rank()
    group = engine.units[1].groups[0]
    group.master.fill_(float(rank + 1))
    dist.barrier()
    assert group.full.unique().tolist() == [1.0, 2.0, 3.0]


@on_ranks(2)
def test_the_memory_of_a_rank_is_its_share():
    """Bytes of a 64 MiB model by memory_stats, by plan, and as Linux counts shared pages."""
    return_free_memory()
    dist.barrier()
    before = proportional_bytes()
    dist.barrier()
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    fs.shard(model, wrap=["Linear"], transport="shared", param_dtype="bf16")
    model(torch.ones(1, 2048)).sum().backward()  # every page is written once
    return_free_memory()
    dist.barrier()
    held = proportional_bytes() - before
    dist.barrier()
    planned, whole = (
        {row["name"]: row["bytes"] for row in engine_of(model).plan.rows()},
        4 * 2048**2,
    )
    assert planned["parameter shards"] == whole * 4 // 2
    assert planned["shared weights to compute with"] == whole * 2 // 2
    assert planned["slots"] == 0
    expected = sum(planned.values()) - planned["optimizer (AdamW)"]
    assert fs.memory_stats(model)["total"]["now"] == expected
    assert abs(held - expected) < 0.1 * expected


@on_ranks(2)
def test_a_shared_transport_that_is_impossible_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="transport: shared expects a shard axis of several"):
        fs.shard(Chain(2), transport="shared", strategy="no_shard")


# ---- order of reads and writes -------------------------------------------------------------------


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks(2)
def test_a_slot_of_offloaded_weights_waits_for_peers_that_still_copy_it(slow):
    """One rank enters each unit late, when the other could have refilled the slots."""
    model, x = perturbed(Chain(12).double()), vectors(0, 0)["x"]
    wanted = model(x)
    prefetch = {"forward_prefetch": 10 * slow}  # more gathers than slots
    chained = fs.shard(model, offload="cpu", transport="shared", poison=True, **prefetch)
    if dist.get_rank() == slow:
        for block in model.blocks:
            block.register_forward_hook(lambda *_: time.sleep(0.02))
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(chained(x), wanted)


def write_while_another_reads(grad):
    """Rank 0 is slow in its forward; rank 1 writes as soon as its forward ends."""
    model, x = chain(), vectors(0, 0)["x"]
    with torch.no_grad():
        wanted = model(x)
    held = []

    def hold(*_):
        time.sleep(HOLD_S)
        held.append(time.monotonic())  # the same clock on both ranks

    if dist.get_rank() == 0:
        model.blocks[0].register_forward_pre_hook(hold)
    with torch.set_grad_enabled(grad):
        found = model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    written = time.monotonic()
    with torch.no_grad():
        after = model(x)
    return torch.equal(found, wanted), held, written, bool(after.any())


@pytest.mark.short(1)
@pytest.mark.parametrize("grad", [False, True])
def test_a_write_waits_until_no_rank_reads(ranks, grad):
    (first, held, _, after), (second, _, written, _) = ranks(2)(write_while_another_reads, grad)
    assert first
    assert second
    assert written > held[0]
    assert not after


def write_to_two_models_while_another_reads():
    """Rank 0 is slow in the second model; rank 1 steps one optimizer over both."""
    models, x = [chain(), chain()], vectors(0, 0)["x"]
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=0.1, fused=True)
    sum(model(x).square().mean() for model in models).backward()
    if dist.get_rank() == 0:
        models[1].blocks[0].register_forward_pre_hook(lambda *_: time.sleep(HOLD_S))
    with torch.no_grad():
        found = models[1](x)
    optimizer.step()
    return found


def test_a_write_into_two_models_waits_for_the_readers_of_each(ranks):
    first, second = ranks(2)(write_to_two_models_while_another_reads)
    assert torch.equal(first, second)


def differentiate_while_another_writes(before):
    """Rank 0 is slow in a backward without reductions; rank 1 writes when its own ends."""
    model, x = chain(), vectors(0, 0)["x"].requires_grad_()
    scores = model(x)
    if dist.get_rank() == 0:
        scores.register_hook(lambda _: time.sleep(HOLD_S))
    if "retained" in before:
        scores.square().mean().backward(retain_graph=True)
    if "another" in before:
        model(x).square().mean().backward()
    if "evaluation" in before:
        with torch.no_grad():
            model(x)
    (gradient,) = torch.autograd.grad(scores.sum(), x)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    return gradient


@pytest.mark.short(2)
@pytest.mark.parametrize("before", ["retained, another", "evaluation", "retained", "another"])
def test_a_write_waits_for_a_backward_of_an_older_graph(ranks, before):
    first, second = ranks(2)(differentiate_while_another_writes, before)
    assert torch.equal(first, second)


@pytest.mark.short(1)
@pytest.mark.parametrize("part", ["model", "unit"])
@on_ranks(2)
def test_a_forward_waits_until_every_rank_has_written(part):
    """Rank 1 writes its part, the last layers, slowly; rank 0 starts in the meantime."""
    model, x = chain(), vectors(0, 0)["x"]
    if dist.get_rank() == 1:
        time.sleep(HOLD_S)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
        found = model(x) if part == "model" else model.blocks[0](x) - x
    assert not found.any()


# ---- gradients outside of slots ------------------------------------------------------------------


def deferred(transport):
    """Micro-batches under no_sync accumulate outside of the slots."""
    torch.manual_seed(0)
    model = fs.shard(perturbed(Chain(4).double()), transport=transport, poison=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with fs.no_sync(model):
            model(vectors(step, dist.get_rank())["x"]).square().mean().backward()
        model(vectors(step, dist.get_rank())["x"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_deferred_gradients_go_through_the_overflow_with_the_same_bits():
    ours, theirs = deferred("shared"), deferred("direct")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# ---- faults found in a review --------------------------------------------------------------------


def swapped_for_an_evaluation(settings):
    """A forward, an evaluation with swapped weights, the old weights, and the backward."""
    torch.manual_seed(0)
    model = fs.shard(perturbed(Chain(3).double()), poison=True, **settings)
    x, params = vectors(0, 0)["x"], list(model.parameters())
    loss = model(x).square().mean()
    kept = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.data.mul_(2)
        model(x)
        if dist.get_rank() == 1:
            time.sleep(HOLD_S)
        for param, value in zip(params, kept, strict=True):
            param.data.copy_(value)
    loss.backward()
    return whole_gradients(model)


@pytest.mark.short(1)
@pytest.mark.parametrize("dtype", ["bf16", None])
@on_ranks(2)
def test_a_backward_sees_writes_since_its_forward(dtype):
    settings = {"param_dtype": dtype} if dtype else {}
    ours = swapped_for_an_evaluation({"transport": "shared", **settings})
    theirs = swapped_for_an_evaluation({"transport": "direct", **settings})
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@on_ranks(2)
def test_every_way_to_write_waits_and_copies_do_not():
    """Covers lists that begin with a plain tensor, and keyword arguments."""
    model, x = chain(ignore=["head.bias"]), vectors(0, 0)["x"]
    home, waits = engine_of(model).home, []
    real = home.before_write
    home.before_write = lambda: waits.append(1) or real()
    params = sorted(model.parameters(), key=lambda p: hasattr(p, "record"))
    assert not hasattr(params[0], "record")
    model(x)
    with torch.no_grad():
        torch._foreach_mul_(params, 1.0)
        torch.nn.init.constant_(params[1], 0.5)
        found = len(waits)
        params[1].detach().clone().abs_()  # private memory: no rank waits
        params[1].data.mul_(1.0)
    assert (found, len(waits)) == (2, 3)


@on_ranks(2)
def test_saving_a_part_does_not_save_the_segment():
    file = io.BytesIO()
    torch.save(chain().head.bias.to_local(), file)
    assert len(file.getvalue()) < 10_000
