"""Large linear layers: recomputes, evaluations, outputs that are written; a gradient of None."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from support.models import backward_of
from support.parity import assert_parity, unlike_gradients
from support.ranks import on_ranks

TRANSPORTS = ("shared", "direct")
WIDTH = 130  # a weight of this is large


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


class NoGradient(torch.autograd.Function):
    """Passes x on; its second input gets no gradient at all."""

    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Lost(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(NoGradient.apply(x, self.nothing))


def lost():
    torch.manual_seed(0)
    return nn.Sequential(Lost(), Lost()).double()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_parameter_without_a_gradient_of_its_own_function_is_as_in_one_process(transport):
    given = {"transport": transport, "wrap": "Lost"}
    assert_parity(lost, mean_square_of_three_dimensions, given, kinds=("sgd",))
