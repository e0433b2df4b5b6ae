"""Losses that modules keep as attributes enter their units like outputs."""

import contextlib
import copy
import weakref
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fullshard as fs
from fullshard.engine.attributes import MAX_ITEMS, ModuleTensors, own_modules
from fullshard.engine.engine import engine_of
from fullshard.errors import ShardedTensorError, SlotError
from support.grid import chequered
from support.models import backward_of, perturbed
from support.parity import assert_parity, unlike_gradients
from support.ranks import on_ranks

WIDTH = 8


class Router(nn.Module):
    """Keeps its own loss without returning it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(WIDTH))
        self.kept: Any = None if how == "tensor" else {"list": [], "mapping": {}}[how]

    def forward(self, x):
        loss = (x * self.scale).square().mean()
        self.kept = {"tensor": loss, "list": [loss], "mapping": {"loss": loss}}[self.how]
        return x * self.scale

    def loss(self):
        return {"tensor": lambda k: k, "list": lambda k: k[0], "mapping": lambda k: k["loss"]}[
            self.how
        ](self.kept)


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), Router(how)

    def forward(self, x):
        return self.router(self.linear(x).tanh())


def built(how):
    torch.manual_seed(0)
    blocks = [Block(how) for _ in range(5)]
    return perturbed(nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).double())


def backward(model, step, rank):
    """Backward of the output's loss plus kept losses; in the second step, of kept losses only."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    output = model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64))
    kept = [block.router.loss() for block in list(model)[:5]]
    return backward_of(kept[0] + kept[2] if step == 1 else output.square().mean() + sum(kept))


@pytest.mark.parametrize(
    ("settings", "how"),
    chequered(
        [
            {"transport": "shared"},
            {"transport": "direct"},
            {"transport": "direct", "forward_prefetch": 0, "backward_prefetch": 0},
        ],
        ["tensor", "list", "mapping"],
        3,
    ),
)
@on_ranks(2)
def test_a_loss_kept_by_a_module_has_the_gradients_of_one_process(how, settings):
    assert_parity(partial(built, how), backward, {"wrap": ["Block"], **settings}, kinds=("sgd",))


class Wrapping(nn.Module):
    """Keeps functions with the attributes of its layer and of the model, as torch.compile does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.call = wraps(self.linear)(lambda x: self.linear(x))
        self.linked = weakref.proxy(self.linear)
        self.model: Any = None

    def forward(self, x):
        return self.call(x).tanh() + self.linked(x)


class Recomputed(nn.Sequential):
    """Its blocks' weights stay in place after a forward in backward."""

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def wrapping():
    torch.manual_seed(0)
    return Recomputed(*(Wrapping() for _ in range(4)), nn.Linear(WIDTH, WIDTH).double())


def backward_of_wrapped(model, step, rank):
    model[1].model = wraps(model)(lambda x: model(x))
    generator = torch.Generator().manual_seed(10 * step + rank)
    return backward_of(model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)).sum())


@pytest.mark.parametrize("transport", ["shared", "c10d"])
@on_ranks(2)
def test_functions_that_wrap_a_module_are_kept_without_its_weights(transport):
    settings = {"transport": transport, "wrap": ["Wrapping"]}
    assert_parity(wrapping, backward_of_wrapped, settings, kinds=("sgd",))


class Unchecked(torch.autograd.Function):
    """A product whose backward keeps the weight without autograd's checks."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.weight.T, ctx.x.T @ grad


class Teller(nn.Module):
    """Appends a loss, made after its output, to a list that is not an attribute."""

    def __init__(self, tell, product=torch.matmul):
        super().__init__()
        self.tell, self.product = tell.append, product
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        output = x @ self.weight
        self.tell(self.product(x, self.weight).square().mean())
        return output


@pytest.mark.parametrize("transport", ["direct", "c10d"])
@pytest.mark.parametrize("depth", [0, 1])
@on_ranks(2)
def test_weights_are_not_read_while_another_unit_uses_their_slot(transport, depth):
    """Backward reads weights of a unit that it has not entered; the next backward is right."""
    settings = {"transport": transport, "forward_prefetch": depth, "backward_prefetch": depth}
    torch.manual_seed(0)
    told: list[torch.Tensor] = []
    one = nn.Sequential(*(Teller(told) for _ in range(5))).double()
    many = fs.shard(copy.deepcopy(one), wrap=["Teller"], poison=False, **settings)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    loss = many(x).sum()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        (loss + sum(told)).backward()
    many.zero_grad()
    for model in (one, many):
        model(x).sum().backward()
    assert unlike_gradients(many, one, rtol=1e-11) == []


class OfView(Unchecked):
    @staticmethod
    def forward(ctx, x, weight):
        return Unchecked.forward(ctx, x, weight.detach())


class OfArray(Unchecked):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.array = weight.detach().numpy()
        return Unchecked.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.weight = torch.from_numpy(ctx.array)
        return Unchecked.backward(ctx, grad)


@pytest.mark.parametrize(
    ("product", "wanted"),
    [
        (
            Unchecked,
            "T of '1.weight', kept from its unit's forward: expected it to be used inside 1",
        ),
        (OfView, "T of '1.weight', kept from its unit's forward: expected it to be used inside 1"),
        (OfArray, "1.weight: its gradient arrived while the slot of 1 contained another unit"),
    ],
)
@on_ranks(2)
def test_a_gradient_while_another_unit_uses_the_slot_is_an_error(product, wanted):
    """Covers a backward of only such losses, in which autograd checks nothing."""
    told: list[torch.Tensor] = []
    model = nn.Sequential(*(Teller(told, product.apply) for _ in range(5)))
    fs.shard(model, wrap=["Teller"], transport="direct")(torch.randn(4, WIDTH))
    with pytest.raises((SlotError, ShardedTensorError), match=f"^{wanted}"):
        told[1].backward()


KEEPS = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t().t(),
    "detached": torch.Tensor.detach,
    "placed": lambda w: w,  # as a DTensor
}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("transport", "how"), chequered(["direct", "c10d", "shared"], KEEPS, 4))
@on_ranks(2)
def test_a_weight_kept_by_a_hook_never_shows_another_units_values(transport, how):
    """Finds kept weights that differ after the forward, and the errors of reading them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    whole = [layer.weight.detach().clone() for layer in model]
    kept = dict.fromkeys(range(5))
    for at, layer in enumerate(model):
        layer.register_forward_hook(
            lambda layer, *_, at=at: kept.update({at: KEEPS[how](layer.weight)})
        )
    settings = {}
    if how == "placed":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {str(at): ColwiseParallel() for at in kept})
        settings["mesh"] = mesh["shard"]
    fs.shard(model, wrap=["Linear"], transport=transport, **settings)  # its hook runs after these
    said, wrong = [], []
    modes = (torch.device("cpu"), FlopCounterMode(display=False), contextlib.nullcontext())
    for mode, grad in ((mode, grad) for mode in modes for grad in (False, True)):
        with torch.set_grad_enabled(grad), mode:
            loss = model(torch.ones(2, WIDTH)).sum()
        for at, weight in kept.items():
            try:
                with torch.no_grad():
                    is_own = torch.equal(local(weight.square()), whole[at].square())
                wrong += [] if is_own else [at]
            except ShardedTensorError as error:
                said.append(str(error).partition(",")[0])
    loss.backward()
    assert not wrong
    assert ("square of '2.weight'" in said) is (transport != "shared")


class Transposing(nn.Linear):
    def forward(self, input):
        return input @ self.weight.t()  # autograd saves it for backward


@pytest.mark.parametrize(
    ("start", "wanted"),
    [(0, [(5, 0)] * 6), (4, [(0, 0)] * 4 + [(0, 3)] * 2)],  # later ones are not detected
)
@on_ranks(2)
def test_views_kept_by_hooks_are_refused_but_not_those_of_autograd(start, wanted):
    """Counts, per step, units that search for kept views, and kept weights with wrong values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Transposing(WIDTH, WIDTH, bias=False) for _ in range(5)))
    whole = [layer.weight.detach().clone() for layer in model]
    kept, found = {}, []
    for at, layer in enumerate(model):
        layer.register_forward_hook(
            lambda layer, *_, at=at: (
                (len(found) >= start and kept.update({at: layer.weight.t()})) or None
            )
        )
    fs.shard(model, wrap=["Transposing"], transport="direct")
    for _ in range(6):
        out, read = model(torch.ones(2, WIDTH)).sum(), []
        for at, weight in kept.items():
            with contextlib.suppress(ShardedTensorError):
                read += [] if torch.equal(weight.detach().t(), whole[at]) else [at]
        out.backward()
        units = engine_of(model).units
        found.append((sum(unit.has_kept_views for unit in units), len(read)))
        kept.clear()
    assert found == wanted


def test_only_attributes_that_may_hold_tensors_are_scanned():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    inner = module[1]
    kept = ModuleTensors(own_modules(module, {id(inner)}))
    module.late, inner.other, module.name, module.history = None, torch.ones(1), "x", []
    assert kept.values() == []
    module.late = loss = torch.ones(1)  # not a new attribute: it was None
    module.history.extend([0.0] * (MAX_ITEMS + 1))
    assert [value is loss for value in kept.values()] == [True]
    module.more = parts = [loss]
    assert [id(value) for value in kept.values()] == [id(loss), id(parts)]


class Normalized(nn.Embedding):
    """Its backward reads the weight, unlike that of an embedding."""

    def forward(self, input):
        return nn.functional.embedding(input, nn.functional.normalize(self.weight, dim=-1))


@on_ranks(2)
def test_an_embedding_that_computes_with_its_weight_can_read_it_in_backward():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(Normalized(11, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    one = build().double()
    many = fs.shard(
        build().double(), wrap=["Normalized", "Linear"], transport="direct", poison=True
    )
    for model in (one, many):
        model(torch.arange(8)).square().sum().backward()
    assert unlike_gradients(many, one, rtol=1e-11) == []
