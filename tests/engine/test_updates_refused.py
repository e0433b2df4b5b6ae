"""Programs that would be wrong where units are updated inside of backward are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import EngineError
from support.models import chain, mean_square, vectors


class Counting(torch.optim.SGD):
    """Counts its steps where its settings are."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Slowing(torch.optim.SGD):
    """Counts its steps on itself, and slows down."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


def train(model: nn.Module, optimizer: Any) -> None:
    """A step."""
    loss = mean_square(model(**vectors(0, dist.get_rank())))
    with fs.step_in_backward(model, optimizer):
        loss.backward()


def clips(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer)
    fs.clip_grad_norm_(model, 1.0)


def older_graph(model: nn.Module, optimizer: Any) -> None:
    losses = [mean_square(model(**vectors(i, dist.get_rank()))) for i in range(2)]
    with fs.step_in_backward(model, optimizer):
        losses[1].backward()
        losses[0].backward()


def counts(model: nn.Module, _: Any) -> None:
    train(model, Counting(model.parameters(), lr=0.1))


def slows(model: nn.Module, _: Any) -> None:
    train(model, Slowing(model.parameters(), lr=0.1))


def owned(model: nn.Module, _: Any) -> None:
    train(model, fs.owned(model, partial(torch.optim.SGD, lr=0.1)))


def no_optimizer(model: nn.Module, _: Any) -> None:
    train(model, None)


def hook_on_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: None)
    train(model, optimizer)


def hook_on_gradient(model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    train(model, optimizer)


def nested(model: nn.Module, optimizer: Any) -> None:
    with fs.step_in_backward(model, optimizer), fs.step_in_backward(model, optimizer):
        pass


def hook_inside(model: nn.Module, optimizer: Any) -> None:
    loss = mean_square(model(**vectors(0, dist.get_rank())))
    with fs.step_in_backward(model, optimizer):
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
        loss.backward()


def of_another_model(model: nn.Module, _: Any) -> None:
    train(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def inside_of_no_sync(model: nn.Module, optimizer: Any) -> None:
    with fs.no_sync(model):
        train(model, optimizer)


def nothing(model: nn.Module, optimizer: Any) -> None:
    with fs.step_in_backward(model, optimizer) as update:
        pass
    update.grad_norm  # noqa: B018


REFUSED = {
    clips: "Its grad_norm says their norm",
    older_graph: "modified by an inplace operation",
    counts: "of Counting on two tensors together and one after the other differ",
    slows: "of Slowing on two tensors together and one after the other differ",
    owned: "got one of fs.owned",
    no_optimizer: "expected a torch.optim.Optimizer; got NoneType",
    hook_on_step: "expected an optimizer without hooks on its steps",
    hook_on_gradient: "expected no hooks on gradients",
    hook_inside: "expected no hooks on gradients",
    of_another_model: "expected an optimizer of the model's parameters",
    inside_of_no_sync: "got it inside of fs.no_sync",
    nested: "one context at a time",
    nothing: "expected a backward inside",
}


def said_of(program: Any) -> str:
    """What is said of a program that would be wrong."""
    model = fs.shard(chain())
    try:
        program(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except (EngineError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_would_be_wrong_is_refused(ranks, program):
    for said in ranks(2)(said_of, program, timeout=60):
        assert REFUSED[program] in said
