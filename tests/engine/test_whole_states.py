"""Full states of model and optimizer are saved to one rank and loaded from one rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import CheckpointError, EngineError
from support.grid import chequered
from support.models import perturbed
from support.ranks import on_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.head(self.inner(self.words(x)))


def made(seed):
    torch.manual_seed(seed)
    return perturbed(Net().double())


def groups(model):
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[1:]}, {"params": params[:1], "lr": 0.1}], lr=0.01)


def steps(model, optimizer, numbers, scale=1):
    for number in numbers:
        optimizer.zero_grad()
        x = torch.arange(8).reshape(4, 2) + number % 3
        (model(x).square().mean() * scale).backward()
        optimizer.step()


def same(found, wanted):
    """Returns where two trees of states differ."""
    if isinstance(wanted, dict):
        off = [] if list(found) == list(wanted) else [f"keys {list(found)} {list(wanted)}"]
        return off + [f"{k}.{x}" for k in wanted if k in found for x in same(found[k], wanted[k])]
    if isinstance(wanted, torch.Tensor):
        far = (found - wanted).abs().max()
        return [] if torch.allclose(found, wanted, rtol=1e-10, atol=1e-13) else [f"by {far}"]
    return [] if found == wanted else [f"{found} {wanted}"]


CHANGES = {
    "half": lambda x: x / 2,
    "detached": lambda x: (x / 2).detach(),
    "data": lambda x: x.float().data,
    "parameter": lambda x: nn.Parameter(x / 2),
    "flat": lambda x: x.view(-1),
    "flat column": lambda x: x.reshape(-1).view(-1, 1) / 2 if x.dim() == 1 else x.detach().view(-1),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_a_full_state_has_the_values_of_a_state_dict_hook(change):
    def hook(_module, state, prefix, _metadata):
        state[f"{prefix}weight"] = CHANGES[change](state[f"{prefix}weight"])

    one = made(0)
    model = fs.shard(copy.deepcopy(one), wrap=("Linear",))
    for either in (one, model):
        either.inner[0].register_state_dict_post_hook(hook)
    assert not same(fs.full_state_dict(model, rank0_only=False), dict(one.state_dict()))


@pytest.mark.parametrize(("transport", "from_rank0"), chequered(["shared", "c10d"], [False, True]))
@on_ranks(2)
def test_saved_and_loaded_full_states_equal_one_process(transport, from_rank0):
    one = made(0)
    twin = copy.deepcopy(one)
    plain = groups(one)
    steps(one, plain, range(3))
    # Saved: equal to the unsharded run.
    model = fs.shard(twin, wrap=("Linear",), transport=transport, poison=True)
    optimizer = groups(model)
    steps(model, optimizer, range(3))
    state = fs.full_state_dict(model)
    optimizer_state = fs.full_optimizer_state_dict(model, optimizer)
    wrong = []
    if dist.get_rank() == 0:
        wrong += same(optimizer_state, plain.state_dict()) + same(state, dict(one.state_dict()))
    else:
        wrong += ["others"] if optimizer_state or state else []
    every = fs.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    wrong += same(every, plain.state_dict())
    # Loaded: the unsharded run's states, into a new model and optimizer.
    first = dist.get_rank() == 0 or not from_rank0
    loaded = fs.shard(made(1), wrap=("Linear",), transport=transport, poison=True)
    resumed = groups(loaded)
    given = dict(one.state_dict()) if first else {}
    if first:
        del given["head.weight"]  # tied: safetensors leaves it out
    fs.load_full_state(
        loaded, given, resumed, plain.state_dict() if first else None, from_rank0=from_rank0
    )
    steps(loaded, resumed, range(3, 6))
    steps(one, plain, range(3, 6))
    assert wrong + same(fs.full_state_dict(loaded, rank0_only=False), dict(one.state_dict())) == []


@on_ranks(2)
def test_states_of_another_model_or_optimizer_are_refused():
    model = fs.shard(made(0), wrap=("Linear",))
    before = fs.full_state_dict(model, rank0_only=False)
    whole: Any = {name: 2 * value for name, value in before.items()}
    optimizer = groups(model)
    given = copy.deepcopy(optimizer.state_dict())
    said = []
    broken = {"state": {}, "param_groups": given["param_groups"][:1]}
    for state, states in (
        ({"inner.0.bias": whole["inner.0.bias"]}, None),
        ({**whole, "late": torch.ones(1)}, None),
    ):
        with pytest.raises(CheckpointError) as error:
            fs.load_full_state(model, state, optimizer, states)
        said.append(str(error.value))
    assert same(fs.full_state_dict(model, rank0_only=False), before) == []
    with pytest.raises(CheckpointError) as error:
        fs.load_full_state(model, whole, optimizer, broken)
    assert same(fs.full_state_dict(model, rank0_only=False), before) == []
    missing, unknown, sizes = [*said, str(error.value)]
    assert "missing: ['head.weight', 'inner.0.weight', 'inner.1.bias']" in missing
    assert "unknown: ['late']" in unknown
    assert "expected groups of [4, 1] parameters" in sizes


def moments(key, change):
    """Changes one state of parameter 1 of the optimizer."""

    def changed(states):
        values = dict(states["state"][1])
        values[key] = change(values[key]) if change else values.pop(key) * torch.nan
        values = {k: v for k, v in values.items() if change or k != key}
        return {**states, "state": {**states["state"], 1: values}}

    return changed


MALFORMED = {
    "integer weights": ("inner.1.weight", lambda w: w.to(torch.int8), "got integer of shape"),
    "complex weights": ("inner.1.weight", lambda w: w.to(torch.complex128), "got complex of"),
    "late wrong shape": ("inner.1.weight", lambda w: w[:2], r"got floating point of shape \(2, 7"),
    "wrong buffer": ("scale", lambda w: w[:2], "expected scale in the shape of the whole tensor"),
    "a list": ("scale", lambda w: w.tolist(), "got list"),
}
MALFORMED_STATES = {
    "missing second moment": (moments("exp_avg_sq", None), r"states \['exp_avg', 'exp_avg_sq', "),
    "short moment": (moments("exp_avg", lambda x: x[:1]), "exp_avg of parameter 1 of AdamW in the"),
    "number as moment": (moments("exp_avg", lambda _: 0.0), "exp_avg of parameter 1 .* got float"),
    "integer moment": (moments("exp_avg", lambda x: x.int()), "got integer of shape"),
    "long count": (moments("step", lambda _: torch.ones(3)), "expected step of parameter 1"),
    "no state": (lambda s: {"param_groups": s["param_groups"]}, "got KeyError: 'state'"),
    "no groups": (lambda s: {"state": s["state"]}, "got KeyError: 'param_groups'"),
    "stranger": (lambda s: {**s, "state": {9: s["state"][1]}}, r"got some of \[9\]"),
    "a list": (lambda _: [], "got TypeError"),
    "nothing": (lambda _: None, "expected optimizer and optimizer_state together"),
    "function": (lambda s: {**s, "more": lambda: 0}, "pickle"),
}


@pytest.mark.parametrize("from_rank0", [False, True])
@on_ranks(2)
def test_malformed_states_are_refused_on_every_rank_before_anything_is_written(from_rank0):
    plain = made(0)
    saved = groups(plain)
    steps(plain, saved, range(2))
    model = fs.shard(made(1), wrap=("Linear",))
    optimizer = groups(model)
    before = fs.full_state_dict(model, rank0_only=False)
    whole, states = dict(plain.state_dict()), saved.state_dict()
    first = dist.get_rank() == 0
    cases = [
        ({**whole, name: change(whole[name])}, optimizer, states, said)
        for name, change, said in MALFORMED.values()
    ]
    cases += [
        (whole, optimizer, change(states), said)
        for change, said in MALFORMED_STATES.values()
        if from_rank0 or said != "pickle"
    ]
    params = list(model.parameters())
    sgd = torch.optim.SGD([{"params": params[1:]}, {"params": params[:1]}], lr=0.1, momentum=0.9)
    owned = fs.owned(model, lambda params: torch.optim.AdamW(params), params)
    factored = torch.optim.Adafactor(plain.parameters())
    factored.step()
    rows = copy.deepcopy(factored.state_dict())
    rows["state"][0]["row_var"] = rows["state"][0]["row_var"][1:]
    cases += [
        (whole, sgd, states, "SGD"),
        (whole, torch.optim.Adafactor(params), rows, "row_var of parameter 0"),
        (whole, owned, states, "fs.owned"),
        (None, optimizer, states, "got NoneType"),
    ]
    for state, into, given, said in cases:
        if not first and from_rank0:
            state, given = {}, None
        with pytest.raises((CheckpointError, EngineError), match=said):
            fs.load_full_state(model, state, into, given, from_rank0=from_rank0)
    assert optimizer.state == {}
    assert sgd.state == {}
    assert same(fs.full_state_dict(model, rank0_only=False), before) == []


@on_ranks(2)
def test_states_of_other_optimizers_and_of_older_versions_are_loaded():
    wrong = []
    for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.SGD, torch.optim.ASGD):
        plain, model = made(0), fs.shard(made(1), wrap=("Linear",))
        saved, optimizer = kind(plain.parameters(), 0.01), kind(model.parameters(), 0.01)
        steps(plain, saved, range(2))
        states = copy.deepcopy(saved.state_dict())
        for values in states["state"].values():
            if kind is torch.optim.NAdam:
                values["step"] = int(values["step"])  # as older versions of torch saved it
        fs.load_full_state(model, dict(plain.state_dict()), optimizer, states)
        saved.load_state_dict(copy.deepcopy(states))  # the load casts some, as torch does
        steps(plain, saved, range(2, 4))
        steps(model, optimizer, range(2, 4))
        wrong += same(fs.full_state_dict(model, rank0_only=False), dict(plain.state_dict()))
    assert wrong == []


@on_ranks(2)
def test_an_optimizer_of_another_model_and_a_bool_as_step_are_refused(tmp_path):
    model, other = fs.shard(made(0)), fs.shard(made(1))
    said = []
    for call in (
        lambda: fs.full_optimizer_state_dict(model, groups(other)),
        lambda: fs.save(tmp_path, model, step=True),
    ):
        with pytest.raises(CheckpointError) as error:
            call()
        said.append(str(error.value))
    optimizer, step = said
    assert "expected parameters of the model" in optimizer
    assert "expected a step >= 0, an integer or None; got True" in step
