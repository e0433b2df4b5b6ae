"""Blocks compiled by torch.compile: one process's numbers, and nothing compiled twice."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters

import fullshard as fs
from support.models import CASES
from support.parity import assert_planned_events, assert_same, finish_step
from support.reference import make_optimizer, train_alone

NUM_STEPS = 4


def in_place(blocks, backend):
    for block in blocks:
        block.compile(backend=backend)


def wrapped(blocks, backend):
    for at, block in enumerate(blocks):
        blocks[at] = torch.compile(block, backend=backend)


HOW = {"in place": in_place, "wrapped": wrapped}


def without_wrapper(tensors):
    return {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}


def check(how, early, strategy, backend):
    with warnings.catch_warnings():  # the compiler asks activations for their .grad
        warnings.simplefilter("ignore", DeprecationWarning)  # of its own imports
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        check_quietly(how, early, strategy, backend)
    torch._dynamo.reset()


def check_quietly(how, early, strategy, backend):
    torch._dynamo.reset()
    case = CASES["chain"]
    model = case.build()
    if early:
        HOW[how](model.blocks, backend)
    fs.shard(model, poison=True, strategy=strategy, wrap="auto")
    if not early:
        HOW[how](model.blocks, backend)
    optimizer = make_optimizer("adamw", model.parameters())
    steps, graphs = [], []
    for step in range(NUM_STEPS):
        loss = case.work(model, step, dist.get_rank())
        done = finish_step(model, optimizer, [loss])
        gradients, params = without_wrapper(done.gradients), without_wrapper(done.params)
        steps.append(replace(done, gradients=gradients, params=params))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[0] == graphs[-1], graphs
    wanted = train_alone(
        case.build, case.work, world_size=dist.get_world_size(), kind="adamw", num_steps=NUM_STEPS
    )
    assert_same(steps, wanted)
    if how == "in place":
        assert_planned_events(model, NUM_STEPS - 1)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks_train_as_in_one_process(ranks, how, early, strategy):
    ranks(2)(check, how, early, strategy, "aot_eager", timeout=100)


@pytest.mark.slow
def test_blocks_compiled_to_machine_code_train_as_in_one_process(ranks):
    ranks(2)(check, "in place", False, "full_shard", "inductor", timeout=300)
