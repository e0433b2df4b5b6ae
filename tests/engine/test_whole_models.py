"""What people do with whole models: generate, several models at once, disjoint experts, copies."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import EngineError, ShardedTensorError
from support.models import CASES, Chain, perturbed, vectors
from support.parity import assert_parity, whole_gradients, whole_params


def check_generate(strategy):
    """Ranks generate from prompts of their own length between training steps."""
    case, rank = CASES["tied llama"], dist.get_rank()
    alone = case.build()
    model = fs.shard(case.build(), strategy=strategy, poison=True)
    prompt = torch.arange(1, 5)[None]
    for _ in range(2):
        wanted = alone.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        found = model.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        assert torch.equal(found, wanted)
        case.work(model.train(), 0, rank)
        model.zero_grad()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_generate_gives_what_the_whole_model_gives(ranks, strategy):
    ranks(2)(check_generate, strategy)


def distill(student, teacher, step, rank):
    """A step of a student whose target is a teacher's output."""
    x = vectors(step, rank)["x"]
    with torch.no_grad():
        target = teacher(x)
    loss = nn.functional.mse_loss(student(x), target)
    loss.backward()
    return loss.detach()


def check_two_models():
    rank, size = dist.get_rank(), dist.get_world_size()
    frozen = CASES["chain"].build()
    teacher = fs.shard(perturbed(Chain(5).double(), seed=5), poison=True, strategy="full_shard")
    torch.manual_seed(0)
    whole_teacher = perturbed(Chain(5).double(), seed=5)
    whole_teacher.load_state_dict(fs.full_state_dict(teacher, rank0_only=False))
    student = fs.shard(CASES["chain"].build(), poison=True)
    losses = [distill(frozen, whole_teacher, 0, other) for other in range(size)]
    ours = distill(student, teacher, 0, rank)
    assert abs(float(ours - losses[rank])) < 1e-12
    found = whole_gradients(student)
    for name, param in frozen.named_parameters():
        assert torch.allclose(found[name], param.grad / size, rtol=0, atol=1e-12), name
    assert all(param.grad is None for param in teacher.parameters())


def test_a_teacher_and_a_student_have_slots_of_their_own(ranks):
    ranks(2)(check_two_models)


class Routed(nn.Module):
    """Experts of which each rank uses its own: rank r only expert r."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x, expert):
        return self.experts[expert](self.stem(x))


def build_routed():
    torch.manual_seed(0)
    return perturbed(Routed().double())


def route(model, step, rank):
    loss = model(vectors(step, rank)["x"], rank).square().mean()
    loss.backward()
    return loss.detach()


def check_routed(settings):
    assert_parity(build_routed, route, settings)


@pytest.mark.parametrize("wrap", ["auto", "none", ["Linear"]])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_ranks_may_use_disjoint_experts(ranks, strategy, wrap):
    ranks(3)(check_routed, {"strategy": strategy, "wrap": wrap})


def test_a_copy_of_a_sharded_model_is_refused_and_its_shards_may_be_averaged():
    model = fs.shard(perturbed(Chain(3)))
    with pytest.raises(ShardedTensorError, match="deepcopy of a sharded model"):
        copy.deepcopy(model)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        average[name].lerp_(param.detach(), 0.5)
    assert all(type(value).__name__ == "ShardedTensor" for value in average.values())


def test_a_frozen_parameter_cannot_be_thawed_without_memory_for_it():
    model = perturbed(Chain(3))
    model.stem.weight.requires_grad_(False)
    fs.shard(model)
    model.stem.weight.requires_grad_(True)
    with pytest.raises(EngineError, match=r"stem.weight: expected requires_grad=False"):
        model(torch.randn(2, 12))


def train_on(model, steps):
    for step in steps:
        model(vectors(step, dist.get_rank())["x"].float()).square().mean().backward()


def check_replicas_that_drift():
    """One replica's own update is found at the next look."""
    model = fs.shard(perturbed(Chain(3)), strategy="no_shard")
    train_on(model, range(2))
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.blocks[1].parameters()).add_(1e-3)
    with pytest.raises(EngineError, match=r"blocks.1: expected the same weights on all replicas"):
        train_on(model, range(2, 110))


def test_replicas_that_drift_apart_are_named(ranks):
    ranks(2)(check_replicas_that_drift)


def check_hybrid_replicas():
    model = fs.shard(perturbed(Chain(3)), strategy="hybrid_shard", replicate=2)
    whole_params(model)
    train_on(model, range(3))
    return True


def test_equal_replicas_pass(ranks):
    assert all(ranks(4)(check_hybrid_replicas))


def check_one_rank_evaluates():
    """Where nothing is gathered, a rank alone may evaluate at any step."""
    model = fs.shard(perturbed(Chain(3)), strategy="no_shard")
    for step in range(2):
        train_on(model, [step])
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(vectors(step, 0)["x"].float())
        dist.barrier()


def test_a_rank_alone_may_evaluate_a_replicated_model(ranks):
    ranks(2)(check_one_rank_evaluates)


def test_an_ignored_parameter_may_have_any_dtype():
    model = perturbed(Chain(3))
    model.table = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    fs.shard(model, ignore=["table"])
    assert model.table.dtype is torch.int8
