"""Operations on full models: generate, replicas, unusual parameters."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine import engine
from fullshard.errors import EngineError
from support.models import CASES, Chain, perturbed, vectors
from support.ranks import on_ranks


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_generate_gives_the_results_of_the_unsharded_model(strategy):
    """Ranks generate from prompts of different lengths between training steps."""
    case, rank = CASES["tied llama"], dist.get_rank()
    alone = case.build()
    model = fs.shard(case.build(), strategy=strategy, poison=True)
    prompt = torch.arange(1, 5)[None]
    for _ in range(2):
        wanted = alone.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        found = model.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        assert torch.equal(found, wanted)
        with fs.unsharded(model, writeback=False), torch.no_grad():
            if rank == 0:  # nothing is gathered inside, so one rank may generate alone
                again = model.generate(prompt, max_new_tokens=5, do_sample=False)
                assert torch.equal(again, wanted)
        case.work(model.train(), 0, rank)
        model.zero_grad()


def train_on(model, steps):
    for step in steps:
        model(vectors(step, dist.get_rank())["x"].float()).square().mean().backward()


@on_ranks(2)
def test_replicas_that_drift_apart_are_named():
    """Trained weights are compared at each step, all others at the next check."""
    model = perturbed(Chain(3))
    model.blocks[1].requires_grad_(False)
    fs.shard(model, strategy="no_shard")
    train_on(model, range(2))
    if dist.get_rank() == 1:
        next(model.blocks[1].parameters()).to_local().add_(1e-3)
    said = r"blocks.1: expected the same weights on all replicas"
    with patch.object(engine, "STEPS", 4), pytest.raises(EngineError, match=said):
        train_on(model, range(2, 10))


@on_ranks(2)
def test_one_rank_alone_may_evaluate_a_replicated_model():
    """Without gathers, one rank alone may evaluate at any step."""
    model = fs.shard(perturbed(Chain(3)), strategy="no_shard")
    for step in range(2):
        train_on(model, [step])
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(vectors(step, 0)["x"].float())
        dist.barrier()


def test_an_ignored_parameter_may_have_any_dtype():
    model = perturbed(Chain(3))
    model.table = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    fs.shard(model, ignore=["table"])
    assert model.table.dtype is torch.int8
