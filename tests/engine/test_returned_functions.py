"""Functions and iterators returned by a forward compute with the weights of that forward."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine.attributes import change_tensors
from fullshard.errors import EngineError, ShardedTensorError
from support.models import perturbed
from support.parity import assert_parity
from support.ranks import on_ranks

WIDTH = 6
TRANSPORTS = ["c10d", "direct", "shared"]
Later = Callable[[torch.Tensor], torch.Tensor]


def closure(weight):
    return lambda x: x @ weight


def inner_closure(weight):
    def product(x):
        return x @ weight

    return lambda x: product(x) + product(2 * x)


def default(weight):
    return lambda x, weight=weight: x @ weight


def keyword_default(weight):
    def product(x, *, weight=weight):
        return x @ weight

    return product


def partial_keyword(weight):
    return partial(torch.matmul, other=weight)


def partial_argument(weight):
    return partial(torch.mm, weight.t()[:, :WIDTH])


def partial_function(weight):
    return partial(closure(weight))


def tensor_method(weight):
    return weight.matmul


def python_method(weight):
    return weight.__rmatmul__


class Holder:
    def __init__(self, weight):
        self.weight = weight

    def product(self, x):
        return x @ self.weight


def object_method(weight):
    return Holder(weight).product


def callable_in_tuple(weight):
    functions = ({"f": [closure(weight)]},)
    return lambda x: functions[0]["f"][0](x)


def activation(weight):
    hidden = weight.sin()  # not a view: its gradient enters the unit
    return lambda x: x @ hidden


def generator_expression(weight):
    return (weight * factor for factor in range(3))  # the weight is in a cell


def next_of_expression(weight):
    expression = generator_expression(weight)
    return lambda x: x @ (next(expression) + next(expression))


FUNCTIONS = [
    *(closure, inner_closure, default, keyword_default, partial_keyword, partial_argument),
    *(partial_function, tensor_method, python_method, object_method, callable_in_tuple, activation),
    next_of_expression,
]


class Block(nn.Module):
    """Returns a function that is applied to its output after other blocks ran."""

    def __init__(self, make, *, keeps=False):
        super().__init__()
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.eye(WIDTH) / 8)
        self.make, self.keeps = make, keeps
        self.kept: Any = None

    def forward(self, x):
        made = self.make(self.weight)
        if self.keeps:
            self.kept, made = made, None
        return self.linear(x).tanh(), made


class Model(nn.Module):
    def __init__(self, make, *, keeps=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(make, keeps=keeps) for _ in range(4))

    def forward(self, x):
        later = []
        for block in self.blocks:
            x, made = block(x)
            later.append(made)
        for block, made in zip(self.blocks, later, strict=True):
            x = x + (made or cast("Later", block.kept))(x)
        return x


def built(make, *, keeps=False):
    torch.manual_seed(0)
    return perturbed(Model(make, keeps=keeps).double())


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def check(make, transport, *, keeps=False):
    """Runs training steps, each after an evaluation."""

    def work(model, step, rank):
        with torch.no_grad():
            evaluated = model(batch(rank, step + 1)).square().mean()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        return torch.stack([loss, evaluated]).detach()

    settings = {"wrap": ["Block"], "transport": transport}
    assert_parity(partial(built, make, keeps=keeps), work, settings, kinds=("sgd",))


@pytest.mark.short(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_returned_function_computes_with_the_weights_of_its_forward(transport):
    # Finding functions does not depend on the transport; refilling a slot does.
    for make in FUNCTIONS if transport == "direct" else FUNCTIONS[:3]:
        check(make, transport)


@pytest.mark.parametrize("make", [closure, default, partial_keyword])
@on_ranks(2)
def test_a_kept_function_computes_with_the_weights_of_its_forward(make):
    check(make, "direct", keeps=True)


# ---- iterators cannot be rebuilt


def generator(weight):
    yield weight * 2


def begun_generator(weight):
    def rows():
        for row in weight.unbind():  # only on the frame's stack
            yield row * 2

    made = rows()
    next(made)
    return made


def finished_generator(weight):
    made = generator(weight)
    list(made)
    return made


def mapped(weight):
    return map(torch.sin, (weight,))


def rows(weight):
    return iter(weight)


def caller(weight):
    return operator.methodcaller("__matmul__", weight)


def dictionary_values(weight):
    return {"a": weight}.values()


def refusal(make, transport):
    model: Any = fs.shard(built(make), wrap=["Block"], poison=True, transport=transport)
    try:
        model.blocks[1](batch(0))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.short(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_iterator_over_weights_is_refused_with_the_units_name(ranks, transport):
    for make in (generator, begun_generator, mapped, rows, caller):
        for said in ranks(2)(refusal, make, transport):
            assert said.startswith("blocks.1: expected a forward that returns tensors"), make
            assert "Return tensors" in said
    for make in (finished_generator, generator_expression, dictionary_values):
        assert ranks(2)(refusal, make, transport) == ["", ""]


# ---- methods of modules


class Projecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.inner(x), self.project


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_returned_method_of_a_module_gathers_or_is_refused(transport):
    torch.manual_seed(0)
    said = []
    for wrap in (["Projecting"], ["Projecting", "Linear"]):
        model = nn.ModuleList(Projecting() for _ in range(3)).double()
        sharded: Any = fs.shard(model, wrap=wrap, poison=True, transport=transport)
        state = fs.full_state_dict(sharded, rank0_only=False)
        x = batch(0)
        later = [block(x)[1] for block in sharded]
        try:
            result = later[0](x)
            whole = nn.functional.linear(x, state["0.inner.weight"], state["0.inner.bias"])
            said.append("equal" if torch.allclose(result, whole, rtol=1e-12) else "differs")
        except ShardedTensorError as error:
            said.append(str(error))
    refused, gathered = said
    assert refused.startswith("linear: expected a call inside the forward of unit 0")
    assert gathered == "equal"


# ---- the walk, without ranks


def double(tensor):
    return tensor * 2


def test_an_object_with_two_references_stays_one_object():
    weight = torch.ones(2)
    pair = (weight, "name")
    first, second, tensor = change_tensors([pair, {"again": pair}, weight], double, "unit")
    assert first is second["again"]
    assert tensor is first[0]
    assert tensor.tolist() == [2.0, 2.0]


def test_recursive_functions_and_empty_cells_are_walked():
    weight = torch.ones(2)

    def count(n):
        return weight if n == 0 else count(n - 1) + weight + (later if n > 5 else 0)

    assert change_tensors(count, double, "unit") is count
    assert count(1).tolist() == [4.0, 4.0]
    later = weight
