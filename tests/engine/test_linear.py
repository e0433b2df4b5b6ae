"""Linear layers in every role: their gradients, their recomputes, their evaluations."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from fullshard.engine.engine import is_sharded
from support.models import backward_of, perturbed
from support.parity import assert_parity, unlike_gradients
from support.ranks import on_ranks

TRANSPORTS = ("shared", "direct")
WIDTH, VOCAB = 130, 132  # a weight of these is large


class Mix(nn.Module):
    """Linear layers in every role: plain, used twice, tied, frozen, subclassed, outside of use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, WIDTH // 2)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.own = Own(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = torch.tanh(self.plain(self.embed(ids)))
        x = torch.cat([x[..., : WIDTH // 2], self.small(x)], dim=-1)
        x = self.frozen(self.own(self.twice(torch.tanh(self.twice(x)))))
        return self.head(NoGradient.apply(x, self.nothing))


class Own(nn.Linear):
    """Somebody's own layer: left alone."""

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias) * 2


class NoGradient(torch.autograd.Function):
    """Passes x on; its second input gets no gradient at all."""

    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def mix():
    torch.manual_seed(0)
    return perturbed(Mix().double())


def ids_of(step, rank):
    return torch.randint(
        0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank)
    )


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_gradients_of_linear_layers_are_those_of_one_process(transport, number):
    """Of one micro-batch, and of three, of which the last one's backward reduces."""

    def work(model, step, rank):
        losses = []
        for at in range(number):
            is_deferred = is_sharded(model) and at < number - 1
            with fs.no_sync(model) if is_deferred else nullcontext():
                losses.append(model(ids_of(number * step + at, rank)).square().mean())
                losses[-1].backward()
        return torch.stack(losses).detach()

    assert_parity(mix, work, {"transport": transport}, kinds=("sgd",))


def plain(**settings):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB))
    return fs.shard(layers, wrap="none", **settings)


@on_ranks(2)
def test_a_backward_that_asks_for_inputs_leaves_no_gradient():
    """backward(inputs=) of one weight's unit mates, then of everything."""
    model = plain(poison=True)
    x = torch.randn(3, WIDTH, requires_grad=True)
    model(x).square().mean().backward(inputs=[x])
    before = [p.grad is None for p in model.parameters()]
    model(x).square().mean().backward()
    assert before == [True] * 4
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())


class Checkpointed(nn.Module):
    """Blocks that run again in backward, whose last layer's output nobody wants again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_recompute_makes_no_product_that_torch_would_not_make(transport):
    """Products of one process and of a rank, and whose gradients differ."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    torch.manual_seed(0)
    one = Checkpointed().double()
    torch.manual_seed(0)
    many = fs.shard(Checkpointed().double(), wrap=["Sequential"], poison=True, transport=transport)
    counts = []
    for model in (one, many):
        with Products() as products:
            model(x).square().sum().backward()
        counts.append(products.number)
    alone, sharded, wrong = counts[0], counts[1], unlike_gradients(many, one, rtol=1e-12)
    assert not wrong
    assert sharded == alone == 2 * (2 + 1 + 4) - 1  # nobody wants a gradient of x


class Switches(nn.Module):
    """Turns gradients on inside its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        with torch.enable_grad():
            return self.layers[1](torch.tanh(self.layers[0](x)))


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_enable_gradients_inside():
    torch.manual_seed(0)
    model = Switches().double()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    want = model(x).detach()
    fs.shard(model, wrap=(nn.Linear,), transport="c10d", poison=True)
    with torch.inference_mode():
        found = model(x).clone()
    model(x).sum().backward()
    torch.testing.assert_close(found, want)


class Halved(nn.Module):
    """Writes into what its layer returned, a view of a product where three dimensions came in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x.transpose(0, 1))
        y /= 2
        y[0] += 1
        return torch.tanh(y.transpose(0, 1))


def halved():
    torch.manual_seed(0)
    return nn.Sequential(*[Halved() for _ in range(3)]).double()


def mean_square_of_three_dimensions(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)
    return backward_of(model(x).square().mean())


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_the_output_of_a_large_layer_may_be_written_in_place(transport):
    for recompute in ("none", "block"):
        given = {"activation_checkpointing": recompute, "wrap": "Halved", "transport": transport}
        assert_parity(halved, mean_square_of_three_dimensions, given, kinds=("sgd",))
