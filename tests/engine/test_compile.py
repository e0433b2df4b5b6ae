"""Blocks compiled by torch.compile give one process's numbers, and compile only once."""

import contextlib
import warnings
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import fullshard as fs
from fullshard.engine.step import Actions
from fullshard.engine.unit import AWAY
from support.models import CHAIN, Block, chain
from support.parity import assert_planned_events, assert_same, finish_step
from support.reference import make_optimizer, train_alone

NUM_STEPS = 4


def in_place(blocks, backend):
    for block in blocks:
        block.compile(backend=backend)


def wrapped(blocks, backend):
    for at, block in enumerate(blocks):
        blocks[at] = torch.compile(block, backend=backend)


HOW = {"in place": in_place, "wrapped": wrapped}


def without_wrapper(tensors):
    return {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}


@contextlib.contextmanager
def compiling():
    """Resets the compiler before and after."""
    torch._dynamo.reset()
    with warnings.catch_warnings():  # the compiler reads .grad of activations
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of its own imports
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        yield
    torch._dynamo.reset()


@compiling()
def check(how, early, strategy, backend):
    model = chain()
    if early:
        HOW[how](model.blocks, backend)
    fs.shard(model, poison=True, strategy=strategy, wrap="auto")
    if not early:
        HOW[how](model.blocks, backend)
    optimizer = make_optimizer("adamw", model.parameters())
    steps, graphs = [], []
    for step in range(NUM_STEPS):
        loss = CHAIN.work(model, step, dist.get_rank())
        done = finish_step(model, optimizer, [loss])
        gradients, params = without_wrapper(done.gradients), without_wrapper(done.params)
        steps.append(replace(done, gradients=gradients, params=params))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[0] == graphs[-1], graphs
    size = dist.get_world_size()
    wanted = train_alone(chain, CHAIN.work, world_size=size, kind="adamw", num_steps=NUM_STEPS)
    assert_same(steps, wanted)
    if how == "in place":
        assert_planned_events(model, NUM_STEPS - 1)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("how", "early", "strategy"),
    [
        ("in place", True, "full_shard"),
        ("in place", False, "no_shard"),
        ("wrapped", True, "no_shard"),
        ("wrapped", False, "full_shard"),
    ],
)
def test_compiled_blocks_train_as_in_one_process(ranks, how, early, strategy):
    ranks(2)(check, how, early, strategy, "aot_eager", timeout=100)


@pytest.mark.slow
def test_blocks_compiled_to_machine_code_train_as_in_one_process(ranks):
    ranks(2)(check, "in place", False, "full_shard", "inductor", timeout=300)


LEAKED: list[torch.Tensor] = []


class Leaky(nn.Module):
    """Keeps an intermediate result, as routers keep losses; may compile as two graphs."""

    def __init__(self, *, broken, hidden):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.broken, self.hidden = broken, hidden

    def forward(self, x):
        halfway = self.norm(self.up(x))
        if self.hidden:
            LEAKED.append(halfway)
        else:
            self.kept = halfway
        if self.broken:
            torch._dynamo.graph_break()
        return self.down(halfway)


@compiling()
def gradient_of_what_was_left(*, broken, hidden=False):
    """Gradient of a result kept by the first block, whose slot another one uses by then."""
    LEAKED.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(Leaky(broken=broken, hidden=hidden) for _ in range(4)))
    fs.shard(model, wrap=["Leaky"], transport="fake", shard=2, poison=True)
    for block in model[1:]:
        block.compile(backend="aot_eager")
    model(torch.ones(2, 4))
    (LEAKED[0] if hidden else model[1].kept).square().sum().backward()
    return model[0].weight.grad.to_local()


@pytest.mark.parametrize("broken", [False, True])
def test_backward_starts_from_a_result_kept_by_a_compiled_block(broken):
    assert gradient_of_what_was_left(broken=broken).isfinite().all()


def test_a_result_kept_from_the_middle_of_a_broken_graph_is_an_error():
    with pytest.raises(RuntimeError, match=f"is at version {AWAY}"):
        gradient_of_what_was_left(broken=True, hidden=True)


@compiling()
def test_equal_blocks_share_one_graph():
    """More blocks than torch's limit of 8 compiled variants of one function."""
    model = nn.Sequential(*(Block(4, 4) for _ in range(10)))
    fs.shard(model, wrap=lambda module: module in list(model), transport="fake", shard=2)
    for block in model:
        block.compile(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 1


@compiling()
def stepped(*, compiled):
    """Returns this rank's shards after steps by one function, which calls backward, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    fs.shard(model, transport="fake", shard=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    run = torch.compile(step, backend="eager") if compiled else step
    for _ in range(2):
        run()
    assert not _debug_get_cache_entry_list(Actions.run.__code__)
    return [param.to_local().clone() for param in model.parameters()]


@pytest.mark.long
def test_a_compiled_step_is_that_of_python_and_nothing_of_the_engine_is_compiled():
    for part, wanted in zip(stepped(compiled=True), stepped(compiled=False), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_forward_sees_and_drops_the_gradients_of_the_last_backward():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].compile(backend="eager")  # also reads gradients
    fs.shard(model, wrap="none", transport="fake", shard=2)
    seen = []
    model[1].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.grad))
    model(torch.ones(2, 3)).sum().backward()
    want = model[1].weight.grad.norm()
    model(torch.ones(5, 3)).sum()  # compiled again
    model[1].register_forward_pre_hook(lambda layer, _: layer.zero_grad())
    model(torch.ones(2, 3))
    assert seen[0] is None
    assert seen[1].norm() == want
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
