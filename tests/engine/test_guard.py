"""Functions that accept a shard: those that treat elements one by one, and no others."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import get_rank as rank
from torch.nn import functional

import fullshard as fs
from fullshard.engine.parameter import ShardedGradient, ShardedParameter, ShardedTensor
from support.ranks import on_ranks
from support.scripts import Run, Tiny, compare, error_of, sharded_run

Function = Callable[[torch.Tensor], Any]


def trained(**config):
    """Returns a sharded model after a backward."""
    run, model = sharded_run(**config)
    run.loss(model, 0).backward()
    return run, model


# ---- elementwise ------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Function] = {
    "p * 2 + 1": lambda p: p * 2 + 1,
    "1 - p / 3": lambda p: 1 - p / 3,
    "2 / p": lambda p: 2 / p,
    "p ** 2": lambda p: p**2,
    "-p": lambda p: -p,
    "p - p.detach().clone()": lambda p: p - p.detach().clone() * 0.5,
    "p.data": lambda p: p.data,
    "abs().sqrt()": lambda p: p.abs().sqrt(),
    "clamp": lambda p: p.clamp(-0.1, 0.1),
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "masked_fill": lambda p: p.masked_fill(p < 0, 0.0),
    "mask assigned": lambda p: _assigned(p),
    "sign times mask": lambda p: p.sign() * (p.abs() > 0.05),
    "lerp": lambda p: torch.lerp(p, torch.ones_like(p), 0.25),
    "addcdiv": lambda p: torch.addcdiv(p, p, p.abs() + 1, value=0.5),
    "maximum": lambda p: torch.maximum(p, -p),
    "tanh, exp, log1p": lambda p: p.tanh().exp().log1p(),
    "nan_to_num": lambda p: (p * math.inf).nan_to_num(0.0, 1.0, -1.0),
    "float, double": lambda p: p.float().double(),
    "to": lambda p: p.to(torch.float32).to("cpu"),
    "view": lambda p: p.view(-1) * 2,
    "full_like": lambda p: torch.full_like(p, 3.0) + p,
    "new_zeros": lambda p: p.new_zeros(p.shape) + p,
    "scalar tensor": lambda p: p * torch.tensor(0.5, dtype=torch.float64),
    "out": lambda p: torch.add(p, 1.0, out=torch.empty_like(p)),
    "foreach": lambda p: torch._foreach_add([p, p], [p.detach(), p.detach()], alpha=2.0)[1],
    "foreach in place": lambda p: _foreach_in_place(p),
    "in place": lambda p: p.clone().mul_(2).add_(1).clamp_(min=0.5),
    "operators in place": lambda p: _operators_in_place(p),
    "detach_": lambda p: (p.clone() if p.requires_grad else p).detach_(),
}


def _assigned(p):
    copied = p.clone()
    copied[copied < 0] = 5.0
    return copied


def _foreach_in_place(p):
    copied = [p.clone(), p.clone()]
    torch._foreach_mul_(copied, 0.5)
    torch._foreach_addcmul_(copied, [p, p], copied, value=-1.0)
    return copied[1]


def _operators_in_place(p):
    copied = p.clone()
    copied += 1
    copied *= p
    copied /= 3
    copied -= 0.25
    return copied


@torch.no_grad()
def elementwise(run):
    """Applies every function to a parameter and to a gradient; returns full results."""
    model = run.shard(run.model())
    with torch.enable_grad():
        run.loss(model, 0).backward()
    results = {}
    for name, function in ELEMENTWISE.items():
        for weight in (model.blocks[1].mid.weight, model.blocks[1].up.bias, model.scale):
            for tensor in (weight, weight.grad):
                result = function(tensor)
                if run.sharded:
                    is_gradient = isinstance(tensor, ShardedGradient)
                    assert type(result) is (ShardedGradient if is_gradient else ShardedTensor), name
                    result = result.full_tensor()
                results.setdefault(name, []).append(result.reshape(-1))
    return run.result(model, **results)


def test_elementwise_functions_return_the_shard_of_the_result(ranks):
    ranks(2)(compare, elementwise)


@on_ranks(2)
def test_a_plain_tensor_takes_only_dtype_and_device_from_a_shard():
    _, model = trained()
    plain = torch.ones(3, 2, dtype=torch.float32, requires_grad=True)
    for tensor in (model.blocks[1].mid.weight, model.scale):
        for found in (plain.to(tensor), plain.type_as(tensor)):
            assert type(found) is torch.Tensor
            assert (found.dtype, tuple(found.shape)) == (torch.float64, (3, 2))
            assert found.requires_grad
        assert type(tensor.detach().to(plain)) is type(tensor.detach().type_as(plain))


# ---- the whole tensor -------------------------------------------------------------------------

NEEDS_THE_WHOLE: dict[str, Function] = {
    "sum along a dimension": lambda p: p.sum(0),
    "mean along a dimension": lambda p: p.mean(dim=1, keepdim=True),
    "argmax": lambda p: p.argmax(),
    "cumsum": lambda p: p.cumsum(0),
    "sort": lambda p: p.sort(),
    "indices by where": lambda p: torch.where(p > 0),
    "topk": lambda p: p.view(-1).topk(3),
    "softmax": lambda p: p.softmax(0),
    "item": lambda p: p.item(),
    "bool": lambda p: bool(p > 0),
    "float": lambda p: float(p),
    "len": lambda p: len(p),
    "iteration": lambda p: list(p),
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, p),
    "indexing": lambda p: p[0],
    "slicing": lambda p: p[2:4],
    "assigning a slice": lambda p: _assign_slice(p),
    "matmul": lambda p: p @ torch.ones(22, 1, dtype=torch.float64),
    "linear": lambda p: functional.linear(torch.ones(1, 22, dtype=torch.float64), p),
    "transpose": lambda p: p.t(),
    "flatten": lambda p: p.flatten(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "split": lambda p: p.split(2),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "layer_norm": lambda p: functional.layer_norm(p, (1,)),
    "mse_loss": lambda p: functional.mse_loss(p, p),
    "norm along a dimension": lambda p: p.norm(dim=1),
    "linalg.norm of an order": lambda p: torch.linalg.norm(p, 2),
    "linalg.svdvals": lambda p: torch.linalg.svdvals(p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "dropout": lambda p: functional.dropout(p),
    "randn_like": lambda p: torch.randn_like(p),
    "normal_": lambda p: p.data.normal_(),
    "nn.init.normal_": lambda p: nn.init.normal_(p),
    "nn.init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "nn.init.kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p),
    "nn.init.orthogonal_": lambda p: nn.init.orthogonal_(p),
    "nn.init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "nn.init.eye_": lambda p: nn.init.eye_(p),
    "a row of another shape": lambda p: p.data * torch.ones(22, dtype=torch.float64),
    "a whole tensor": lambda p: p.data.add_(torch.ones(22, 22, dtype=torch.float64)),
    "copy of a whole tensor": lambda p: p.data.copy_(torch.ones(22, 22, dtype=torch.float64)),
    "numpy": lambda p: p.detach().numpy(),
    "share_memory_": lambda p: p.share_memory_(),
    "backward": lambda p: (p * 2).backward(torch.ones(p.shape, dtype=torch.float64)),
    "autograd.grad": lambda p: torch.autograd.grad(torch.ones(()), p),
    "backward for some": lambda p: torch.ones((), requires_grad=True).backward(inputs=[p]),
    "a node": lambda p: torch.autograd.graph.get_gradient_edge(p),
    "a node of a view": lambda p: p.view_as(p).grad_fn,
    "view of the whole shape": lambda p: p.view(22, 22),
    "reshape to the whole": lambda p: p.reshape(1, 484),
    "new_tensor": lambda p: p.new_tensor(p),
}


def _assign_slice(p):
    p.data[0] = 0.0


def refusals():
    """Returns the errors, and checks that no element changed."""
    _, model = trained()
    weight = model.blocks[0].mid.weight
    before = weight.detach().to_local().clone()
    texts = {name: error_of(partial(f, weight)) for name, f in NEEDS_THE_WHOLE.items()}
    assert torch.equal(weight.to_local(), before)
    for name in ("sum along a dimension", "indexing", "assigning a slice"):
        texts[f"{name}, of a gradient"] = error_of(partial(NEEDS_THE_WHOLE[name], weight.grad))
    dims = [lambda: weight.grad.norm(dim=0), lambda: weight.grad.norm("nuc")]
    dims += [lambda: weight.grad.norm(0), lambda: torch.linalg.matrix_norm(weight.grad)]
    for index, function in enumerate(dims):
        texts[f"norm of a gradient, {index}"] = error_of(function)
    return texts


def test_functions_that_need_the_whole_tensor_name_it_and_the_way_out(ranks, snapshot):
    texts = ranks(2)(refusals)
    for found in texts:
        wrong = {name: text for name, text in found.items() if not text.startswith("Sharded")}
        assert not wrong
    assert all("'blocks.0.mid.weight'" in text for text in texts[0].values() if "order" not in text)
    assert texts[0] == snapshot


@on_ranks(2)
def test_shards_of_other_elements_do_not_mix():
    """Shards of one shape that hold other elements of their parameters."""
    run = Run(2, rank())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 40, bias=False)).double()
    run.shard(model)
    first, second = model[0].weight, model[1].weight
    one, two = fs.sharding(first), fs.sharding(second)
    assert (one.start, one.stop) != (two.start, two.stop)
    blocks = run.shard(run.model()).blocks
    twin, other = blocks[0].up.weight, blocks[1].up.weight  # of two units, sharded alike
    other.data.copy_(twin.data)
    assert (other.full_tensor() - twin.full_tensor()).abs().max() == 0
    mid, down = blocks[0].mid.weight, blocks[0].down.weight
    texts = [
        error_of(lambda: first.data.copy_(second.data)),
        error_of(lambda: torch._foreach_add([mid, mid], [mid, down])),
    ]
    assert all("expected shards of the same range" in text for text in texts)
    assert texts[1].startswith("ShardedTensorError: _foreach_add: ")


# ---- parameters that are not sharded ----------------------------------------------------------

RANDOM = ("dropout", "randn_like", "normal_", "nn.init.normal_", "nn.init.xavier_uniform_")
AUTOGRAD = (
    "backward",
    "autograd.grad",
    "backward for some",
    "a node",
    "a node of a view",
    "iteration",
)


@torch.no_grad()
def on_whole_parameters(run):
    """Applies every function that shards refuse to unsharded parameters."""
    model = run.shard(run.model(), strategy="no_shard")
    weight = model.blocks[0].mid.weight
    skipped = ("item", "bool", "float", "share_memory_", "layer_norm", "new_tensor", *AUTOGRAD)
    random = (*RANDOM, "nn.init.kaiming_uniform_", "nn.init.orthogonal_", "nn.init.trunc_normal_")
    results = {}
    for name, function in NEEDS_THE_WHOLE.items():
        if name in random and run.sharded:
            assert error_of(partial(function, weight)).startswith("ShardedTensorError"), name
        elif name not in (*skipped, *random):
            results[name] = function(weight.detach() * 1.5)
    return {name: r for name, r in results.items() if isinstance(r, torch.Tensor | float | bool)}


def test_unsharded_parameters_accept_all_functions_but_random_fills(ranks):
    ranks(2)(compare, on_whole_parameters)


class Seen(torch.autograd.Function):
    """Reads a weight but returns no gradient for it."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * bool(weight.numel())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Summed(torch.autograd.Function):
    """The guard does not see the arguments of a custom function."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@on_ranks(2)
def test_a_loss_of_shards_outside_forward_is_refused():
    texts = []
    for strategy in ("full_shard", "no_shard"):
        run, model = trained(strategy=strategy)
        for loss in (
            lambda p: p.pow(2).sum(),
            lambda p: p.norm(),
            lambda p: p.full_tensor().sum(),
            lambda p: p[None].mean(),
        ):
            texts.append(error_of(lambda: sum(map(loss, model.parameters())).backward()))  # noqa: B023
        assert model.scale.detach().pow(2).dim() == (0 if strategy == "no_shard" else 1)
        run.loss(model, 1).backward()
        if run.sharded and strategy == "full_shard":
            with fs.unsharded(model):
                inside = model.scale.sum() + model.head.weight.sum()
            assert "its unit's forward: expected none" in error_of(inside.backward)
            with fs.unsharded(model):
                assert "expected none" in error_of(model.scale.sum().backward)
    assert "expected none" in error_of(Summed.apply(model.scale).backward)
    x = torch.ones(2, requires_grad=True)
    Seen.apply(x, model.scale).sum().backward()
    assert x.grad is not None
    cut, whole = texts[:4], texts[4:]
    for name, text in zip(["sum", "norm", "full_tensor", "__getitem__"], cut, strict=True):
        wanted = "a whole tensor" if text == cut[3] else "tensors with autograd history"
        assert text.startswith(f"ShardedTensorError: {name}: expected {wanted}")
    assert all(text.startswith("NO ERROR") for text in whole)  # see test_programs.py


@torch.no_grad()
def writes_without_the_guard(run):
    """Writes rows and views of unsharded parameters between steps."""
    model = run.shard(run.model(), strategy="no_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.head.weight[0].zero_()
        model.embed.weight[1:2] = 3.0
        model.blocks[0].mid.weight.t().add_(0.1)
        with torch.enable_grad():
            run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


def test_rows_of_unsharded_parameters_may_be_written_between_steps(ranks):
    ranks(2)(compare, writes_without_the_guard)


# ---- numbers of full tensors ------------------------------------------------------------------

NUMBERS: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: torch.mean(x),
    "abs().mean()": lambda x: x.abs().mean(),
    "abs().max()": lambda x: x.abs().max(),
    "min": lambda x: x.min(),
    "amax": lambda x: torch.amax(x),
    "std": lambda x: x.std(),
    "var": lambda x: torch.var(x),
    "var of all": lambda x: x.var(unbiased=False),
    "std of all": lambda x: x.std(correction=0),
    "isnan().any()": lambda x: x.isnan().any(),
    "isinf().any()": lambda x: torch.isinf(x).any(),
    "isfinite().all()": lambda x: torch.isfinite(x).all(),
    "(x > 0).any()": lambda x: (x > 0).any(),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0.01),
    "(x > 0).sum()": lambda x: (x > 0).sum(),
    "pow(2).sum()": lambda x: x.pow(2).sum(),
    "pow(exponent=3).sum()": lambda x: torch.pow(x, exponent=3).sum(),
    "(2**x).sum()": lambda x: (2**x).sum(),
    "square().mean()": lambda x: x.square().mean(),
    "(x * 3).pow(2).sum()": lambda x: (x * 3).pow(2).sum(),
    "norm": lambda x: x.norm(),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "max of two": lambda x: torch.max(x, -x).sum(),
    "item": lambda x: torch.tensor(x.sum().detach().item() + float(x.data.abs().max())),
}


def numbers_of(run, **config):
    """Returns all numbers of full parameters and gradients, with NaN, and with infinities."""
    model = run.shard(run.model(), **config)
    run.loss(model, 0).backward()
    tensors = [model.blocks[1].mid.weight, model.blocks[1].up.bias, model.scale]
    tensors += [p.grad for p in tensors]
    found = {}
    for bad in (None, math.nan, math.inf):
        for tensor in tensors:
            if bad is not None:
                with torch.no_grad():
                    tensor[tensor == tensor.detach().abs().max()] = bad
            for name, function in NUMBERS.items():
                if name in ("std", "var") and (tensor is tensors[2] or tensor is tensors[5]):
                    continue  # torch warns of one element
                value = function(tensor).detach()
                assert type(value) is torch.Tensor, name
                found.setdefault(f"{name} {bad}", []).append([str(value.dtype), value])
    return found


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", ["shared", "direct", "c10d", "no_shard", "replicas"])
def test_numbers_of_parameters_and_gradients_are_those_of_full_tensors(ranks, transport):
    strategies = {"no_shard": "no_shard", "replicas": "hybrid_shard"}
    config: dict[str, Any] = {"transport": transport}
    if transport in strategies:
        config = {"strategy": strategies[transport]}
        config |= {"replicate": 2, "shard": 2} if transport == "replicas" else {}
    ranks(4 if transport == "replicas" else 2)(compare, partial(numbers_of, **config))


@on_ranks(2)
def test_one_rank_alone_can_ask_for_finiteness_and_sums_of_squares():
    """Answers come from cached norms: a collective on one rank would hang."""
    _, model = trained()
    if rank() == 0:
        for p in model.parameters():
            if p.grad is not None:
                assert not p.grad.isnan().any()
                assert torch.isfinite(p.grad.data).all()
                torch.testing.assert_close(p.grad.pow(2).sum(), p.grad.norm() ** 2)


@pytest.mark.parametrize(
    ("num_steps", "said"),
    [
        (1, "expected the same call on every rank"),  # the other rank asks for the order of units
        (2, "which this rank did not reach"),
    ],
)
@on_ranks(2)
def test_a_collective_question_of_one_rank_is_refused_on_all(num_steps, said):
    """Rank 0 asks for a value that needs all ranks; the other starts its next forward."""
    run, model = trained()
    for _ in range(num_steps - 1):
        run.loss(model, 0).backward()

    def ask_and_train():
        if rank() == 0:
            model.head.weight.detach().abs().mean()
        run.loss(model, 1).backward()

    assert said in error_of(ask_and_train)


@on_ranks(2)
def test_questions_that_differ_between_ranks_are_refused_on_all():
    _, model = trained()
    weight = model.head.weight.detach()
    text = error_of(lambda: weight.sum() if rank() == 0 else weight.abs().max())
    assert "expected the same call on every rank" in text


# ---- how a shard is displayed -----------------------------------------------------------------


def shown():
    """Returns reprs and properties of tensors."""
    _, model = trained()
    weight = model.blocks[0].mid.weight
    assert isinstance(weight, ShardedParameter)
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    return {
        "repr": repr(weight),
        "format": f"{weight.grad}",
        "str": str(weight.detach() * 2),
        "module": repr(model.blocks[0].mid),
        "shape": tuple(weight.shape),
        "ndim": weight.ndim,
        "numel": weight.numel(),
        "grad": tuple(weight.grad.shape),
        "local": type(weight.to_local()).__name__,
        "full": tuple(weight.grad.full_tensor().shape),
        "dtype": str(weight.dtype),
        "hash": len({weight, model.scale, weight}),
        "is": weight in [model.scale.grad, weight][1:],
    }


def test_a_shard_says_that_it_is_one(ranks, snapshot):
    assert ranks(2)(shown) == snapshot


def _set_data(tensor, data):
    tensor.data = data


@on_ranks(2)
def test_a_gradient_stays_the_view_that_the_next_backward_fills():
    """p.grad stays one view of the flat gradient shard unless the user keeps it."""
    run, model = trained()
    weight = model.blocks[0].mid.weight
    first = weight.grad
    assert weight.grad is first
    weight.grad.data = torch.zeros_like(weight)
    assert weight.grad.to_local().abs().sum() == 0
    assert error_of(lambda: _set_data(weight.grad, torch.zeros(3))).startswith("ShardedTensorError")
    weight.grad.data = weight.grad.data.add_(1.0)
    kept = [weight.grad.data]
    assert "no other tensor that shares" in error_of(lambda: _set_data(weight.grad, 2 * kept[0]))
    assert kept.pop().to_local().eq(1).all()
    weight.grad.data = weight.grad.data * 0
    weight.grad = None
    run.loss(model, 1).backward()
    assert weight.grad is not first
    assert first.to_local().abs().sum() == 0
    place = weight.grad.to_local().data_ptr()
    weight.grad = None
    run.loss(model, 2).backward()
    assert weight.grad.to_local().data_ptr() == place
    other = Tiny()
    assert type(other.scale) is nn.Parameter


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
@on_ranks(2)
def test_plain_tensors_are_unaffected_by_sharded_models(kind):
    trained()
    plain = torch.ones(3)
    tensor = nn.Parameter(plain) if kind is nn.Parameter else plain
    assert tensor.sum().item() == 3
    torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]).step()
