"""Parameter changes that would be lost are refused on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import EngineError, ShardedTensorError
from support.parity import backward_alone, unlike_gradients
from support.programs import SETTINGS, WIDTH, Chain, batch, made, said_of, square
from support.ranks import on_ranks

Change = Callable[[Any, torch.Tensor], Any]  # width of a layer and its input


class Layer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.change = change

    def forward(self, x):
        changed = self.change(self, x)
        return x + torch.tanh(self.linear(x)) + (0.0 if changed is None else changed)


def with_layers(change):
    return partial(Chain, partial(Layer, change))


def nothing(layer, x): ...


def clamps(layer, x):
    layer.linear.weight.data.clamp_(-0.05, 0.05)


def clamps_in_place(layer, x):
    with torch.no_grad():
        layer.linear.weight.clamp_(-0.05, 0.05)


def rescales_rows(layer, x):
    """Like the forward of an embedding with `max_norm`."""
    nn.functional.embedding(torch.arange(2), layer.linear.weight, max_norm=1e-2)


def normalises(layer, x):
    layer.linear.weight.data = nn.functional.normalize(layer.linear.weight.data)


def initialises(layer, x):
    """A data-dependent initialisation, like ActNorm's."""
    layer.linear.bias.data.copy_(-x.detach().mean(0))


def follows(layer, x):
    """Updates a frozen parameter, like codebooks and power iterations."""
    layer.frozen.data = 0.9 * layer.frozen.data


def assigns(layer, x):
    layer.linear.bias = nn.Parameter(-x.detach().mean(0))


def converts(layer, x):
    layer.linear.half().double()


IN_FORWARD = {
    clamps: "layers.0.linear.weight: expected a forward that does not modify its parameters",
    clamps_in_place: "layers.0.linear.weight: expected a forward that does not modify its param",
    rescales_rows: "layers.0.linear.weight: expected a forward that does not modify its param",
    normalises: "layers.0.linear.weight: expected a forward that does not modify its parameters",
    initialises: "layers.0.linear.bias: expected a forward that does not modify its parameters",
    follows: "layers.0.frozen: expected a forward that does not modify its parameters",
    converts: "layers.0.linear.weight: expected a forward that does not modify its parameters",
    assigns: "layers.0.linear.bias: expected the parameter that fs.shard cut",
}


def trains_twice(model, x):
    """The second call is refused like the first."""
    with pytest.raises(EngineError):
        square(model, x).backward()
    square(model, x).backward()


@pytest.mark.parametrize("change", IN_FORWARD, ids=lambda change: change.__name__)
def test_a_forward_that_changes_its_parameters_is_refused(ranks, change):
    for said in ranks(2)(said_of, with_layers(change), trains_twice):
        for text in said:
            assert text.startswith(IN_FORWARD[change])


def gives_other_memory(model, x):
    """Replaces the data of a parameter whose elements are all on one rank."""
    model.head.bias.data = model.head.bias.data.clamp(-0.1, 0.1)
    square(model, x).backward()


def test_other_memory_is_noticed_even_if_a_rank_has_no_element(ranks):
    for said in ranks(2)(said_of, with_layers(nothing), gives_other_memory):
        for text in said:
            assert text.startswith("head.bias: expected its shard where fs.shard put it")


def reads(layer, x):
    return x @ layer.linear.weight.data.t() + layer.linear.bias.data.norm()


@on_ranks(2)
def test_a_forward_may_read_the_data_of_its_parameters():
    build, x = with_layers(reads), batch(dist.get_rank())
    one = made(build)(x)
    found = []
    for settings in SETTINGS.values():
        model = fs.shard(made(build), wrap=("Layer",), poison=True, **settings)
        found.append(torch.allclose(model(x), one, rtol=1e-11))
    assert found == [True] * len(SETTINGS)


def put_as_gradient(weight):
    weight.grad = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)


WHOLE_SHAPES: dict[str, Callable[[Any], Any]] = {
    "a view": lambda weight: weight.view(WIDTH, WIDTH),
    "a reshape": lambda weight: weight.detach().reshape(WIDTH, -1),
    "a row": lambda weight: weight * torch.ones(WIDTH, dtype=torch.float64),
    "a gradient": put_as_gradient,
    "a new tensor": lambda weight: weight.new_zeros(WIDTH, WIDTH).record,
}


@on_ranks(2)
def test_a_full_shape_is_refused_if_one_rank_stores_every_element():
    """Rank 0 stores the whole parameter, rank 1 none of it."""
    said = []
    weight = fs.shard(made(Chain), wrap=("Layer",), transport="direct").first.weight
    assert weight.numel() == (0 if dist.get_rank() else WIDTH * WIDTH)
    for call in WHOLE_SHAPES.values():
        try:
            call(weight)
            said.append("nothing")
        except (ShardedTensorError, AttributeError) as error:
            said.append(type(error).__name__)
    assert said == ["ShardedTensorError"] * 4 + ["AttributeError"]


# ---- one encoder that a forward averages into another


class Averaged(nn.Module):
    """A unit that averages its own encoder, before or after the forward reads it."""

    def __init__(self, *, first, asks=False):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)
        self.pairs = list(zip(self.query.parameters(), self.key.parameters(), strict=True))
        self.first, self.averages, self.asks = first, True, asks

    def average(self):
        with torch.no_grad():
            for query, key in self.pairs if self.averages else ():
                key.lerp_(query, 0.5)
                if self.asks:
                    key.full_tensor()

    def forward(self, x):
        if self.first:
            self.average()
        with torch.no_grad():
            target = self.key(x)
        found = self.query(x) * target
        if not self.first:
            self.average()
        return found


def averaged(**options):
    return made(lambda: nn.Sequential(*(Averaged(**options) for _ in range(2))))


@pytest.mark.short(3)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("transport", ["c10d", "direct", "shared"])
@on_ranks(2)
def test_a_unit_that_writes_weights_before_reading_them_is_refused(transport, asks):
    """Includes ranks that compared their writes in between."""
    model = averaged(first=True, asks=asks)
    fs.shard(model, wrap=("Averaged",), poison=True, transport=transport)
    with pytest.raises(EngineError, match=r"0.key.weight: expected a forward of 0 that does not"):
        model(batch(dist.get_rank()))


@pytest.mark.short(2)
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_a_unit_may_write_weights_for_its_next_forward(setting):
    one, model = averaged(first=False), averaged(first=False)
    fs.shard(model, wrap=("Averaged",), poison=True, **SETTINGS[setting])

    def alone(rank):
        for layer in one:
            layer.averages = rank == 1  # during the last rank's forward
        return square(one, batch(rank))

    for _ in range(3):
        square(model, batch(dist.get_rank())).backward()
        backward_alone(alone)
    assert unlike_gradients(model, one) == []


class Twins(nn.Module):
    """Averages one encoder into another through their modules, which own units and parameters."""

    def __init__(self):
        super().__init__()
        self.query, self.key = Chain(), Chain()
        self.key.requires_grad_(False)

    def forward(self, x):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data.lerp_(query.data, 0.5)
        return self.query(x) * self.key(x).detach()


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_a_write_into_an_open_unit_is_found_beside_writes_into_others(setting):
    model = fs.shard(Twins().double(), wrap=("Layer",), poison=True, **SETTINGS[setting])
    with pytest.raises(EngineError, match=r"key.first.weight: expected a forward that does not"):
        model(batch(dist.get_rank()))


class Teaches(nn.Module):
    """Copies its weight into another unit before it reads its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.pupils = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        with torch.no_grad():
            for pupil, weight in self.pupils:
                pupil.copy_(weight)
        return torch.tanh(self.linear(x))


def taught():
    model = made(lambda: nn.Sequential(Teaches(), Teaches()))
    model[0].pupils.append((model[1].linear.weight, model[0].linear.weight))
    return model


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_a_unit_written_before_its_forward_may_write_another_unit_inside_it(setting):
    one, model = taught(), taught()
    fs.shard(model, wrap=("Teaches",), poison=True, **SETTINGS[setting])
    for _ in range(2):
        with torch.no_grad():
            torch._foreach_mul_([*one.parameters(), *model.parameters()], 0.9)
        square(model, batch(dist.get_rank())).backward()
        backward_alone(lambda rank: square(one, batch(rank)))
        assert unlike_gradients(model, one) == []
