"""Exceptions in the middle of a step, users' hooks, and users' gradients."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine import gradients
from fullshard.engine.engine import engine_of
from fullshard.engine.parameter import Guarded
from fullshard.errors import EngineError
from support.grid import RANKED, STRATEGIES, chequered, in_turn
from support.models import CHAIN, chain, mean_square, vectors
from support.parity import assert_parity, assert_planned_events, backward_alone, unlike_gradients
from support.ranks import on_ranks

# ---- exceptions ----------------------------------------------------------------------------------


class UserError(Exception):
    """An error of the user's code."""


class Interrupt(BaseException):
    """Like a KeyboardInterrupt, after which torch does not call forward hooks."""


def raise_it(kind):
    raise kind("in the middle")


def failing_forward(model, where, kind):
    """A user's module raises in its forward."""
    module = model.get_submodule(where)
    original = module.forward
    module.forward = lambda *args, **kwargs: raise_it(kind)
    try:
        model(**vectors(99, 0))
    finally:
        module.forward = original


def failing_hook(model, where, before):
    """A user's hook raises before or after a module."""
    module = model.get_submodule(where)
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(lambda *_: raise_it(UserError))
    try:
        model(**vectors(99, 0))
    finally:
        handle.remove()


def failing_backward(model, block):
    """Backward raises when the gradient of a block's output is ready."""
    scores, states = model(**vectors(99, 0), states=True)
    states[block].register_hook(lambda _: raise_it(UserError))
    mean_square(scores).backward()


def failing_loss(model):
    """A complete forward without a backward."""
    mean_square(model(**vectors(99, 0)))
    raise UserError("in the loss")


FAILURES = {
    "forward of the first block": lambda m: failing_forward(m, "blocks.0", UserError),
    "forward of a layer inside the third": lambda m: failing_forward(m, "blocks.2.up", UserError),
    "forward of the head": lambda m: failing_forward(m, "head", UserError),
    "an interrupt in the second block": lambda m: failing_forward(m, "blocks.1.up", Interrupt),
    "an interrupt in the root": lambda m: failing_forward(m, "stem", Interrupt),
    "a hook before the second block": lambda m: failing_hook(m, "blocks.1", before=True),
    "a hook after the last block": lambda m: failing_hook(m, "blocks.3", before=False),
    "backward of the last block": lambda m: failing_backward(m, 3),
    "backward of the first block": lambda m: failing_backward(m, 0),
    "the loss": failing_loss,
}


def fail(model, name):
    with pytest.raises((UserError, Interrupt)):
        FAILURES[name](model)


def fail_in_evaluation(model):
    with torch.no_grad(), pytest.raises(UserError):
        failing_forward(model, "blocks.2", UserError)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks("world_size", timeout=100)
def test_the_step_after_an_exception_is_right():
    """Fails once before the first step and twice before the last."""
    for name in FAILURES:

        def work(model, step, rank, name=name):
            fail(model, name)
            if step == 2:
                fail_in_evaluation(model)
                fail(model, name)
            return CHAIN.work(model, step, rank)

        work.__name__ = name
        assert_parity(chain, work, {}, alone=CHAIN.work, kinds=("adamw",))


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size", timeout=100)
def test_the_step_after_many_exceptions_is_right(strategy):
    """Every failure happens once before every step."""

    def work(model, step, rank):
        for name in FAILURES:
            fail(model, name)
        return CHAIN.work(model, step, rank)

    ((_, settings),) = in_turn([work], strategy)
    assert_parity(chain, work, settings, alone=CHAIN.work, kinds=("sgd",))


INTERRUPT = "an interrupt in the second block"


def read_whole(model, whole):
    found = fs.full_state_dict(model, rank0_only=False)
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []


def read_state(model, _):
    assert all(isinstance(value, Guarded) for value in model.state_dict().values())


def open_whole(model, whole):
    with fs.unsharded(model):
        found = dict(model.named_parameters())
        assert [name for name in whole if not torch.equal(found[name], whole[name])] == []


@pytest.mark.short(3)
@pytest.mark.parametrize("read", [read_whole, read_state, open_whole])
@pytest.mark.parametrize("transport", ["direct", "shared"])
@on_ranks(2)
def test_reads_after_an_interrupt_show_the_weights(read, transport):
    """In the masters' dtype; modules would otherwise still show the compute parameters."""
    model = chain().float()
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    fs.shard(model, poison=True, transport=transport, param_dtype="bf16")
    fail(model, INTERRUPT)
    read(model, whole)


def load_whole(model, alone):
    other = {name: value / 2 for name, value in alone.state_dict().items()}
    model.load_state_dict(other)
    alone.load_state_dict(other)


def freeze_a_block(model, alone):
    for either in (model, alone):
        either.blocks[1].requires_grad_(False)
        either.head.weight.requires_grad = False


@pytest.mark.parametrize(
    ("transport", "change"), chequered(["direct", "shared", "c10d"], [load_whole, freeze_a_block])
)
@on_ranks(2)
def test_an_interrupt_changes_neither_gradients_nor_what_follows(change, transport):
    """Gradients wait under no_sync, and no backward has failed."""
    model, alone = fs.shard(chain(), poison=True, transport=transport), chain()
    with fs.no_sync(model):
        CHAIN.work(model, 0, dist.get_rank())
    fail(model, INTERRUPT)
    backward_alone(lambda rank: CHAIN.loss(alone(**CHAIN.batch(0, rank))))
    change(model, alone)
    CHAIN.work(model, 1, dist.get_rank())
    backward_alone(lambda rank: CHAIN.loss(alone(**CHAIN.batch(1, rank))))
    assert unlike_gradients(model, alone) == []


@pytest.mark.parametrize("transport", ["direct", "shared"])
@on_ranks(2)
def test_after_an_interrupt_in_a_part_the_model_begins_a_new_step(transport):
    model = fs.shard(chain(), poison=True, transport=transport)
    runtime = engine_of(model).runtime
    handle = model.stem.register_forward_pre_hook(lambda *_: raise_it(Interrupt))
    with pytest.raises(Interrupt):
        model.stem(vectors(99, 0)["x"])
    handle.remove()
    assert runtime.stack
    model(**vectors(0, 0))
    assert not runtime.stack


@on_ranks(2)
def test_an_optimizer_made_inside_an_interrupted_forward_is_refused():
    model = fs.shard(chain())
    fail(model, INTERRUPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    CHAIN.work(model, 0, dist.get_rank())
    with pytest.raises(EngineError, match=r"call fs.reset"):
        optimizer.step()


@on_ranks(2)
def test_a_failed_backward_drops_deferred_gradients():
    """fs.reset reports that deferred gradients are lost."""
    model = fs.shard(chain(), poison=True)
    rank = dist.get_rank()
    with fs.no_sync(model):
        CHAIN.work(model, 0, rank)
    fail(model, "backward of the last block")
    CHAIN.work(model, 1, rank)
    alone = chain()
    backward_alone(lambda rank: CHAIN.loss(alone(**CHAIN.batch(1, rank))))
    assert unlike_gradients(model, alone) == []


@on_ranks(2)
def test_a_backward_that_fails_after_others_asks_to_repeat_the_step():
    """Compares the logs with and without earlier gradients."""
    model = fs.shard(chain(), poison=True)
    said: list[str] = []
    with patch.object(gradients.logger, "warning", said.append):
        fail(model, "backward of the last block")
        fs.reset(model)
        CHAIN.work(model, 0, dist.get_rank())
        fs.reset(model)
        assert said == []
        fail(model, "backward of the first block")
        fs.reset(model)
    assert len(said) == 1
    assert "Call zero_grad() and repeat the whole step" in said[0]


@on_ranks(2)
def test_after_failures_and_a_reset_the_events_are_those_of_the_plan():
    model = fs.shard(chain(), poison=True)
    CHAIN.work(model, 0, dist.get_rank())
    for name in FAILURES:
        fail(model, name)
    fs.reset(model)
    engine = engine_of(model)
    engine.recorder.clear()
    CHAIN.work(model, 1, dist.get_rank())
    assert_planned_events(model, engine.runtime.step - 1)


# ---- hooks of users ------------------------------------------------------------------------------


def with_hooks():
    """A chain whose hooks record weights, activations and gradients in `seen`."""
    model = chain()
    model.seen = []

    def note(*tensors):
        model.seen.extend(float(t.detach().sum()) for t in tensors if t is not None)

    for block in (*model.blocks, model.head):
        linear = block if isinstance(block, nn.Linear) else block.up
        block.register_forward_pre_hook(lambda m, args, w=linear: note(args[0], w.weight))
        block.register_forward_hook(lambda m, args, out, w=linear: note(out, w.weight))
        block.register_full_backward_hook(lambda m, gi, go, w=linear: note(gi[0], go[0], w.weight))
        block.register_full_backward_pre_hook(lambda m, go: note(go[0]))
    return model


def hooked_step(model, step, rank):
    """Forward and backward hooks see full weights, as in one process."""
    model.seen.clear()
    loss = mean_square(model(**vectors(step, rank)))
    loss.backward()
    seen = torch.tensor(model.seen, dtype=torch.float64)
    assert len(seen) == 5 * (2 + 2 + 3 + 1)
    return torch.cat([loss.detach()[None], seen])


def scaled_step(model, step, rank):
    """Hooks change activations and gradients."""
    handles = [
        model.blocks[1].register_forward_hook(lambda m, args, out: out * 1.5),
        model.blocks[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
    ]
    scores, states = model(**vectors(step, rank), states=True)
    states[0].register_hook(lambda g: g * 3.0)
    states[3].register_hook(lambda g: g.clamp(-0.01, 0.01))
    loss = mean_square(scores)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss.detach()


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, timeout=100)
def test_hooks_of_users_see_and_change_the_same_as_in_one_process(strategy):
    cases = ((with_hooks, hooked_step), (chain, scaled_step))
    for (build, work), settings in in_turn(cases, strategy):
        assert_parity(build, work, settings, kinds=("sgd",))


# ---- gradients that users zero in place (kept and replaced ones: test_pending.py) ----------------


def zero_in_place(model, step, rank):
    """zero_grad(set_to_none=False) after a first backward, when gradients exist."""
    CHAIN.work(model, step + 50, rank)
    model.zero_grad(set_to_none=False)
    return CHAIN.work(model, step, rank)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, 1, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_gradients_that_are_zeroed_in_place_are_accumulated_into():
    for strategy in STRATEGIES:
        settings = {"strategy": strategy}
        assert_parity(chain, zero_in_place, settings, alone=CHAIN.work, kinds=("adamw",))
