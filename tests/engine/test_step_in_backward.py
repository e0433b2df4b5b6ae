"""Units that are updated inside of backward end where one process's step after backward ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import EngineError
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


class Choice(nn.Module):
    """Vectors of which each forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((5,), 1.0 + i).double() for i in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for i in used:
            x = (x * self.scales[i]).tanh()
        return x


USED = ([0, 1], [0])  # by rank: one vector is used by the first alone, one by nobody


def chosen() -> list[str]:
    """What differs from one process where ranks do not use the same parameters."""
    x = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    one, model = Choice(), fs.shard(Choice(), poison=True)
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
    assert ranks(2)(chosen) == [[], []]


def order_of_updates() -> list[str]:
    """What happens in one backward: reductions and updates by unit."""
    seen: list[str] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = [p for g in self.param_groups for p in g["params"] if hasattr(p, "record")]
            units = {".".join(p.record.piece.name.split(".")[:2]) for p in params}
            seen.extend(units & BLOCKS)
            return super().step(closure)

    model = fs.shard(chain(), wrap=["Block"])
    loss = mean_square(model(**vectors(0, dist.get_rank())))
    with fs.step_in_backward(model, Watched(model.parameters(), lr=0.1)):
        loss.backward()
        seen.append("backward returns")
    return seen


BLOCKS = {f"blocks.{i}" for i in range(4)}


def test_units_are_updated_one_after_another_while_backward_runs(ranks):
    for seen in ranks(2)(order_of_updates):
        assert seen == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "backward returns"]


class Counting(torch.optim.SGD):
    """Counts its steps where its settings are."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    rank = dist.get_rank()

    def attempt(name: str, run: Any) -> None:
        model = fs.shard(chain())
        try:
            run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except EngineError as error:
            said[name] = str(error)

    def clips(model: nn.Module, optimizer: Any) -> None:
        loss = mean_square(model(**vectors(0, rank)))
        with fs.step_in_backward(model, optimizer):
            loss.backward()
        fs.clip_grad_norm_(model, 1.0)

    def twice(model: nn.Module, optimizer: Any) -> None:
        losses = [mean_square(model(**vectors(i, rank))) for i in range(2)]
        with fs.step_in_backward(model, optimizer):
            losses[1].backward()

    def counts(model: nn.Module, _: Any) -> None:
        loss = mean_square(model(**vectors(0, rank)))
        with fs.step_in_backward(model, Counting(model.parameters(), lr=0.1)):
            loss.backward()

    def nested(model: nn.Module, optimizer: Any) -> None:
        with fs.step_in_backward(model, optimizer), fs.step_in_backward(model, optimizer):
            pass

    def nothing(model: nn.Module, optimizer: Any) -> None:
        with fs.step_in_backward(model, optimizer) as update:
            pass
        update.grad_norm  # noqa: B018

    for case in (clips, twice, counts, nested, nothing):
        attempt(case.__name__, case)
    return said


def test_what_would_be_wrong_is_refused(ranks):
    for said in ranks(2)(refusals, timeout=60):
        assert "Its grad_norm says their norm" in said["clips"]
        assert "Add the losses and call backward once" in said["twice"]
        assert "Counting changed 'count'" in said["counts"]
        assert "one context at a time" in said["nested"]
        assert "expected a backward inside" in said["nothing"]
