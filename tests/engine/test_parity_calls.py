"""Ways to call a model other than one forward and one backward per step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine.engine import ATTRIBUTE
from fullshard.errors import ShardedTensorError
from support.grid import PAIRED, RANKED, STRATEGIES, in_turn, prefetching
from support.models import CASES, CHAIN, WIDTH, backward_of, chain, perturbed, vectors
from support.parity import assert_parity, whole_gradients
from support.ranks import on_ranks

LLAMA = CASES["llama"]
# Depth 0, so that every gather is on demand; and depth 2, which reserves slots early.
DEPTHS = ((0, 0), (2, 2))


# ---- work: one process runs each for all ranks, and every rank runs its own ----------------------


def two_forwards_one_backward(model, step, rank):
    first = CHAIN.loss(model(**CHAIN.batch(step, rank)))
    second = CHAIN.loss(model(**CHAIN.batch(step + 50, rank)))
    return backward_of(first + 2 * second)


def three_forwards_backwards_in_another_order(model, step, rank):
    losses = [CHAIN.loss(model(**CHAIN.batch(step + 50 * k, rank))) for k in range(3)]
    for k in (1, 2, 0):
        losses[k].backward()
    return losses[0].detach()


def two_backwards(model, step, rank):
    output = model(**CHAIN.batch(step, rank))
    loss = CHAIN.loss(output)
    loss.backward(retain_graph=True)
    (0.1 * output.exp().mean()).backward()
    return loss.detach()


def interleaved(model, step, rank):
    """Like a pipeline: the next forward runs before the last backward."""
    losses = [CHAIN.loss(model(**CHAIN.batch(step, rank)))]
    for k in range(1, 4):
        losses.append(CHAIN.loss(model(**CHAIN.batch(step + 50 * k, rank))))
        losses[k - 1].backward()
    losses[-1].backward()
    return losses[-1].detach()


def backward_into_kept_gradients(model, step, rank):
    """Two whole steps accumulate; the second adds to reduced gradients of the first."""
    CHAIN.work(model, step, rank)
    return CHAIN.work(model, step + 50, rank)


def two_forwards_of_which_one_is_dropped(model, step, rank):
    CHAIN.loss(model(**CHAIN.batch(step + 50, rank)))  # has no backward
    return CHAIN.work(model, step, rank)


WORKS = (
    two_forwards_one_backward,
    three_forwards_backwards_in_another_order,
    two_backwards,
    interleaved,
    backward_into_kept_gradients,
    two_forwards_of_which_one_is_dropped,
)


def evaluate(model, step, rank, mode):
    model.eval()
    with mode():
        loss = CHAIN.loss(model(**CHAIN.batch(step + 90, rank)))
    model.train()
    return loss


def evaluate_everywhere(model, step, rank):
    """Evaluates before the step, between forward and backward, and after the step."""
    losses = [evaluate(model, step, rank, torch.no_grad)]
    loss = CHAIN.loss(model(**CHAIN.batch(step, rank)))
    losses.append(evaluate(model, step, rank, torch.inference_mode))
    losses.append(evaluate(model, step, rank, torch.no_grad))
    loss.backward()
    losses.append(evaluate(model, step, rank, torch.inference_mode))
    assert torch.equal(losses[0], losses[1])
    return loss.detach() + sum(float(x) for x in losses)


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), RANKED)
@on_ranks("world_size", timeout=100)
def test_any_number_of_forwards_and_backwards_is_as_in_one_process(strategy):
    for work, settings in in_turn((*WORKS, evaluate_everywhere), strategy, DEPTHS):
        assert_parity(CHAIN.build, work, settings, kinds=("sgd",))


# ---- gradients of inputs -------------------------------------------------------------------------


class FromInputs(torch.nn.Module):
    """A chain whose input requires gradients; inputs of every step keep theirs."""

    def __init__(self):
        super().__init__()
        self.chain = chain()
        self.seen = []

    def forward(self, x):
        x = x.clone().requires_grad_()
        self.seen.append(x)
        return self.chain(x)


def gradients_of_inputs_alone(model, step, rank):
    """`backward(inputs=)` and `autograd.grad` reach no parameter; then a full backward."""
    output = model(**vectors(step, rank)).square().mean()
    x = model.seen.pop()
    output.backward(inputs=[x], retain_graph=True)
    if rank == 0 or hasattr(model, ATTRIBUTE):  # one process keeps the gradients of rank 0
        assert all(p.grad is None for p in model.parameters())
    (again,) = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(again, x.grad)
    output.backward()
    torch.testing.assert_close(x.grad, 2 * again, rtol=0, atol=1e-15)
    return output.detach() + x.grad.square().sum()


def from_inputs():
    torch.manual_seed(0)
    return FromInputs().double()


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size", timeout=100)
def test_gradients_of_inputs_alone_leave_parameters_without():
    for at, strategy in enumerate(STRATEGIES):
        settings = prefetching(strategy, DEPTHS)[at % len(DEPTHS)]
        assert_parity(from_inputs, gradients_of_inputs_alone, settings, kinds=("sgd",))


@on_ranks(2)
def test_autograd_grad_of_a_shard_is_an_error_and_leaves_the_model_usable():
    model = fs.shard(chain(), poison=True)
    loss = model(**vectors(0, dist.get_rank())).square().mean()
    with pytest.raises(ShardedTensorError, match=r"torch.autograd.grad.*stem.weight"):
        torch.autograd.grad(loss, list(model.parameters()))
    loss.backward()
    assert all(g is not None for g in whole_gradients(model).values())


# ---- outputs passed to later units, and losses on inner outputs ----------------------------------


class BiasedBlock(torch.nn.Module):
    """The first block computes a bias from its own weight; all return it unchanged."""

    def __init__(self, makes_bias):
        super().__init__()
        self.bias = torch.nn.Linear(WIDTH, WIDTH) if makes_bias else None
        self.mix = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias=None):
        if bias is None:
            bias = torch.tanh(self.bias(x))
        return x + torch.tanh(self.mix(x) * bias), bias


class Biased(torch.nn.Module):
    """Six blocks; the loss reads every block's output from a mapping."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(BiasedBlock(k == 0) for k in range(6))

    def forward(self, x):
        bias, states = None, []
        for block in self.blocks:
            x, bias = block(x, bias)
            states.append(x)
        return {"scores": x, "bias": [bias], "states": tuple(states)}


def biased():
    torch.manual_seed(0)
    return perturbed(Biased().double())


def pass_through(model, step, rank):
    return backward_of(model(**vectors(step, rank))["scores"].square().mean())


def loss_on_the_handed_on_output(model, step, rank):
    output = model(**vectors(step, rank))
    return backward_of(output["scores"].square().mean() + output["bias"][0].mean())


def losses_on_hidden_states(model, step, rank):
    output = model(**vectors(step, rank))
    return backward_of(
        sum((k + 1) * state.square().mean() for k, state in enumerate(output["states"]))
    )


def loss_on_an_early_state_alone(model, step, rank):
    """Later blocks run in forward and get no gradient."""
    return backward_of(model(**vectors(step, rank))["states"][2].square().mean())


def hidden_states_of_llama(model, step, rank):
    output = model(**LLAMA.batch(step, rank), output_hidden_states=True)
    return backward_of(
        output.loss + sum(state.square().mean() for state in output.hidden_states[1:])
    )


EXITS = (
    pass_through,
    loss_on_the_handed_on_output,
    losses_on_hidden_states,
    loss_on_an_early_state_alone,
)


@pytest.mark.short(1)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRED)
@on_ranks("world_size", timeout=100)
def test_gradients_may_enter_a_unit_by_any_of_its_outputs(strategy):
    cases = [(biased, work) for work in EXITS] + [(LLAMA.build, hidden_states_of_llama)]
    for (build, work), settings in in_turn(cases, strategy, DEPTHS):
        assert_parity(build, work, settings, kinds=("sgd",))


# ---- attributes that users set on parameters -----------------------------------------------------


class Marked(nn.Linear):
    """Reads attributes set on its parameters before training and between steps, and sets some."""

    def forward(self, x):
        self.bias.rows = len(x)
        scale = getattr(self.weight, "scale", 1.0) * getattr(self.bias, "later", 1.0)
        return torch.tanh(super().forward(x) * scale) + x


def marked():
    torch.manual_seed(0)
    model = nn.Sequential(*[Marked(WIDTH, WIDTH) for _ in range(4)]).double()
    for index, layer in enumerate(model):
        layer.weight.scale = 0.5 + index
    return model


def loss_of_marked(model, step, rank):
    model[1].bias.later = 2.0 + step
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss = model(torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)).square().mean()
    loss.backward()
    assert [layer.bias.rows for layer in model] == [5] * 4
    return loss.detach()


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_attributes_of_parameters_are_visible_in_forward_and_after_it(strategy):
    for recompute in ("none", "block"):
        settings = {"strategy": strategy, "wrap": "Marked", "activation_checkpointing": recompute}
        model = assert_parity(marked, loss_of_marked, settings)
        with fs.unsharded(model):
            assert (model[1].weight.scale, model[1].bias.rows) == (1.5, 5)


class Switches(nn.Module):
    """Enables gradients inside its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x):
        with torch.enable_grad():
            return self.layers(x)


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_enable_gradients_inside():
    model = perturbed(Switches().double())
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    want = model(x).detach()
    fs.shard(model, wrap=["Linear"], transport="c10d", poison=True)
    with torch.inference_mode():
        found = model(x).clone()
    model(x).sum().backward()
    torch.testing.assert_close(found, want)
