"""Graphs from before an update are refused where autograd refuses them in one process."""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of, is_sharded
from support.models import perturbed
from support.parity import unlike_gradients
from support.ranks import on_ranks

WIDTH = 8


class Block(nn.Module):
    """The unit: a layer and an activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).tanh()


Step = Callable[[], None]


def again(model, x, step):
    """A second backward of a graph after a step."""
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    step()
    loss.backward()


def two_graphs(model, x, step):
    """A second graph from before the step."""
    loss, other = model(x).sum(), model(2 * x).sum()
    loss.backward()
    step()
    other.backward()


def after_another_forward(model, x, step):
    """The old graph, after a new one was made and used."""
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    step()
    model(x).sum().backward()
    loss.backward()


def block_alone(model, x, step):
    """A graph of one block, made after the step: allowed."""
    model(x).sum().backward()
    step()
    loss = model[1](x).sum()
    model(x).sum().backward()
    loss.backward()


def before_the_step(model, x, step):
    """A graph that is used twice, and another, before the step: allowed."""
    first, second = model(x).sum(), model(2 * x).sum()
    first.backward(retain_graph=True)
    first.backward()
    second.backward()
    step()


def behind_its_back(model, x, _):
    """Writes that autograd does not see, as when averages are swapped in: allowed."""
    loss = model(x).sum()
    kept = [param.data.clone() for param in model.parameters()]
    for param, old in zip(model.parameters(), kept, strict=True):
        param.data.mul_(2.0)
        param.data.copy_(old)
    loss.backward()


def only_the_first(model, x, _):
    """No gradient reads the first layer's weight, so it may be written: allowed."""
    loss = model(x.detach()).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        for param in model[0].parameters():
            param.mul_(0.9)
    loss.backward()


def another_of_its_unit(model, x, _):
    """Backward reads the weight, but the bias was written: allowed."""
    loss = model(x).sum()
    with torch.no_grad():
        model[2].layer.bias.mul_(0.9)
    loss.backward()


def a_frozen_weight(model, x, _):
    """Backward also reads a weight without a gradient."""
    loss = model(x).sum()
    with torch.no_grad():
        model[2].layer.weight.mul_(0.9)
    loss.backward()


def after_loading(model, x, _):
    """Weights were loaded from a checkpoint."""
    loss = model(x).sum()
    if is_sharded(model):
        folder = engine_of(model).lead(lambda: Path(tempfile.mkdtemp()))
        fs.load(fs.save(folder / "saved", model), model)
        engine_of(model).lead(lambda: shutil.rmtree(folder))
    else:
        model.load_state_dict(model.state_dict())
    loss.backward()


def after_an_owners_step(model, x, _):
    """A step of full tensors, each on one rank."""
    owned = partial(torch.optim.SGD, lr=1e-2)
    optimizer = fs.owned(model, owned) if is_sharded(model) else owned(model.parameters())
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


PROGRAMS = {
    "refused": (
        *(again, two_graphs, after_another_forward, a_frozen_weight, after_loading),
        after_an_owners_step,
    ),
    "fine": (block_alone, before_the_step, behind_its_back, only_the_first, another_of_its_unit),
}


def outcomes(settings):
    """Returns the programs that raise autograd's error; None: one process, unsharded."""
    found: dict[str, list[str]] = {"refused": [], "fine": []}
    for program in (*PROGRAMS["refused"], *PROGRAMS["fine"]):
        model = perturbed(nn.Sequential(*(Block() for _ in range(4))).double())
        model[2].layer.weight.requires_grad_(program is not a_frozen_weight)
        if settings is not None:
            fs.shard(model, wrap=["Block"], poison=True, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.linspace(0.1, 0.9, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)
        x.requires_grad_()
        for _ in range(2):  # learns the order of units
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        what = "fine"
        try:
            program(model, x, optimizer.step)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            what = "refused"
        found[what].append(program.__name__)
    return found


EXPECTED = {what: [program.__name__ for program in of] for what, of in PROGRAMS.items()}


@pytest.mark.parametrize("settings", [None, {}])
def test_one_process_refuses_graphs_of_written_weights(settings):
    assert outcomes(settings) == EXPECTED


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "direct"},
        {"transport": "shared"},
        {"transport": "direct", "strategy": "shard_grad_op"},
        {"transport": "c10d", "strategy": "no_shard"},
    ],
    ids=str,
)
def test_sharded_models_refuse_the_same_graphs(ranks, settings):
    assert ranks(2)(outcomes, settings, timeout=60) == [EXPECTED] * 2


def test_weights_made_in_inference_mode_have_no_versions(tmp_path):
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    fs.shard(model)
    with torch.no_grad():
        assert model(torch.ones(1, 3)).shape == (1, 3)
    fs.load(fs.save(tmp_path / "saved", fs.shard(nn.Linear(3, 3))), model)


class Reversed(nn.Sequential):
    """Its units run in a different order than they are registered."""

    def forward(self, x):
        for block in reversed(self):
            x = block(x)
        return x


def twice(model, x):
    """Uses the graph of the first step again after the step in which its order is learned."""
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    for _ in range(2):
        model(2 * x).sum().backward()
    loss.backward()


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", ["direct", "c10d", "shared"])
@on_ranks(2)
def test_a_graph_retained_in_the_first_step_can_be_used_again(transport):
    blocks = [[Block() for _ in range(4)] for _ in range(2)]
    model, alone = (perturbed(Reversed(*few).double()) for few in blocks)
    alone.load_state_dict(model.state_dict())
    fs.shard(model, wrap=["Block"], transport=transport, poison=True)
    x = torch.linspace(0.1, 0.9, 16, dtype=torch.float64).view(2, 8)
    twice(model, x)
    twice(alone, x)
    assert unlike_gradients(model, alone) == []
    assert not engine_of(model).runtime.agreed
    model(x).sum()  # the graph is freed
    assert engine_of(model).plan.order.learned
