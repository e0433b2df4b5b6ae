"""Parameters without gradients: unused, unused on one rank, frozen, adapted, turned off."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import EngineError
from support.grid import RANKED, STRATEGIES, chequered, in_turn, prefetching
from support.models import CHAIN, WIDTH, Block, backward_of, mean_square, perturbed, tokens, vectors
from support.parity import (
    assert_parity,
    assert_planned_events,
    backward_alone,
    unlike_gradients,
    whole_gradients,
)
from support.ranks import on_ranks


class Adapter(torch.nn.Module):
    """A frozen linear layer with a trainable low-rank adapter (LoRA)."""

    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = torch.nn.Linear(inner.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class SometimesBlock(Block):
    """Uses one more parameter on request."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(7))
        self.sometimes = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, use=False):
        x = super().forward(x)
        return x * self.sometimes if use else x


class Sometimes(torch.nn.Module):
    """Blocks, parameters of the root and whole layers that only some calls use."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(SometimesBlock() for _ in range(4))
        self.gate = torch.nn.Parameter(torch.ones(WIDTH))
        self.unused = torch.nn.Linear(WIDTH, 5)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x, use=(), gated=False):
        for index, block in enumerate(self.blocks):
            x = block(x, use=index in use)
        return self.head(x * self.gate if gated else x)


def sometimes():
    torch.manual_seed(0)
    return perturbed(Sometimes().double())


# ---- unused --------------------------------------------------------------------------------------


def never_used(model, step, rank):
    return CHAIN.work(model, step, rank)


def used_in_some_steps(model, step, rank):
    """A parameter with a gradient has none in the next step, so AdamW skips it."""
    return CHAIN.work(model, step, rank, use=(step, 3), gated=step == 1)


def used_on_one_rank(model, step, rank):
    """The other ranks contribute zero; the mean still divides by the number of ranks."""
    return CHAIN.work(model, step, rank, use=(1, step) if rank == 1 else ())


def used_everywhere_but_on_one_rank(model, step, rank):
    here = rank != 1
    return CHAIN.work(model, step, rank, use=(0, 1, 2, 3) if here else (), gated=here)


def head_alone_on_one_rank(model, step, rank):
    """On rank 0 the loss cuts the graph before the head, so only the head has gradients."""
    model.blocks[3].register_forward_hook(lambda m, a, out: out.detach() if rank == 0 else out)
    loss = mean_square(model(**vectors(step, rank)))
    loss.backward()
    model.blocks[3]._forward_hooks.popitem()
    return loss.detach()


class NoGradient(torch.autograd.Function):
    """Passes x on; its second input gets no gradient."""

    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def without_a_gradient_of_its_own_function(model, step, rank):
    """Autograd reaches the parameter but returns no gradient."""
    with_none = model.blocks[1].register_forward_hook(
        lambda block, _, out: NoGradient.apply(out, block.unused)
    )
    loss = CHAIN.work(model, step, rank)
    with_none.remove()
    return loss


UNUSED = (
    never_used,
    without_a_gradient_of_its_own_function,
    used_in_some_steps,
    used_on_one_rank,
    used_everywhere_but_on_one_rank,
    head_alone_on_one_rank,
)


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size", timeout=100)
def test_unused_parameters_are_unchanged_as_in_one_process(strategy):
    for work, settings in in_turn(UNUSED, strategy):
        assert_parity(sometimes, work, settings, kinds=("adamw",))


@on_ranks(2, timeout=100)
def test_experts_with_few_tokens_train_as_in_one_process():
    """No token, or tokens of only one rank, reach an expert."""
    from support.models import CASES

    case = CASES["mixture of experts"]

    def few_tokens(model, step, rank):
        batch = {name: ids[:1, :2] for name, ids in tokens(step, rank).items()}
        return backward_of(model(**batch, output_router_logits=False).loss)

    assert_parity(case.build, few_tokens, {}, kinds=("adamw",))


# ---- frozen --------------------------------------------------------------------------------------


def frozen(*names):
    model = sometimes()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def frozen_start():
    return frozen("blocks.0", "blocks.1")


def frozen_middle():
    return frozen("blocks.1", "blocks.2")


def frozen_end():
    return frozen("blocks.3", "head")


def frozen_but_the_norms():
    model = frozen("blocks")
    for block in model.blocks:
        block.norm.requires_grad_(True)
    return model


def adapted():
    model = sometimes().requires_grad_(False)
    torch.manual_seed(5)
    for block in model.blocks:
        block.up = Adapter(block.up).double()
    return model


FROZEN = (frozen_start, frozen_middle, frozen_end, frozen_but_the_norms, adapted)


def assert_frozen_has_no_gradient_memory(model):
    """Gradient shards and slots are as large as those of the trained groups only."""
    engine = engine_of(model)
    groups = [group for unit in engine.units for group in unit.groups]
    for group in groups:
        assert (group.grads is None) is not group.plan.trainable
        assert (group.grad_slot is None) is not group.plan.trainable
    trained = sum(g.plan.layout.part_numel for g in groups if g.plan.trainable)
    assert fs.memory_stats(model)["gradient_shards"]["now"] == 8 * trained
    for ring in engine.plan.rings:
        if ring.name.endswith(".grad"):
            largest = max(g.plan.layout.numel for g in groups if g.plan.trainable)
            assert ring.numel <= largest


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size", timeout=100)
def test_frozen_and_adapted_models_train_as_in_one_process(strategy):
    for build, settings in in_turn(FROZEN, strategy):
        model = assert_parity(build, never_used, settings, kinds=("adamw",))
        assert_frozen_has_no_gradient_memory(model)
        for step in (1, 2):
            assert_planned_events(model, step)


def gradients_of_frozen_start(model, step, rank):
    """Inputs require gradients, so that backward runs through the frozen blocks."""
    x = vectors(step, rank)["x"].requires_grad_()
    loss = mean_square(model(x))
    loss.backward()
    return loss.detach() + x.grad.square().sum()


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, timeout=100)
def test_gradients_flow_through_frozen_blocks_to_the_inputs(strategy):
    for build, settings in in_turn((frozen_start, adapted), strategy):
        assert_parity(build, gradients_of_frozen_start, settings, kinds=("sgd",))


# ---- turned off and on between steps -------------------------------------------------------------


def frozen_in_the_second_step(model, step, rank):
    """A block and a bias are frozen for one step."""
    model.blocks[1].requires_grad_(step != 1)
    model.head.bias.requires_grad_(step != 1)
    return never_used(model, step, rank)


def trained_in_the_second_step_by_a_forward(model, step, rank):
    """Each forward chooses which later unit to train, as in stochastic freezing."""
    switch = lambda *_: model.blocks[2].requires_grad_(step == 1) and None  # noqa: E731
    handle = model.blocks[0].register_forward_hook(switch)
    loss = never_used(model, step, rank)
    handle.remove()
    return loss


def switched_while_units_are_open(model, step, rank):
    """A forward and a backward switch requires_grad of weights of open units."""
    forward = [model.head.weight, *model.blocks[0].parameters()]
    backward = [model.blocks[2].norm.weight, *model.blocks[1].parameters()]

    def inside(module, _):
        module.norm.bias.detach_() if step == 2 else module.norm.bias.requires_grad_(True)
        for param in forward:
            param.requires_grad = step == 1
        for param in backward:
            param.requires_grad = True

    def before_backward(_, __, y):
        y.register_hook(lambda _: [param.requires_grad_(step != 1) for param in backward] and None)

    handles = [model.blocks[0].register_forward_pre_hook(inside)]
    handles.append(model.blocks[2].norm.register_forward_hook(before_backward))
    loss = never_used(model, step, rank)
    for handle in handles:
        handle.remove()
    return loss


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, timeout=100)
def test_requires_grad_may_be_turned_off_for_a_step(strategy):
    steps = frozen_in_the_second_step, trained_in_the_second_step_by_a_forward
    for settings in prefetching(strategy):
        for step in (*steps, switched_while_units_are_open):
            assert_parity(sometimes, step, settings, kinds=("adamw",))


@on_ranks(2)
def test_weights_that_were_frozen_before_sharding_cannot_be_trained_inside_a_forward():
    for frozen, entered in ((0, 0), (3, 1)):
        model = sometimes()
        blocks = model.blocks
        blocks[frozen].requires_grad_(False)
        fs.shard(model, wrap=["SometimesBlock"])
        thaw = partial(lambda block, *_: block.requires_grad_(True) and None, blocks[frozen])
        blocks[entered].register_forward_pre_hook(thaw)
        with pytest.raises(EngineError, match="expected requires_grad=False"):
            never_used(model, 0, dist.get_rank())


@on_ranks(2)
def test_weights_frozen_after_a_forward_may_be_trained_in_its_backward():
    model, alone = fs.shard(sometimes(), wrap=["SometimesBlock"]), sometimes()
    for each in (model, alone):
        thaw = partial(lambda each, _: each.blocks[0].requires_grad_(True) and None, each)
        each.blocks[3].register_forward_hook(
            lambda _, __, y, thaw=thaw: [y.register_hook(thaw), y][1]
        )
        loss = mean_square(each(**vectors(0, 0)))
        each.blocks[0].requires_grad_(False)
        loss.backward()
    assert not unlike_gradients(model, alone)


@on_ranks(2)
def test_a_model_without_trained_parameters_gives_gradients_of_its_inputs():
    """The model is also evaluated."""
    model = fs.shard(sometimes().requires_grad_(False), poison=True)
    alone = sometimes().requires_grad_(False)
    for step in range(3):
        x = vectors(step, dist.get_rank())["x"]
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        mean_square(model(ours)).backward()
        mean_square(alone(theirs)).backward()
        assert torch.equal(ours.grad, theirs.grad)
    assert all(gradient is None for gradient in whole_gradients(model).values())
    assert fs.memory_stats(model)["gradient_slots"]["now"] == 0


class Routed(torch.nn.Module):
    """Each rank uses a different block, one of which is frozen."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x, block):
        return self.head(self.blocks[block](x))


def assert_gradients_of_calls(kind, settings, given, defers):
    """Compares four backwards of `given(step, rank)`; every other one may be deferred."""
    model, alone = (perturbed(kind().double()) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    fs.shard(model, wrap=["Block"], poison=True, **settings)
    own = dist.get_rank()
    for step in range(4):
        with fs.no_sync(model) if defers and step % 2 == 0 else nullcontext():
            mean_square(model(**vectors(step, own), **given(step, own))).backward()
        backward_alone(
            lambda rank: mean_square(alone(**vectors(step, rank), **given(step, rank)))  # noqa: B023
        )
    assert unlike_gradients(model, alone) == []


@pytest.mark.parametrize("transport", ["direct", "c10d", "shared"])
@on_ranks(2)
def test_a_frozen_unit_that_one_rank_uses_is_gathered_by_all(transport):
    """On that rank its output needs no gradient, so its backward is never entered there."""

    def given(step, rank):
        return {"block": (step + rank) % 2}

    assert_gradients_of_calls(Routed, {"transport": transport}, given, defers=True)


class Prompted(torch.nn.Module):
    """A trained prompt of the root passes through a frozen block on some ranks."""

    def __init__(self):
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.zeros(WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.blocks[:2].requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x, is_prompted):
        x = x + self.prompt if is_prompted else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.short(4)
@pytest.mark.parametrize(
    ("transport", "defers"), chequered(["direct", "c10d", "shared", "offloaded"], [False, True])
)
@pytest.mark.parametrize("first", [(0,), (1,), (0, 1)], ids=str)
@on_ranks(2)
def test_gradients_may_pass_through_the_first_frozen_units_on_some_ranks(transport, defers, first):
    """In the first step on ranks `first`, later on each rank in turn."""
    offload = {"transport": "shared", "offload": "cpu"}
    settings = offload if transport == "offloaded" else {"transport": transport}

    def given(step, rank):
        return {"is_prompted": rank in (first if step == 0 else (step % 2,))}

    assert_gradients_of_calls(Prompted, settings, given, defers)
