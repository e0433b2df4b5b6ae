"""Small gradients that no hook tells of are found: also when their order or number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import EngineError
from support.models import perturbed
from support.parity import whole_gradients

WIDTH = 6


class Barred(torch.autograd.Function):
    """Passes x on; its second input gets no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Scales(nn.Module):
    """Vectors that scale x in the order that the caller says; a negative one gets no gradient."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(number))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = x * self.scales[i].tanh() if i >= 0 else Barred.apply(x, self.scales[-i])
        return x


class Hidden:
    """A type that nobody looks into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__slots = (tensor,)

    def tensor(self) -> torch.Tensor:
        return self.__slots[0]


class Model(nn.Module):
    """One unit of vectors between two layers; may hand out a penalty in a type of its own."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = Scales(number)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, order: list[int], *, hide: bool = False) -> Any:
        y = self.head(self.block(self.stem(x), order))
        return Hidden(self.head.bias.square().sum()) if hide else y


def model(number: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(Model(number).double())


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def heard(sharded: nn.Module) -> set[str]:
    """The vectors that call the engine."""
    (unit,) = (unit for unit in engine_of(sharded).units if unit.plan.name == "block")
    quiet = {id(member) for _, member in unit.listening.quiet}
    return {m.piece.name.split(".")[-1] for m in unit.trainees if id(m) not in quiet}


def train(orders: list[list[int]], number: int = 4) -> tuple[list[str], list[set[str]]]:
    """Backward in each order; what differs from one process, and who was heard after each."""
    alone, sharded = model(number), fs.shard(model(number), wrap=["Scales"], poison=True)
    wrong, heards = [], []
    for step, order in enumerate(orders):
        for rank in range(dist.get_world_size()):
            (alone(batch(step, rank), order).square().mean() / dist.get_world_size()).backward()
        sharded(batch(step, dist.get_rank()), order).square().mean().backward()
        heards.append(heard(sharded))
        found = whole_gradients(sharded)
        for name, param in alone.named_parameters():
            a, b = found[name], param.grad
            if (a is None) != (b is None) or (
                a is not None and not torch.allclose(a, b, rtol=1e-12)
            ):
                wrong.append(f"{step} {name}")
        alone.zero_grad()
        sharded.zero_grad()
    return wrong, heards


ALL = {"0", "1", "2", "3"}
CASES = {
    "the same": ([[0, 1, 2, 3]] * 3, [{"0"}] * 3),
    "another order": ([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 2, 0]], [{"0"}, ALL, ALL]),
    "a later last": ([[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3]], [{"0"}, {"0", "1"}, {"0", "1"}]),
    "one is not used": ([[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]], [{"0"}, ALL, ALL]),
    "the last is not used": ([[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]], [{"0"}, ALL, ALL]),
    "one gets nothing": (
        [[0, 1, 2, 3], [0, -1, 2, 3], [0, 1, 2, 3]],
        [{"0"}, {"0", "1"}, {"0", "1"}],
    ),
    "used twice": ([[0, 1, 2, 3], [1, 0, 1, 2, 3], [0, 1, 2, 3]], [{"0"}, {"0", "1"}, {"0", "1"}]),
    "never whole": ([[0, 1], [0, 1, 2], [0, 1, 2, 3]], [ALL] * 3),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_found_in_any_order(ranks, name):
    orders, wanted = CASES[name]
    for wrong, heards in ranks(2)(train, orders):
        assert not wrong
        assert heards == wanted


def test_no_more_than_64_small_gradients_wait(ranks):
    order = list(range(150))
    for wrong, heards in ranks(2)(train, [order] * 2, 150):
        assert not wrong
        assert heards == [{"0", str(149 - 63), str(149 - 127)}] * 2


def unseen() -> str:
    sharded = fs.shard(model(), wrap=["Scales"], poison=True)
    order = [0, 1, 2, 3]
    sharded(batch(0, 0), order).sum().backward()
    sharded(batch(0, 0), order, hide=True).tensor().backward()
    try:
        sharded(batch(0, 0), order)
    except EngineError as error:
        return str(error)
    return ""


def test_a_gradient_that_nobody_saw_is_an_error(ranks):
    for said in ranks(2)(unseen):
        assert "head.bias" in said
        assert "Hidden" not in said  # its type is not known by then
        assert "Return tensors" in said
