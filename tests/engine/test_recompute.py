"""Activation checkpointing by torch and Hugging Face gives the bits of no recompute."""

import contextlib
import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fullshard as fs
from fullshard.errors import EngineError
from support.grid import STRATEGIES
from support.models import CASES, CHAIN, Chain, backward_of, mean_square, perturbed, vectors
from support.parity import assert_parity, whole_gradients
from support.ranks import on_ranks
from support.recompute import assert_bits, compare, is_same, trained

RANKED = list(itertools.product(STRATEGIES, (1, 2, 3)))
DEPTHS = ((0, 0), (1, 1), (2, 1), (0, 2))
recompute = partial(checkpoint, use_reentrant=False)


class Recomputed(Chain):
    """A chain with dropout whose blocks run in regions; `call` runs a region."""

    def __init__(self):
        super().__init__(num_blocks=4)
        self.regions = ((0,), (1,), (2,), (3,))
        self.call = lambda function, *args: function(*args)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        hidden = self.stem(x)
        for region in self.regions:
            hidden = self.call(partial(self.run, region), hidden)
        return self.head(self.drop(hidden))

    def run(self, region, hidden):
        for index in region:
            hidden = self.drop(self.blocks[index](hidden))
        return hidden


def build():
    torch.manual_seed(0)
    return perturbed(Recomputed().double())


# ---- ways to recompute: each changes a model, before it is sharded or after ----------------------


def outside(model, regions=((0,), (1,), (2,), (3,)), call=recompute):
    """A region around units is recomputed."""
    model.regions, model.call = regions, call


def inside(model):
    """A unit recomputes its contents: our hooks are outside, as with transformers' layers."""
    for block in model.blocks:
        block.forward = partial(recompute, block.forward)


def inside_and_outside(model):
    """A recomputed region contains recomputed regions."""
    inside(model)
    outside(model)


def by_wrapper(model):
    """torch's checkpoint_wrapper around each block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def every_second(model):
    """Recomputed and plain blocks alternate."""
    model.call = lambda function, *args: (
        recompute(function, *args) if function.args[0][0] % 2 else function(*args)
    )


def selective(model):
    """Matrix products are saved, everything else is recomputed."""
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    outside(model, call=partial(recompute, context_fn=contexts))


def without_early_stop(model):
    """Recomputes each region to its end."""

    def call(function, *args):
        with set_checkpoint_early_stop(False):
            return recompute(function, *args)

    outside(model, call=call)


WAYS = {
    "outside": outside,
    "over two units": partial(outside, regions=((0, 1), (2, 3))),
    "over all units": partial(outside, regions=((0, 1, 2, 3),)),
    "over one and three units": partial(outside, regions=((0,), (1, 2, 3))),
    "inside": inside,
    "inside and outside": inside_and_outside,
    "checkpoint_wrapper": by_wrapper,
    "every second": every_second,
    "selective": selective,
    "without early stop": without_early_stop,
}


# ---- what a step does ----------------------------------------------------------------------------


def seeded(step, rank):
    torch.manual_seed(100 * step + rank)  # seed of dropout


def one_forward(model, step, rank):
    seeded(step, rank)
    return CHAIN.work(model, step, rank)


def two_forwards_one_backward(model, step, rank):
    seeded(step, rank)
    losses = [mean_square(model(**vectors(step + 50 * k, rank))) for k in range(2)]
    (losses[0] + 2 * losses[1]).backward()
    return losses[0].detach()


def two_forwards_two_backwards(model, step, rank):
    seeded(step, rank)
    losses = [mean_square(model(**vectors(step + 50 * k, rank))) for k in range(2)]
    losses[0].backward()
    losses[1].backward()
    return losses[0].detach()


def evaluation_between(model, step, rank):
    seeded(step, rank)
    loss = mean_square(model(**vectors(step, rank)))
    with torch.no_grad():
        model(**vectors(step + 90, rank))
    return backward_of(loss)


def whole_model(model, step, rank):
    """The recomputed region contains the root."""
    seeded(step, rank)
    return backward_of(
        mean_square(recompute(lambda x: model(x), vectors(step, rank)["x"].requires_grad_()))
    )


def accumulation(model, step, rank):
    seeded(step, rank)
    for micro in range(3):
        with fs.no_sync(model) if micro < 2 else contextlib.nullcontext():
            loss = mean_square(model(**vectors(10 * step + micro, rank)))
            loss.backward()
    return loss.detach()


WORKS = (
    one_forward,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    evaluation_between,
    accumulation,
)


# ---- the comparison ------------------------------------------------------------------------------


@on_ranks(2, timeout=100)
def test_every_way_to_recompute_has_the_bits_of_no_recompute():
    """Tests each way once; other combinations are slow."""
    for way in WAYS.values():
        compare(build, one_forward, {}, before=way)


@on_ranks(2)
def test_selective_recompute_does_not_see_the_engines_copies():
    compare(build, two_forwards_one_backward, {}, after=selective)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@pytest.mark.parametrize("name", [name for name in WAYS if name != "selective"])
@on_ranks("world_size", timeout=100)
def test_recompute_has_the_bits_of_no_recompute(name, strategy):
    for forward, backward in DEPTHS:
        depths = {"forward_prefetch": forward, "backward_prefetch": backward}
        compare(build, one_forward, {"strategy": strategy, **depths}, before=WAYS[name])
    for work in WORKS[1:]:
        compare(build, work, {"strategy": strategy}, before=WAYS[name])
    compare(build, one_forward, {"strategy": strategy}, after=WAYS[name])


@pytest.mark.slow
@on_ranks(2)
def test_units_are_around_or_inside_recomputed_regions():
    """The block inside the wrapper is the unit, not the wrapper; also units inside of blocks."""
    for wrap in (["Block"], ["CheckpointWrapper"], ["Block", "Linear"], ["Linear"], "none"):
        kept = {"wrap": ["Block"] if wrap == ["CheckpointWrapper"] else wrap}
        wanted = trained(build, one_forward, kept)
        assert_bits(trained(build, one_forward, {"wrap": wrap}, before=by_wrapper), wanted)


def whole_model_without(model, step, rank):
    """Like `whole_model`, without recompute."""
    seeded(step, rank)
    return backward_of(mean_square(model(vectors(step, rank)["x"].requires_grad_())))


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("full_shard", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in RANKED)],
)
@on_ranks("world_size")
def test_a_recompute_around_the_whole_model_has_its_bits(strategy):
    settings = {"strategy": strategy}
    wanted = trained(build, whole_model_without, settings)
    assert_bits(trained(build, whole_model, settings), wanted)


def build_frozen():
    model = build()
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


@on_ranks(2)
def test_frozen_blocks_recompute_too():
    """torch also recomputes a region if nothing before it is trained."""
    for name in ("outside", "over two units", "inside"):
        compare(build_frozen, one_forward, {}, before=WAYS[name])


# ---- Hugging Face --------------------------------------------------------------------------------

FAST_HUGGING_FACE = (("llama", "full_shard", 2), ("mixture of experts", "full_shard", 2))
HUGGING_FACE = ("llama", "tied llama", "llama with large ends", "mixture of experts", "t5")


def enable(model):
    """Turns recompute on, with the spelling of the installed version of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def enable_by_new_name(model):
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [
        pytest.param(*case, marks=[] if case in FAST_HUGGING_FACE else pytest.mark.slow)
        for case in itertools.product(HUGGING_FACE, STRATEGIES, (1, 2, 3))
    ],
)
@on_ranks("world_size", timeout=100)
def test_gradient_checkpointing_enable_has_the_bits_of_no_recompute(name, strategy):
    case = CASES[name]
    # transformers sums the gradients of T5's position bias in another order when it recomputes:
    # the unsharded model in one process has other bits too.
    check = partial(compare, case.build, case.work, tolerance=1e-12 if name == "t5" else 0.0)
    check({"strategy": strategy}, before=enable)
    if strategy == "full_shard":
        check({"forward_prefetch": 0, "backward_prefetch": 2}, before=enable)
        check({}, after=enable)
        if hasattr(case.build(), "activation_checkpointing_enable"):
            check({}, before=enable_by_new_name)


# ---- the reentrant kind --------------------------------------------------------------------------


def reentrant(model, where):
    call = partial(checkpoint, use_reentrant=True)
    if where == "outside":
        outside(model, call=call)
    elif where == "over two units":
        outside(model, regions=((0, 1), (2, 3)), call=call)
    else:
        for block in model.blocks:
            block.forward = partial(call, block.forward)


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_reentrant_recompute_is_refused_and_leaves_the_model_usable(strategy):
    """It runs a backward inside a backward, whose gradients would be lost."""
    rank, found = dist.get_rank(), []
    wanted = trained(build, one_forward, {"strategy": strategy})[0][0][1]
    for where in ("outside", "over two units", "inside"):
        model = fs.shard(build(), poison=True, strategy=strategy)
        kept = [block.forward for block in model.blocks]
        reentrant(model, where)
        with pytest.raises(EngineError, match="use_reentrant=False"):
            one_forward(model, 0, rank)
        for block, forward in zip(model.blocks, kept, strict=True):
            block.forward = forward
        outside(model)
        one_forward(model, 0, rank)
        ours = whole_gradients(model)
        found.append([name for name, value in wanted.items() if not is_same(ours[name], value)])
    assert found == [[]] * 3


class Named(nn.Linear):
    def forward(self, x, *, fn, function, debug):
        return fn(super().forward(x)) + function * debug


class CallsByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Named(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, fn=torch.tanh, function=2.0, debug=0.5)
        return x


def named():
    torch.manual_seed(0)
    return CallsByName().double()


def loss_of_named(model, step, rank):
    return backward_of(
        model(torch.full((2, 6), 0.1 * (step + rank), dtype=torch.float64)).square().mean()
    )


@on_ranks(2)
def test_a_recomputed_block_takes_keyword_arguments_of_any_name():
    assert_parity(named, loss_of_named, {"activation_checkpointing": "block"}, kinds=("sgd",))
