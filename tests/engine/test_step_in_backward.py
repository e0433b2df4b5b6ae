"""Units that are updated inside of backward end where one process's step after backward ends."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from support.models import CASES, chain, mean_square, vectors
from support.parity import whole_params
from support.reference import difference, make_optimizer

NUM_STEPS, TOLERANCE = 4, 1e-12


def alone(name: str, kind: str, micro_batches: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process on every rank's batches, which steps after backward."""
    case, size = CASES[name], dist.get_world_size()
    model = case.build()
    optimizer = make_optimizer(kind, model.parameters())
    norms = []
    for step in range(NUM_STEPS):
        for micro in range(micro_batches):
            for rank in range(size):
                loss = case.loss(model(**case.batch(10 * step + micro, rank)))
                (loss / size).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, norms


def late(seconds: float) -> Any:
    """A hook that keeps this rank's backward back."""

    def wait(_: torch.Tensor) -> None:
        time.sleep(seconds)

    return wait


def updated_in_backward(
    name: str, kind: str, settings: dict[str, Any], micro_batches: int
) -> tuple[list[str], list[float]]:
    """What differs from one process, and by how much norms do."""
    case, rank = CASES[name], dist.get_rank()
    wanted, norms = alone(name, kind, micro_batches)
    model = fs.shard(case.build(), poison=True, **settings)
    optimizer = make_optimizer(kind, model.parameters())
    far = []
    for step in range(NUM_STEPS):
        for micro in range(micro_batches - 1):
            with fs.no_sync(model):
                case.loss(model(**case.batch(10 * step + micro, rank))).backward()
        output = model(**case.batch(10 * step + micro_batches - 1, rank))
        loss = case.loss(output)
        if rank == dist.get_world_size() - 1:
            loss.register_hook(late(0.02))
        with fs.step_in_backward(model, optimizer) as update:
            loss.backward()
        far.append(abs(float(update.grad_norm) / norms[step] - 1))
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()  # and finds nothing to do
    found = whole_params(model)
    return [n for n in wanted if not difference(found[n], wanted[n]) <= TOLERANCE], far


SHARED, DIRECT = {"transport": "shared"}, {"transport": "direct"}


@pytest.mark.parametrize(
    ("name", "kind", "settings", "micro_batches", "world_size"),
    [
        ("chain", "adamw", SHARED, 1, 3),
        ("chain", "sgd", {**DIRECT, "strategy": "shard_grad_op"}, 2, 2),
        ("tied llama", "adamw", SHARED, 2, 2),
        ("tied llama", "sgd", {"transport": "c10d"}, 1, 2),
        ("mixture of experts", "adamw", SHARED, 1, 2),
        ("mixture of experts", "sgd", DIRECT, 1, 2),
        ("albert", "adamw", SHARED, 1, 2),
        ("chain", "adamw", {"strategy": "no_shard"}, 1, 2),
        ("chain", "adamw", {"strategy": "hybrid_shard", "replicate": 2}, 2, 4),
        ("chain", "adamw", {"offload": "cpu"}, 1, 2),
    ],
)
def test_weights_are_those_of_a_step_after_backward(
    ranks, name, kind, settings, micro_batches, world_size
):
    for wrong, far in ranks(world_size)(
        updated_in_backward, name, kind, settings, micro_batches, timeout=60
    ):
        assert not wrong
        assert max(far) < 1e-9


WIDE = 160  # so that both ranks hold some elements of each vector


class Choice(nn.Module):
    """Vectors of which each forward uses some; the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((WIDE,), 1.0 + i).double() for i in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for i in used:
            x = (x * self.scales[i]).tanh()
        return x


class Choices(nn.Module):
    """Some of them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(Choice() for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[list[int]]) -> torch.Tensor:
        for choice, here in zip(self.choices, used, strict=True):
            x = choice(x, here)
        return x


# By rank and unit: some are used by one rank alone, some by nobody, and the second rank updates
# nothing at first, while the first one does.
USED = ([[0, 1], [0], [1], [2]], [[0], [1], [], []])


def chosen() -> list[str]:
    """What differs from one process where ranks do not use the same parameters."""
    x = torch.linspace(0.1, 0.9, WIDE, dtype=torch.float64)
    one, model = Choices(), fs.shard(Choices(), wrap=["Choice"], poison=True)
    theirs = make_optimizer("adamw", one.parameters())
    ours = make_optimizer("adamw", model.parameters())
    for _ in range(3):
        for used in USED:
            (one(x, used).sum() / 2).backward()
        theirs.step()
        theirs.zero_grad()
        with fs.step_in_backward(model, ours):
            model(x, USED[dist.get_rank()]).sum().backward()
    found = whole_params(model)
    wanted = {name: param.detach() for name, param in one.named_parameters()}
    return [n for n in wanted if not difference(found[n], wanted[n]) <= TOLERANCE]


def test_what_one_rank_did_not_use_is_updated_and_what_none_used_is_left(ranks):
    assert ranks(2)(chosen, timeout=60) == [[], []]


def order_of_updates(transport: str) -> list[str]:
    """What happens in one backward: reductions and updates by unit."""
    seen: list[str] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = [p for g in self.param_groups for p in g["params"] if hasattr(p, "record")]
            units = {".".join(p.record.piece.name.split(".")[:2]) for p in params}
            if units & BLOCKS:  # and no trial of the class
                seen.append(" ".join(sorted(units & BLOCKS)))
            return super().step(closure)

    model = fs.shard(chain(), wrap=["Block"], transport=transport)
    loss = mean_square(model(**vectors(0, dist.get_rank())))
    with fs.step_in_backward(model, Watched(model.parameters(), lr=0.1)):
        loss.backward()
        seen.append("backward returns")
    return seen


BLOCKS = {f"blocks.{i}" for i in range(4)}


def test_units_are_updated_one_after_another_while_backward_runs(ranks):
    for seen in ranks(2)(order_of_updates, "direct"):
        assert seen == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "backward returns"]


def test_masters_that_are_computed_with_are_updated_when_backward_ends(ranks):
    for seen in ranks(2)(order_of_updates, "shared"):
        assert seen == [" ".join(sorted(BLOCKS)), "backward returns"]


class Late(nn.Module):
    """A block that reads its weight once more, detached, when the weight's gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(x @ self.weight.detach())
        if inner.requires_grad and dist.get_rank() == 1:
            inner.register_hook(late(0.005))  # other ranks are ahead by now
        return inner @ self.weight


class Frozen(Late):
    """The same, with a second weight that the user froze after sharding, and that is read late."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(0.3 * torch.eye(5, dtype=torch.float64) + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.base) @ self.weight


class Kept(Late):
    """The same, where what autograd keeps passes through hooks, of which it checks no versions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            return super().forward(x)


class Again(Late):
    """The same, computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def read_late(kind: type[Late], settings: dict[str, Any]) -> list[float]:
    """How far weights are from one process's after three steps in backward."""
    x = torch.linspace(0.1, 0.9, 10, dtype=torch.float64).view(2, 5).requires_grad_()
    one = nn.Sequential(*(kind() for _ in range(4)))
    model = fs.shard(copy.deepcopy(one), wrap=[kind.__name__], **settings)
    for either in (one, model):
        for name, param in either.named_parameters():
            param.requires_grad_("base" not in name)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        one(x).sum().backward()
        theirs.step()
        theirs.zero_grad()
        loss = model(x).sum()
        if dist.get_rank() == 1:
            loss.register_hook(late(0.01))
        with fs.step_in_backward(model, ours):
            loss.backward()
    found = whole_params(model)
    return [difference(found[name], param.detach()) for name, param in one.named_parameters()]


@pytest.mark.parametrize("kind", [Late, Frozen, Kept, Again])
@pytest.mark.parametrize("settings", [SHARED, DIRECT, {"strategy": "no_shard"}])
def test_weights_that_are_read_when_their_gradients_are_there(ranks, kind, settings):
    for far in ranks(2)(read_late, kind, settings, timeout=60):
        assert max(far) < TOLERANCE


def deferred_inside(settings: dict[str, Any]) -> list[str]:
    """What differs from one process where micro-batches are deferred inside of the context."""
    case, size = CASES["chain"], dist.get_world_size()
    one, model = case.build(), fs.shard(case.build(), **settings)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with fs.step_in_backward(model, ours):
            for micro in range(3):
                for rank in range(size):
                    (case.loss(one(**case.batch(10 * step + micro, rank))) / size).backward()
                waits = fs.no_sync(model, outer_only=True) if micro < 2 else nullcontext()
                with waits:
                    case.loss(model(**case.batch(10 * step + micro, dist.get_rank()))).backward()
        theirs.step()
        theirs.zero_grad()
    found = whole_params(model)
    wanted = {name: param.detach() for name, param in one.named_parameters()}
    return [n for n in wanted if not difference(found[n], wanted[n]) <= TOLERANCE]


@pytest.mark.parametrize("settings", [SHARED, DIRECT])
def test_deferred_micro_batches_inside_of_the_context_update_nothing(ranks, settings):
    assert ranks(2)(deferred_inside, settings, timeout=60) == [[], []]


def after_an_exception() -> list[float]:
    """How far weights are after a backward that was left in the middle, and two steps."""
    x = torch.linspace(0.1, 0.9, 10, dtype=torch.float64).view(2, 5)
    model = fs.shard(nn.Sequential(*(Frozen() for _ in range(3))), wrap=["Frozen"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    output = model[1](model[0](x))
    output.register_hook(fail)
    with pytest.raises(ArithmeticError), fs.step_in_backward(model, optimizer):
        model[2](output).sum().backward()
    fs.reset(model)
    one = nn.Sequential(*(Frozen() for _ in range(3)))
    with torch.no_grad():
        for param, value in zip(one.parameters(), whole_params(model).values(), strict=True):
            param.copy_(value)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(2):
        one(x).sum().backward()
        theirs.step()
        theirs.zero_grad()
        with fs.step_in_backward(model, optimizer):
            model(x).sum().backward()
    found = whole_params(model)
    return [difference(found[name], param.detach()) for name, param in one.named_parameters()]


def test_a_backward_that_raised_leaves_a_model_that_trains(ranks):
    for far in ranks(2)(after_an_exception, timeout=60):
        assert max(far) < TOLERANCE
