"""Users' programs compute what one process computes, on every transport."""

import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

import fullshard as fs
from fullshard.engine import unit
from fullshard.engine.engine import is_sharded
from fullshard.errors import ShardedTensorError
from support.grid import chequered
from support.parity import unlike_gradients
from support.programs import SETTINGS, WIDTH, Chain, Layer, batch, made, said_of, square
from support.ranks import on_ranks

Work = Callable[[Any, torch.Tensor], torch.Tensor]  # (model, batch) -> loss
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Work]] = {}


def program(build):
    """Registers a loss of this kind of model; backward follows."""

    def add(work):
        PROGRAMS[work.__name__] = build, work
        return work

    return add


def shares(model):
    """Returns the number of batches in a gradient's mean; one process sees those of all ranks."""
    return 1 if is_sharded(model) else dist.get_world_size()


def train(model, work, ranks):
    """Returns the losses of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        for rank in ranks:
            loss = work(model, batch(rank, step))
            if loss.requires_grad:
                (loss / len(ranks)).backward()
            losses.append(loss.detach())
    return losses


def off(name, everywhere=SETTINGS):
    """Returns the differences between a program and one process, by transport.

    With every second transport, each gradient is moved as soon as it is ready.
    """
    build, work = PROGRAMS.get(name) or OUTSIDE[name]
    size, rank = dist.get_world_size(), dist.get_rank()
    one = made(build)
    want = train(one, work, range(size))[rank::size]
    wrong = []
    for at, (setting, settings) in enumerate(everywhere.items()):
        model = made(build)
        with patch.object(unit, "LARGE_NUMEL", unit.LARGE_NUMEL * (at % 2)):
            fs.shard(model, poison=True, wrap=getattr(model, "wrap", "auto"), **settings)
        got = train(model, work, [rank])
        same = [torch.allclose(*pair, rtol=1e-11) for pair in zip(got, want, strict=True)]
        wrong += [] if all(same) else [f"{setting}: losses {got} {want}"]
        wrong += [f"{setting}: {text}" for text in unlike_gradients(model, one)]
    return wrong


# ---- backwards inside a backward


class Implicit(Layer):
    """A fixed point whose gradient a hook solves for; `anew` builds its graph inside the hook."""

    anew = False

    def forward(self, x):
        def f(z):
            return torch.tanh(0.3 * self.linear(z) + x)

        with torch.no_grad():
            z = x
            for _ in range(8):
                z = f(z)
        z = f(z)
        if not z.requires_grad:
            return z
        z0 = z.detach().requires_grad_()
        kept = None if self.anew else f(z0)

        def solve(gradient):
            with torch.enable_grad():
                f0 = f(z0) if kept is None else kept
            solved = gradient
            for _ in range(3):
                solved = gradient + torch.autograd.grad(f0, z0, solved, retain_graph=True)[0]
            return solved

        z.register_hook(solve)
        return z


class Anew(Implicit):
    anew = True


@program(Chain)
def whole_backward_in_a_hook_on_the_loss(model, x):
    other, loss = square(model, x + 1), square(model, x)
    loss.register_hook(lambda gradient: (other.backward(gradient), gradient)[1])
    return loss


@program(Chain)
def clean_and_adversarial_batch_in_one_backward(model, x):
    x = x.clone().requires_grad_()
    clean = square(model, x)
    (gradient,) = torch.autograd.grad(clean, x, retain_graph=True)
    return clean + square(model, (x + 0.1 * gradient.sign()).detach())


class Forces(Chain):
    """Returns a gradient with respect to its input, like energy models and guidance."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x)
        return super().forward(x + force)


class ForcesInside(Layer):
    """Like `Forces`, inside units."""

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(y).square().sum(), y)
        return super().forward(x + force)


@program(partial(Chain, ForcesInside))
def evaluation_with_gradients_inside(model, x):
    with torch.no_grad():
        return square(model, x)


@cache
def worker():
    return ThreadPoolExecutor(1)


class InAThread(Layer):
    """Computes in a worker thread."""

    def forward(self, x):
        return worker().submit(super().forward, x).result()


class Guided(Chain):
    """A backward hook differentiates units that forward skipped and that share a slot."""

    def forward(self, x):
        x = self.first(x)
        x = self.layers[3](self.layers[1](x))

        def guide(gradient):
            y = torch.ones(1, WIDTH, dtype=gradient.dtype, requires_grad=True)
            with torch.enable_grad():
                found = self.layers[2](self.layers[0](y)).square().sum()
            return gradient * (1 + torch.autograd.grad(found, y)[0].tanh().mean())

        if x.requires_grad:
            x.register_hook(guide)
        return self.head(x)


class Branches(Chain):
    """A worker thread computes one branch; autograd numbers nodes per thread."""

    def forward(self, x):
        x = self.first(x)
        with ThreadPoolExecutor(1) as pool:
            branch = pool.submit(lambda: self.layers[1](self.layers[0](x))).result()
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x + branch)


# ---- tensors that share memory with weights


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table


class Table(nn.Module):
    """Returns a part of its own parameter, in different ways."""

    def __init__(self, how, *, trains):
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(9, WIDTH), requires_grad=trains)
        self.kept: Any = None

    def forward(self, n):
        view = self.table[:n]
        late = view if torch.is_grad_enabled() else 0.0  # a number during the first evaluation
        self.kept = {"attribute": view, "list": [view], "late": late}.get(self.how)
        return {
            "view": view,
            "parameter": self.table,
            "detached": self.table.detach()[:n],
            "tuple": (None, view),
            "mapping": {"table": view},
            "object": SimpleNamespace(inner=SimpleNamespace(table=view)),
            "slots": Slotted(view),
            "set": {view},
            "deque": deque([view]),
            "distribution": torch.distributions.Normal(0 * view, view, validate_args=False),
        }.get(self.how)

    def read(self, given):
        read: dict[str, Callable[[], Any]] = {
            "tuple": lambda: given[1],
            "mapping": lambda: given["table"],
            "object": lambda: given.inner.table,
            "distribution": lambda: given.scale,
            "slots": lambda: given.table,
            "set": lambda: next(iter(given)),
            "deque": lambda: given[0],
            "attribute": lambda: self.kept,
            "late": lambda: self.kept + torch.zeros(5, WIDTH, dtype=torch.float64),
            "list": lambda: self.kept[0],
        }
        return read.get(self.how, lambda: given)()


class Tables(nn.Module):
    wrap = ("Table", "Layer")

    def __init__(self, how, *, trains):
        super().__init__()
        self.tables = nn.ModuleList(Table(how, trains=trains) for _ in range(4))
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        given = [table(len(x)) for table in self.tables]
        for table, value, layer in zip(self.tables, given, self.layers, strict=True):
            x = layer(x + table.read(value)[: len(x)])
        return x


def evaluated_and_trained(model, x):
    with torch.no_grad():
        evaluated = square(model, x)
    return square(model, x) + evaluated


HOWS = ["view", "parameter", "detached", "tuple", "mapping"]
HOWS += ["object", "distribution", "attribute", "list", "late", "slots", "set", "deque"]
PROGRAMS |= {
    f"{how} of a {'trained' if trains else 'frozen'} table": (
        partial(Tables, how, trains=trains),
        evaluated_and_trained,
    )
    for how in HOWS
    for trains in ((True, False) if how in ("view", "parameter", "detached", "late") else (True,))
}


class Turned(nn.Module):
    """Returns a view of its result, which the caller writes in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return (x @ self.weight).t()


class WritesIntoViews(Chain):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
            x[0].add_(1.0)
            x = x.t()
        return self.head(x)


class Recurrent(Layer):
    """torch's recurrent layers keep a list of their parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.inner(x)[0])


class Keeps(Layer):
    """Keeps its weight in a list for optimizer groups, and as a view that it makes once."""

    def __init__(self):
        super().__init__()
        self.decayed = [self.linear.weight]
        self.turned: torch.Tensor | None = None

    def forward(self, x):
        if self.turned is None:
            self.turned = self.linear.weight.detach().t()
        return super().forward(x) + x @ self.turned


@program(partial(Chain, Keeps))
def views_of_weights_that_are_kept_over_steps(model, x):
    with torch.no_grad():
        model(x)
    return square(model, x)


class Hooked(Layer):
    """Hooks its weight and the autograd node of its bias, only in its first forward."""

    hooked = False

    def forward(self, x):
        if not self.hooked:
            self.hooked = True
            self.linear.weight.register_hook(lambda grad: 2 * grad)
            self.node = get_gradient_edge(self.linear.bias).node
            self.node.register_prehook(lambda grads: (3 * grads[0],))
        return super().forward(x)


class Backwards(Chain):
    is_backwards = True


# ---- units called without their root


class Part(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.layer, self.last = Layer(), nn.Linear(WIDTH, width)

    def forward(self, x):
        return torch.tanh(self.last(self.layer(x)))


class Adversaries(nn.Module):
    """Its own forward is never called."""

    wrap = ("Part", "Layer")

    def __init__(self):
        super().__init__()
        self.generator, self.critic = Part(), Part(1)


@program(Adversaries)
def adversaries_that_are_frozen_in_turn(model, x):
    model.critic.requires_grad_(False)
    fooled = -model.critic(model.generator(x)).mean()
    with torch.no_grad():
        found = model.generator(x + 1)
    fooled.backward(torch.full_like(fooled, 1 / shares(model)))
    model.critic.requires_grad_(True)
    return model.critic(found).mean() - model.critic(x).mean()


@program(Adversaries)
def weights_written_after_a_unit_was_gathered_ahead(model, x):
    with torch.no_grad():
        found = model.generator(x)
        for param in model.critic.parameters():
            param.clamp_(-0.05, 0.05)
        return model.critic(found).mean()


class Encoder(Adversaries):
    wrap = ("Part", "Linear")

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(1, WIDTH)

    def encode(self, x):
        return self.projection(self.critic(self.generator.layer(x)))


@program(Encoder)
def methods_other_than_forward_that_call_units(model, x):
    return model.encode(x).square().mean()


class Tied(nn.Module):
    """Units share a weight of the unit around them; one is called directly."""

    wrap = ("Part", "Pair")

    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.last = Part()
        self.last.last.weight = self.pair.first.last.weight

    def forward(self, x):
        return self.last(self.pair(x))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()
        self.second.last.bias = self.first.last.bias

    def forward(self, x):
        return self.second(self.first(x))


@program(Tied)
def tied_units_called_alone(model, x):
    with torch.no_grad():
        x = model.last(x) + model.pair.second(x)
    return (model.pair.first(x) * model.last(x)).square().mean() + model.pair(x).mean()


@program(Tied)
def a_tied_unit_called_alone_and_the_model(model, x):
    return square(model, model.pair.second(x)) + model.last(x).mean()


@program(Chain)
def mapped_over_the_batch_and_trained(model, x):
    return torch.func.vmap(model)(x).square().mean()


@program(Chain)
def forward_mode(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch itself uses torch.jit
        with torch.no_grad():
            torch.func.jvp(model, (x,), (torch.ones_like(x),))
        values, tangents = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return (values * tangents).mean()


PROGRAMS |= {
    name: (build, square)
    for name, build in {
        "implicit layer in one unit": lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Implicit(), nn.Linear(WIDTH, 3)
        ),
        "implicit layers as units": partial(Chain, Implicit),
        "implicit layer whose graph is made in the hook": lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Anew(), nn.Linear(WIDTH, 3)
        ),
        "gradients inside the forward": Forces,
        "gradients inside the forward of units": partial(Chain, ForcesInside),
        "units differentiated by a hook": Guided,
        "a branch in a worker thread": Branches,
        "units that compute in a worker thread": partial(Chain, InAThread),
        "views of outputs that are written in place": partial(WritesIntoViews, Turned),
        "recurrent layers": partial(Chain, Recurrent),
        "weights hooked before the order is learned": partial(Backwards, Hooked),
    }.items()
}


EACH = [{name: settings} for name, settings in SETTINGS.items()]


@pytest.mark.parametrize(("name", "settings"), chequered(PROGRAMS, EACH, 4))
def test_a_program_computes_what_one_process_computes(ranks, name, settings):
    for wrong in ranks(2)(off, name, settings):
        assert wrong == []


# ---- parameters outside of forward


class Weighted(Chain):
    """Has parameters that are used outside of forward, some of them also inside."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


class WeightedBackwards(Weighted):
    is_backwards = True


def uncertainty(model, x):
    return torch.exp(-model.scale) * square(model, x) + model.scale


def input_scaled(model, x):
    return square(model, x * model.unused.sigmoid() * model.scale)


def penalty(model, x):
    return square(model, x) + sum((p**2).sum() + p.norm() for p in model.parameters())


def head_alone(model, x):
    return square(model, x) + (x @ model.head.weight.t()).square().mean()


def written_into_plain_tensors(model, x):
    total, rows = torch.zeros(WIDTH, dtype=x.dtype), torch.zeros(3, WIDTH, dtype=x.dtype)
    total.add_(model.unused).add_(model.unused)
    rows[0] = model.unused
    rows.index_add_(0, torch.tensor([1, 2]), model.head.weight[:2])
    return square(model, x) + (total.square().sum() + (rows**3).sum())


OUTSIDE = {
    work.__name__: (Weighted, work)
    for work in (uncertainty, input_scaled, penalty, head_alone, written_into_plain_tensors)
}
OUTSIDE["input scaled before an order is learned"] = (WeightedBackwards, input_scaled)
WHOLE = {
    "no_shard": {"strategy": "no_shard"},
    "one shard": {"strategy": "hybrid_shard", "shard": 1},
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_whole_parameters_may_be_used_outside_of_forward(ranks, name):
    for wrong in ranks(2)(off, name, WHOLE):
        assert wrong == []


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "settings",
    [{"transport": "direct"}, {"strategy": "no_shard", "param_dtype": "bfloat16"}],
)
@on_ranks(2)
def test_parts_outside_of_forward_are_refused_on_all_ranks(settings):
    """Covers parts, and full tensors computed in another dtype."""
    said = []
    for _, work in OUTSIDE.values():
        model: Any = fs.shard(made(Weighted), wrap=Weighted.wrap, **settings)
        model.scale.clone()  # a kept one is allowed
        try:
            work(model, batch(dist.get_rank())).backward()
            said.append("nothing")
        except ShardedTensorError as error:
            said.append(str(error))
    assert all(": expected " in text for text in said), said


# ---- refused on all ranks


def backward_to_parameters_in_a_hook(model, x):
    other = square(model, x + 1)
    hidden: list[torch.Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda *given: hidden.append(given[-1]))
    loss = square(model, x)
    handle.remove()
    hidden[0].register_hook(lambda _: other.backward())
    loss.backward()


def a_head_replaced(model, x):
    model.head = nn.Linear(WIDTH, 2).double()
    square(model, x).backward()


def a_parameter_registered(model, x):
    model.layers[0].register_parameter("gain", nn.Parameter(torch.ones(WIDTH).double()))
    square(model, x).backward()


def a_layer_appended(model, x):
    model.layers.append(Layer().double())
    square(model, x).backward()


def an_adapter_inside(model, x):
    linear = model.layers[2].linear
    linear.adapter = nn.Linear(WIDTH, WIDTH).double()
    linear.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))
    square(model.layers[2], x).backward()  # a unit called alone


def a_frozen_part_put_in_and_trained(model, x):
    model.late = nn.Linear(WIDTH, 2).double().requires_grad_(False)
    square(model, x).backward()
    model.late.requires_grad_(True)
    square(model, x).backward()


def a_parameter_in_a_second_place(model, x):
    model.tied = nn.Module()
    model.tied.weight = model.head.weight
    square(model, x).backward()


def a_returned_view_written(model, x):
    handle = model.layers[0].register_forward_hook(lambda m, *_: m.linear.weight, prepend=True)
    with torch.no_grad():
        model.layers[0](x).mul_(2.0)
    handle.remove()
    square(model, x).backward()


def a_layer_called_outside_of_its_unit(model, x):
    model.layers[0].linear(x)


REFUSED: dict[Callable[[Any, torch.Tensor], None], str] = {
    backward_to_parameters_in_a_hook: "got one inside another that reaches the parameters",
    a_head_replaced: "head.weight: expected the parameters that the model had",
    a_parameter_registered: "layers.0.gain: expected the parameters that the model had",
    a_layer_appended: "layers.4.linear.weight: expected the parameters that the model had",
    an_adapter_inside: "layers.2.linear.adapter.weight: expected the parameters that the model had",
    a_frozen_part_put_in_and_trained: "late.weight: expected the parameters that the model had",
    a_parameter_in_a_second_place: "tied.weight: expected the parameters where fs.shard found them",
    a_layer_called_outside_of_its_unit: "expected a call inside the forward of unit layers.0",
    a_returned_view_written: (
        "expected no writes into a view of a parameter that its forward returned; got one"
    ),
}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.__name__)
@on_ranks(2)
def test_programs_that_cannot_be_right_are_refused_on_all_ranks(refused):
    said = said_of(Chain, refused)
    # Under no_shard parameters are full, so the result is that of one process.
    is_whole = refused in (a_returned_view_written, a_layer_called_outside_of_its_unit)
    for text in said[:-1] if is_whole else said:
        assert REFUSED[refused] in text


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_the_gradient_of_a_penalty_may_be_added_after_backward(setting):
    """Compares a penalty's gradient added after backward with a penalty in the loss."""
    settings = SETTINGS[setting]
    one: Any = made(Chain)
    model: Any = fs.shard(made(Chain), wrap=Chain.wrap, poison=True, **settings)
    old = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    ones = {name: 0.5 * p.detach() for name, p in one.named_parameters()}
    for rank in range(dist.get_world_size()):
        (square(one, batch(rank)) / dist.get_world_size()).backward()
    squares = [(p - ones[name]).square().sum() for name, p in one.named_parameters()]
    (0.1 * torch.stack(squares).sum()).backward()
    square(model, batch(dist.get_rank())).backward()
    for at, (name, p) in enumerate(model.named_parameters()):
        if at % 2:
            p.grad.add_(p, alpha=0.2)  # without no_grad
            torch._foreach_sub_([p.grad], [0.2 * old[name]])
            continue
        with torch.no_grad():
            p.grad.add_(p - old[name], alpha=0.2)
    assert unlike_gradients(model, one) == []
