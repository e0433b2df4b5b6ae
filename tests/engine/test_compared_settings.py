"""Optimizer settings that ranks compare, and states that are not settings."""

import torch
import torch.distributed as dist
from torch import nn, optim

import fullshard as fs
from support.ranks import on_ranks
from support.scripts import error_of, sharded_run

ODD = (2, 1)  # the first step in which a rank differs, and the rank
NO_ERROR = "NO ERROR: NoneType"


class Plain(optim.Optimizer):
    """Stores plain states in the shape of a rank's shard."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["m"] = state.get("m", torch.zeros(param.shape)).mul(0.9).add(param.grad)
                param.add_(state["m"], alpha=-group["lr"])


@on_ranks(2)
def test_a_state_of_one_element_is_no_setting():
    """One rank has 64 of 65 elements and the other one."""
    model = nn.Module()
    model.weight, model.forward = nn.Parameter(torch.ones(65)), lambda x: model.weight * x
    fs.shard(model)
    optimizer = Plain(model.parameters())

    def steps():
        for _ in range(4):
            model(torch.linspace(0.1, 1, 65)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert error_of(steps) == NO_ERROR


def steps_apart(keeps):
    """Steps two optimizers in turn on 4 ranks; rank 1's rate differs if they have all shards."""
    run, model = sharded_run(transport="direct")
    params = list(model.parameters())
    parts = ([param for param in params[at::2] if keeps(param)] for at in range(2))
    each = [optim.SGD(part, lr=0.1) for part in parts]

    def steps():
        for step in range(5):
            run.loss(model, step).backward()
            if step >= ODD[0] and run.rank == ODD[1] and keeps is keeps_all:
                each[step % 2].param_groups[0]["lr"] = 0.2
            each[step % 2].step()
            model.zero_grad()

    return error_of(steps)


def keeps_all(_param):
    return True


def keeps_elements(param):
    return param.numel() > 0


def test_optimizers_in_turn_are_compared_unless_empty_shards_are_left_out(ranks):
    for text in ranks(4)(steps_apart, keeps_all):
        assert "with the same numbers on every rank (lr, " in text
    assert ranks(4)(steps_apart, keeps_elements) == [NO_ERROR] * 4


@on_ranks(2)
def test_settings_are_compared_with_any_groups():
    """Rank 0 has two groups, rank 1 has one; no two ranks share a parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fs.shard(model)
    params, is_odd = list(model.parameters()), dist.get_rank() == 1
    groups = [params] if is_odd else [params[:2], params[2:]]
    optimizer = optim.SGD([{"params": one, "lr": 0.1 + is_odd} for one in groups])

    def steps():
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "with the same numbers on every rank (lr, " in error_of(steps)
