"""A deleted sharded model leaves no memory, hooks, groups or threads behind."""

import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine import shard
from fullshard.engine.engine import engine_of
from fullshard.errors import ShardedTensorError
from support.ranks import on_ranks


def _trained(transport):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fs.shard(model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 16)).sum().backward()
    fs.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return model


@pytest.mark.parametrize("transport", ["direct", "c10d"])
@on_ranks(2)
def test_deleted_model_is_freed_with_its_groups_and_threads(transport):
    threads = []
    for _ in range(3):
        engine = weakref.ref(engine_of(_trained(transport)))
        gc.collect()
        assert engine() is None
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    assert threads[1] == threads[2], threads


def test_deleted_model_is_freed_without_a_process_group():
    engine = weakref.ref(engine_of(_trained("auto")))
    gc.collect()
    assert engine() is None


def test_memory_of_a_deleted_model_is_freed_before_a_new_one_is_mapped(monkeypatch):
    """Otherwise ten calls of `generate` would map ten models."""
    monkeypatch.setattr(shard, "LARGE_BYTES", 2000)
    gc.disable()
    try:
        engine = weakref.ref(engine_of(_trained("auto")))
        fs.shard(nn.Linear(2, 2))
        assert engine() is not None  # a small model does not trigger the search
        fs.shard(nn.Linear(16, 16))
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", ["a hook", "an attribute"])
def test_a_deleted_model_that_refers_to_its_optimizer_is_freed(keeps):
    models = [fs.shard(nn.Linear(4, 4)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [*model.parameters()]} for model in models], lr=0.1)
    if keeps == "a hook":
        models[0].weight.register_post_accumulate_grad_hook(lambda _, kept=optimizer: None)
    else:
        models[0].weight.optimizer = optimizer
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()  # as in torch, a cycle through p.grad is never freed
    freed = [weakref.ref(models[0].weight), weakref.ref(models[1].weight)]
    del optimizer.param_groups[1], models[1], model
    optimizer.step()
    gc.collect()
    assert [weight() is None for weight in freed] == [False, True]
    del optimizer, models
    gc.collect()
    assert freed[0]() is None


def _thawed(*, backward):
    """Its frame refers to the model when the error is raised."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    weight = model[0].weight.requires_grad_(False)
    engine = weakref.ref(engine_of(fs.shard(model)))
    loss = (weight.requires_grad_(True) * 2).sum()
    if backward:
        with contextlib.suppress(ShardedTensorError):
            loss.backward()
            raise AssertionError("no error")
    return engine


@pytest.mark.parametrize("backward", [False, True])
def test_tensors_made_of_an_unfrozen_parameter_keep_no_model_alive(backward):
    engine = _thawed(backward=backward)
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("param_dtype", [None, "bf16"])
def test_a_transport_with_a_reference_to_the_engine_keeps_no_model_alive(param_dtype):
    """Copies of offloaded shards on a device with streams have such a reference."""
    model = fs.shard(nn.Linear(8, 8), param_dtype=param_dtype)
    engine = engine_of(model)
    engine.home.await_reads = lambda engine=engine: None
    model(torch.randn(2, 8)).sum().backward()
    model.zero_grad()
    alive = weakref.ref(engine)
    del model, engine
    gc.collect()
    assert alive() is None
