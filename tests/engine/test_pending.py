"""Gradients that wait for their sum, that users keep, and that users drop."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.engine.engine import engine_of, is_sharded
from fullshard.errors import EngineError
from support.grid import chequered, marked
from support.models import CHAIN, chain, mean_square, vectors
from support.parity import whole_gradients
from support.ranks import on_ranks

SETTINGS = (
    {"transport": "c10d"},
    {"transport": "direct"},
    {"transport": "shared"},
    {"strategy": "no_shard"},
    {"grad_reduction": "sum", "transport": "direct"},
)


def backward(model, step, *, defers=False, scale=1.0):
    """Runs a rank's backward; in one process, those of all ranks."""
    ranks = [dist.get_rank()] if is_sharded(model) else range(dist.get_world_size())
    with fs.no_sync(model) if defers and is_sharded(model) else nullcontext():
        for rank in ranks:
            loss = CHAIN.loss(model(**CHAIN.batch(step, rank)))
            (scale * loss / len(ranks)).backward()


def assert_same_gradients(model, alone, scale=1.0):
    found = whole_gradients(model)
    for name, param in alone.named_parameters():
        if param.grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], scale * param.grad, rtol=0, atol=1e-11)


def both(settings):
    model = fs.shard(chain(), poison=True, **settings)
    total = dist.get_world_size() if settings.get("grad_reduction") == "sum" else 1
    return model, chain(), total


# ---- waiting gradients may be dropped but not read


DROPS: tuple[Callable[[Any], Any], ...] = (
    lambda model: None,
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False),
    lambda model: model.zero_grad(),
    lambda model: setattr(model.stem.weight, "grad", None),
    lambda model: delattr(model.stem.weight, "grad"),
)


@pytest.mark.short(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_dropping_gradients_between_micro_batches_is_as_in_one_process(settings):
    for at, drop in enumerate(DROPS, SETTINGS.index(settings)):
        earlier = at % 2 == 0  # over the settings, each way to drop comes with and without
        model, alone, total = both(settings)
        for which in (model, alone):
            if earlier:
                backward(which, 0)
            backward(which, 1, defers=True)
            backward(which, 2, defers=True)
            drop(which)
            backward(which, 3, defers=True)
            backward(which, 4)
        assert_same_gradients(model, alone, total)
        for which in (model, alone):
            backward(which, 5, defers=True)
            which.zero_grad()
            backward(which, 6)
        assert_same_gradients(model, alone, total)


@on_ranks(2)
def test_zeros_stay_if_ranks_reached_different_units():
    """AdamW decays parameters with gradients of zeros."""
    model, alone = fs.shard(chain(), transport="shared"), chain()
    for which in (model, alone):
        ranks = [dist.get_rank()] if which is model else range(2)
        for defers in (True, False):
            with fs.no_sync(model) if defers and which is model else nullcontext():
                for rank in ranks:
                    scores = which(**CHAIN.batch(0, rank), order=[rank if defers else 2])
                    (CHAIN.loss(scores) / len(ranks)).backward()
            if defers:
                which.zero_grad(set_to_none=False)
    assert_same_gradients(model, alone)


@on_ranks(4)
def test_gradients_that_wait_for_replicas_are_dropped_too():
    for outer_only in (True, False):
        model = fs.shard(chain(), strategy="hybrid_shard", replicate=2, transport="direct")
        alone = chain()
        backward(alone, 1)
        with fs.no_sync(model, outer_only=outer_only):
            backward(model, 0)
        with pytest.raises(EngineError, match="under no_sync"):
            fs.clip_grad_norm_(model, 1.0)
        model.zero_grad()
        backward(model, 1)
        assert_same_gradients(model, alone)


USES = {
    "SGD.step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "AdamW.step": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step(),
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "to_local": lambda model: fs.clip_grad_norm_(model, 1.0),
    "clamp": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "mul": lambda model: [p.grad.mul_(2.0) for p in model.parameters()],
    "add": lambda model: [p.data.add_(p.grad) for p in model.parameters()],
    "foreach_add": lambda model: torch._foreach_add_(
        [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]
    ),
    "isfinite": lambda model: [p.grad.isfinite().all() for p in model.parameters()],
    "deepcopy": lambda model: copy.deepcopy([p.grad for p in model.parameters()]),
    "detach": lambda model: [p.grad.detach() for p in model.parameters()],
    "full_tensor": lambda model: [p.grad.full_tensor() for p in model.parameters()],
}


@pytest.mark.short(2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_reading_waiting_gradients_is_refused(settings):
    model, alone, total = both(settings)
    weights = [p.to_local().clone() for p in model.parameters()]
    for which in (model, alone):
        backward(which, 0)
        backward(which, 1, defers=True)
    for name, use in USES.items():
        with pytest.raises(EngineError, match="under no_sync"):
            use(model)
        assert all(map(torch.equal, weights, (p.to_local() for p in model.parameters()))), name
    shapes = [p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters()]
    assert all(shapes)
    assert "'stem.weight'" in repr(model.stem.weight.grad)
    for which in (model, alone):
        backward(which, 2)
    assert_same_gradients(model, alone, total)


# ---- gradients that users keep


def keep_gradients(model):
    return [p.grad for p in model.parameters()]


def aliases(model):
    return [p.grad.detach() for p in model.parameters()]


def local_parts(model):
    return [p.grad.to_local() if is_sharded(model) else p.grad for p in model.parameters()]


KEEPS = {
    "gradients": keep_gradients,
    "aliases": aliases,
    "one": lambda model: keep_gradients(model)[:1],
    "local parts": local_parts,
}


@pytest.mark.short(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_gradients_that_a_user_keeps_do_not_change(settings):
    for name, keep in KEEPS.items():
        model, alone, total = both(settings)
        kept, values = [], []
        for step in range(4):
            backward(model, step)
            backward(alone, step)
            assert_same_gradients(model, alone, total)
            if step in (0, 2):
                kept += keep(model)
                values += [
                    getattr(grad, "to_local", lambda g=grad: g)().clone() for grad in keep(model)
                ]
            model.zero_grad()
            alone.zero_grad()
        for grad, value in zip(kept, values, strict=True):
            now = grad.to_local() if hasattr(grad, "to_local") else grad
            assert torch.equal(now, value), name
        shown = []
        for step in range(3):  # no reference to these
            backward(model, step)
            shown.append([id(p.grad) for p in model.parameters()])
            model.zero_grad()
        assert shown[1] == shown[2]


@pytest.mark.short(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_gradients_in_a_unit_with_kept_ones_are_accumulated(settings):
    """Some gradients of a unit are kept and dropped, others are accumulated."""
    model, alone, total = both(settings)
    for which in (model, alone):
        backward(which, 0)
    names = [name for name, _ in model.named_parameters()][::2]
    kept = {name: model.get_parameter(name).grad for name in names}
    values = {name: grad.to_local().clone() for name, grad in kept.items()}
    for which in (model, alone):
        for name in names:
            which.get_parameter(name).grad = None
        backward(which, 1)
    assert_same_gradients(model, alone, total)
    assert all(torch.equal(kept[name].to_local(), values[name]) for name in names)


@pytest.mark.short(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_gradients_without_references_reuse_their_memory(settings):
    """Gradients without other references reuse the memory of the last step."""
    model, _, _ = both(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    places = []
    for step in range(6):
        backward(model, 2 * step, defers=step % 2 == 0)
        backward(model, 2 * step + 1)
        fs.clip_grad_norm_(model, 1.0)
        places.append([p.grad.to_local().data_ptr() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert all(place == places[0] for place in places)


# ---- tensors that the user assigned to p.grad


def own_tensors(model):
    return [torch.full_like(p, 0.25) for p in model.parameters()]


def every_other(model):
    return [None if i % 2 else torch.full_like(p, 0.25) for i, p in enumerate(model.parameters())]


def kept_and_scaled(model):
    return [2 * p.grad for p in model.parameters()]


def some_aliases(model):
    return [p.grad if i % 2 else p.grad.data for i, p in enumerate(model.parameters())]


def check_puts(settings, put, zeroes):
    """Accumulates into an assigned tensor but not into a removed one, as in one process."""
    model, alone, total = both(settings)
    held, norms = {}, {}
    for which in (model, alone):
        scale = total if which is alone else 1
        backward(which, 0, scale=scale)
        before, own = keep_gradients(which), put(which)
        for param, grad in zip(which.parameters(), own, strict=True):
            param.grad = grad
        for step in (1, 2):
            if zeroes:
                backward(which, 9, defers=True, scale=scale)
                which.zero_grad(set_to_none=False)
            backward(which, 2 * step, defers=True, scale=scale)
            backward(which, 2 * step + 1, scale=scale)
        held[which] = [g for g in [*before, *own] if g is not None]
        norms[which] = torch.nn.utils.clip_grad_norm_(which.parameters(), 1e-3)
    torch.testing.assert_close(norms[model], norms[alone], rtol=0, atol=1e-11)
    assert_same_gradients(model, alone)
    for ours, theirs in zip(held[model], held[alone], strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=1e-11)


PUTS = (own_tensors, every_other, kept_and_scaled, aliases, some_aliases)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("put", "zeroes"),
    marked(
        itertools.product(PUTS, [False, True]),
        lambda put, zeroes: not zeroes or put in (every_other, some_aliases),
    ),
)
def test_backward_accumulates_into_tensors_assigned_to_grad(ranks, put, zeroes):
    for settings in SETTINGS[(PUTS.index(put) + zeroes) % 2 :: 2]:
        ranks(2)(check_puts, settings, put, zeroes)


# ---- parameters frozen between a forward and its backward


@pytest.mark.short(2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_a_parameter_frozen_after_the_forward_gets_no_gradient(settings):
    model, alone, total = both(settings)
    frozen = [name for name, _ in model.named_parameters()][1::3]
    for which in (model, alone):
        backward(which, 0)
        which.zero_grad()
        sharded = is_sharded(which)
        ranks = [dist.get_rank()] if sharded else range(dist.get_world_size())
        losses = [mean_square(which(**vectors(1, rank))) / len(ranks) for rank in ranks]
        for name in frozen:
            which.get_parameter(name).requires_grad_(False)
        sum(losses).backward()
    assert_same_gradients(model, alone, total)
    for which in (model, alone):
        for name in frozen:
            which.get_parameter(name).requires_grad = True
        which.zero_grad()
        backward(which, 2)
    assert_same_gradients(model, alone, total)


# ---- a backward that raised


def raise_in(_):
    raise ValueError("in backward")


@pytest.mark.short(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_after_a_backward_that_raised_the_model_shows_its_shards(settings):
    """The model shows its shards immediately, not from the next forward on."""
    model, _, _ = both(settings)
    before = fs.full_state_dict(model)
    hidden: list[torch.Tensor] = []
    at = model.blocks[1].register_forward_hook(lambda *a: hidden.append(a[2]))
    loss = mean_square(model(**vectors(0, dist.get_rank())))
    at.remove()
    hidden[0].register_hook(raise_in)
    hidden.clear()
    with pytest.raises(ValueError, match="in backward"):
        loss.backward()
    engine = engine_of(model)
    assert all(unit.swapped == 0 for unit in engine.units)
    assert all(hasattr(p, "record") for p in model.parameters())
    torch.testing.assert_close(fs.full_state_dict(model), before, rtol=0, atol=0)
    backward(model, 1)


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("settings", "checkpointing"), chequered(SETTINGS[:-1], ["none", "block"]), ids=str
)
@on_ranks(2)
def test_frozen_parameters_get_no_gradient_when_the_order_is_learned(settings, checkpointing):
    """Parameters were frozen after the first step, whose order differs from the plan's."""
    settings = {**settings, "activation_checkpointing": checkpointing}
    model = fs.shard(chain(order=(2, 0, 3, 1)), poison=True, **settings)
    alone = chain(order=(2, 0, 3, 1))
    for which in (model, alone):
        which.blocks[3].requires_grad_(False)
    for step in range(3):
        for which in (model, alone):
            which.zero_grad()
            backward(which, step)
        assert_same_gradients(model, alone)


class Scaled(torch.nn.Linear):
    """A layer with a zero-dimensional parameter."""

    def __init__(self):
        super().__init__(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * super().forward(x)


@on_ranks(2)
def test_a_zero_dimensional_parameter_can_wait_too():
    model, x = Scaled(), torch.ones(1, 3)
    fs.shard(model, strategy="no_shard")
    with fs.no_sync(model):
        (dist.get_rank() * model(x).sum()).backward()
    (0 * model(x).sum()).backward()
    assert torch.allclose(model.scale.grad, 0.5 * (model(x) / model.scale).sum())
