"""Forecasts with a tensor or expert axis: communication, compute, memory."""

from dataclasses import replace

import pytest

from fullshard.outlook.constants import FITTED
from fullshard.outlook.memory import peak_memory
from fullshard.outlook.published import read_workload
from fullshard.outlook.speed import step_times, traffic
from fullshard.outlook.workload import Parallelism, Stage, Workload
from support.rows import LLAMA_8B

EXPERTS = 0.75  # share of the parameters


@pytest.fixture
def run() -> Workload:
    """8 ranks of a host that share one replica of a mixture of experts."""
    found = read_workload({name: str(value) for name, value in LLAMA_8B.items()})
    model = replace(found.model, expert_params=EXPERTS * found.model.num_params, chosen=2)
    return replace(found, model=model, mesh=Parallelism(8))


def on(run: Workload, **axes: int) -> Workload:
    return replace(run, mesh=Parallelism(**axes, is_partial=axes.get("tensor", 1) > 1))


def test_ranks_that_divide_the_experts_gather_only_their_own(run):
    at_once = replace(FITTED, wait_s=0.0)
    alone, spread = (traffic(on(run, shard=8, expert=size), at_once)[0] for size in (1, 8))
    assert spread / alone == pytest.approx(1 - EXPERTS)


def test_without_sharding_each_expert_is_summed_over_its_copies(run):
    run = replace(run, sharding=Stage.NOTHING)
    wide, spread = (on(run, shard=1, replicate=8, expert=size) for size in (1, 8))
    assert 0 < traffic(spread)[3] < traffic(wide)[3]


def test_sending_more_tokens_to_experts_takes_longer(run):
    spread = on(run, shard=8, expert=8)
    more = replace(spread, model=replace(spread.model, chosen=4))
    assert step_times(spread).exposed > 0
    assert step_times(more).step > step_times(spread).step


def test_a_tensor_axis_divides_matmuls_but_not_norms_or_the_head(run):
    cut = on(run, shard=4, tensor=2)
    assert step_times(cut).work < step_times(run).work
    assert peak_memory(cut).block < peak_memory(run).block
    assert peak_memory(cut).logits == peak_memory(run).logits
    whole = replace(run, mesh=Parallelism(4, tensor=2))
    assert step_times(whole).work < step_times(cut).work
    assert peak_memory(whole).kept < peak_memory(cut).kept


def test_sums_over_replicas_hide_behind_backward(run):
    """The engine overlaps them; otherwise they would delay a step by their whole time."""
    one, two = on(run, shard=4), on(run, shard=4, replicate=2)
    across = traffic(two)[2] - traffic(one)[2]
    assert 0 < step_times(two).step - step_times(one).step < 0.5 * across
