"""Updates in backward begin where whole states, counts and older graphs are left by others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from fullshard.engine.optimizers import steps_by_itself
from support.models import chain, mean_square, vectors
from support.parity import whole_params
from support.reference import difference, make_optimizer

TOLERANCE = 1e-12


def step_alone(model: nn.Module, optimizer: Any, step: int) -> None:
    """One process on every rank's batch."""
    for rank in range(dist.get_world_size()):
        (mean_square(model(**vectors(step, rank))) / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()


def from_whole_states() -> list[float]:
    """How far weights are where an unsharded run's states are loaded before the first step."""
    one, model = chain(), chain()
    theirs = make_optimizer("adamw", one.parameters())
    step_alone(one, theirs, 0)
    model.load_state_dict(one.state_dict())
    fs.shard(model, wrap=["Block"])
    ours = make_optimizer("adamw", model.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step_alone(one, theirs, 1)
    with fs.step_in_backward(model, ours):
        mean_square(model(**vectors(1, dist.get_rank()))).backward()
    found = whole_params(model)
    return [difference(found[name], param.detach()) for name, param in one.named_parameters()]


def test_states_that_were_whole_are_cut_for_all_units(ranks):
    for far in ranks(2)(from_whole_states):
        assert max(far) < TOLERANCE


class CountsOnItself(torch.optim.SGD):
    """Slows down after more steps than are tried."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count > 100:
            self.param_groups[0]["lr"] = 0.0
        return super().step(closure)


class CountsInItsStates(torch.optim.SGD):
    """The same, in a state of no parameter."""

    def step(self, closure: Any = None) -> Any:
        count = self.state.setdefault("all", {"count": 0})
        count["count"] += 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [CountsOnItself, CountsInItsStates])
def test_counts_are_seen_before_they_matter(kind):
    assert not steps_by_itself(kind([nn.Parameter(torch.ones(2))], lr=0.1))
    assert steps_by_itself(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def two_recomputed_graphs(in_backward: bool) -> dict[str, torch.Tensor]:
    """Weights after the backwards of two graphs that are recomputed, each with a step."""

    class Recomputed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model = nn.Sequential(*(Recomputed(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    fs.shard(model, wrap=["Recomputed"], param_dtype="bfloat16", transport="shared")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.linspace(0.1, 0.9, 6, dtype=torch.bfloat16).requires_grad_()
    for loss in [model(x * i).square().sum() for i in (1, 2)]:
        if in_backward:
            with fs.step_in_backward(model, optimizer):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole_params(model)


def test_recomputed_graphs_from_before_an_update_read_the_updated_weights(ranks):
    """As after a step, and in one process."""
    for after, within in zip(
        ranks(2)(two_recomputed_graphs, False), ranks(2)(two_recomputed_graphs, True), strict=True
    ):
        assert all(torch.equal(after[name], within[name]) for name in after)
