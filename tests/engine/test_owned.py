"""Unmodified whole-matrix optimizers of torch, run by owners, equal one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import fullshard as fs
from fullshard.config.values import Optimizer
from fullshard.engine.engine import engine_of
from fullshard.planner.memory import whole_bytes
from fullshard.planner.optimizers import OptimizerStates
from support.ranks import on_ranks
from support.scripts import (
    Run,
    bytes_with_gradients,
    compare,
    differences,
    error_of,
    sharded_run,
    train,
    whole_parameters,
)

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "eps": 1e-4}


def split(model):
    """Splits parameters into matrices of blocks and the rest."""
    matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    taken = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in taken]


NO_ERROR = "NO ERROR: NoneType"


class Both:
    """Steps two optimizers of one process one after the other."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def muon_and_adamw(run, *, clear_at=-1, **config):
    """Muon for matrices of blocks, AdamW for the rest, clipped, with a schedule.

    All states are cleared before step `clear_at`.
    """
    model = run.shard(run.model(tied=True), **config)
    matrices, rest = split(model)
    muon, adamw = partial(optim.Muon, **MUON), optim.AdamW(rest, **ADAMW)
    if run.sharded:
        optimizer: Any = fs.owned(model, muon, [{"params": matrices}], beside=adamw)
        schedules = [optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]
    else:
        optimizer = Both(muon(matrices), adamw)
        schedules = [
            optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))
            for one in optimizer.optimizers
        ]
    norms = []
    for step in range(4):
        if step == clear_at:
            for one in [optimizer] if run.sharded else optimizer.optimizers:
                one.state.clear()
        run.loss(model, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    return run.result(model, norms=norms)


def all_by(run, kind, settings, **config):
    model = run.shard(run.model(), **config)
    make = partial(kind, **settings)
    optimizer = fs.owned(model, make) if run.sharded else make(model.parameters())
    train(run, model, optimizer)
    return run.result(model)


ADAFACTOR = {"lr": 1e-2, "weight_decay": 0.1}
MESHES = [
    (2, {"transport": "direct"}),
    (4, {"strategy": "hybrid_shard", "replicate": 2}),
    (2, {"transport": "shared"}),
    (2, {"strategy": "no_shard"}),
    (1, {}),
    (2, {"transport": "c10d", "strategy": "shard_grad_op"}),
    (2, {"offload": "cpu"}),
    (3, {}),
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("world_size", "config"), MESHES, ids=str)
def test_muon_beside_adamw_is_as_in_one_process(ranks, world_size, config):
    ranks(world_size)(compare, partial(muon_and_adamw, **config))


def test_cleared_states_start_again_as_in_one_process(ranks):
    ranks(2)(compare, partial(muon_and_adamw, clear_at=2))


@pytest.mark.short(1)
@pytest.mark.parametrize(("world_size", "config"), MESHES, ids=str)
def test_adafactor_is_as_in_one_process(ranks, world_size, config):
    script = partial(all_by, kind=optim.Adafactor, settings=ADAFACTOR, **config)
    ranks(world_size)(compare, script)


def test_states_made_with_the_optimizer_are_the_owners(ranks):
    ranks(3)(compare, partial(all_by, kind=optim.Adagrad, settings={"lr": 1e-2}))


def with_frozen_and_left_out(run):
    model = run.model()
    model.blocks[0].mid.requires_grad_(False)
    run.shard(model, ignore=["scale"], strategies={"blocks.1": "no_shard"})
    make = partial(optim.Adafactor, **ADAFACTOR)
    optimizer = fs.owned(model, make) if run.sharded else make(model.parameters())
    for step in range(4):
        run.loss(model, step).backward()
        model.scale.grad = None if step == 1 else torch.tensor(0.5, dtype=torch.float64)
        model.blocks[2].up.weight.grad = None if step == 2 else model.blocks[2].up.weight.grad
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


@pytest.mark.short(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_ignored_unsharded_and_unused_parameters(ranks, world_size):
    ranks(world_size)(compare, with_frozen_and_left_out)


def states_of_owners():
    run, model = sharded_run()
    optimizer = fs.owned(model, partial(optim.Adafactor, lr=1e-2))
    train(run, model, optimizer, 1)
    names = {id(p): n for n, p in model.named_parameters()}
    return [
        (names[id(p)], tuple(state["row_var"].shape))
        for p, state in optimizer.state.items()
        if "row_var" in state
    ]


def test_each_state_is_stored_in_full_by_one_owner(ranks):
    found = [entry for rank in ranks(3)(states_of_owners) for entry in rank]
    matrices = 3 * 3 + 2
    assert len(found) == len(set(found)) == matrices
    assert ("blocks.1.mid.weight", (22, 1)) in found


@on_ranks(2)
def test_full_parameters_use_no_memory_between_steps():
    run, model = sharded_run()
    optimizer, found = fs.owned(model, partial(optim.Adafactor, lr=1e-2)), []
    with whole_parameters(found.append):
        train(run, model, optimizer, 1)
    wholes = found[-1]
    assert all(p.grad is None for p in wholes)
    assert max(p.untyped_storage().nbytes() for p in wholes) == 8


class Shared(optim.SGD):
    """Its rate depends on its total number of steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] /= 2
        super().step(closure)


class Anchored(optim.SGD):
    """Copies the initial values of its parameters."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["anchor"] = param.detach().clone()

    def step(self, closure=None):
        with torch.no_grad():
            for param, state in self.state.items():
                if param.grad is not None:
                    param.grad += param - state["anchor"]
        super().step(closure)


class Late(optim.SGD):
    """Changes its behaviour after more calls than a probe makes."""

    def __init__(self, params, lr, *, fails=False):
        super().__init__(params, lr=lr)
        self.calls, self._calls, self._fails = 0, 0, fails

    def step(self, closure=None):
        self._calls += 1
        if self._calls > 8:
            self.calls += 1
            if self._fails:
                raise ValueError("boom")
        super().step(closure)


class Switched(optim.SGD):
    """Records that it has begun, as bitsandbytes' optimizers do."""

    initialized = False

    def step(self, closure=None):
        self.initialized = True
        super().step(closure)


def refusals(rank_without):
    run, model = sharded_run()
    adafactor = partial(optim.Adafactor, lr=1e-2)
    optimizer = fs.owned(model, adafactor)
    adamw = optim.AdamW([model.scale])
    before = run.result(model)
    texts = {
        "mixes tensors": error_of(lambda: fs.owned(model, partial(Shared, lr=0.1))),
        "a rate of zero": error_of(lambda: fs.owned(model, partial(Shared, lr=0))),
        "copies values": error_of(lambda: fs.owned(model, partial(Anchored, lr=0.1))),
        "owned twice": error_of(
            lambda: fs.owned(model, adafactor, [model.head.weight], beside=optimizer)
        ),
        "needs a closure": error_of(lambda: fs.owned(model, optim.LBFGS)),
        "not 2-D": error_of(lambda: fs.owned(model, optim.Muon)),
        "another model's": error_of(lambda: fs.owned(model, adafactor, [nn.Linear(2, 2).weight])),
        "in both": error_of(lambda: fs.owned(model, adafactor, model.parameters(), beside=adamw)),
        "nothing": error_of(lambda: fs.owned(model, adafactor, [])),
        "closure": error_of(lambda: optimizer.step(lambda: 0.0)),
        "group": error_of(lambda: optimizer.add_param_group({"params": [model.scale]})),
        "save": error_of(optimizer.state_dict),
        "load": error_of(lambda: optimizer.load_state_dict({})),
    }
    run.loss(model, 0).backward()
    if run.rank == rank_without:
        model.head.weight.grad = None
    texts["one rank's gradient"] = error_of(optimizer.step)
    with fs.unsharded(model):
        texts["unsharded"] = error_of(optimizer.step)
    assert not list(differences(run.result(model), before, 0.0))
    return texts


def test_what_owners_cannot_do_is_refused_on_all_ranks(ranks, snapshot):
    texts = ranks(2)(refusals, 1)
    assert [w for w, text in texts[0].items() if "Error: " not in text] == []
    assert texts[0].keys() == texts[1].keys()
    assert texts[0] == snapshot


def edited(edit, *, kind=optim.Adafactor, **settings):
    """Returns the errors of a step after an edit, or from the ninth step on."""
    run = Run(2, dist.get_rank())
    model = run.model()
    model.scale.requires_grad_(False)
    run.shard(model, ignore=["scale"])
    rest = optim.AdamW(model.head.parameters())
    taken = {id(param) for param in model.head.parameters()}
    params = [p for p in model.parameters() if id(p) not in taken]
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = fs.owned(model, partial(kind, lr=0.1, **settings), groups, beside=rest)
    for step in range(9):
        if step == 1:
            edit(model, optimizer, rest)
        run.loss(model, step).backward()
        said = error_of(optimizer.step)
        optimizer.zero_grad()
        if said != NO_ERROR:
            return said
    return NO_ERROR


EDITS = {
    "a group less": lambda _, o, __: o.param_groups.pop(0),
    "groups turned round": lambda _, o, __: o.param_groups.reverse(),
    "a parameter less": lambda _, o, __: o.param_groups[0]["params"].pop(0),
    "a group beside": lambda m, _, b: b.add_param_group({"params": [m.scale]}),
    "thawed": lambda m, _, __: m.scale.requires_grad_(True),
}


def untouched(*_):
    pass


def edits():
    texts = {what: edited(edit) for what, edit in EDITS.items()}
    texts["counts its calls"] = edited(untouched, kind=Late)
    failing = {"kind": Late, "fails": True} if dist.get_rank() == 0 else {"kind": optim.SGD}
    texts["fails on one rank"] = edited(untouched, **failing)
    texts["notes that it has begun"] = edited(untouched, kind=Switched)
    texts["numbers of groups"] = edited(lambda _, o, __: o.param_groups[0].update(lr=0.2))
    return texts


def test_what_owners_would_not_know_of_is_an_error_on_all_ranks(ranks, snapshot):
    texts = ranks(2)(edits)
    for text in texts:  # each rank names its own parameter
        assert "boom" in text.pop("fails on one rank")
    assert texts[0] == texts[1]
    assert texts[0] == snapshot


@on_ranks(2)
def test_full_tensors_of_only_a_tensor_axis_are_gathered_in_planned_rounds():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    style = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {str(at): style for at in range(3)})
    fs.shard(model, mesh=mesh["shard"], wrap="Linear")
    optimizer = fs.owned(model, optim.Adafactor)
    seen: list[int] = []
    model(torch.ones(2, 8)).sum().backward()
    with whole_parameters(lambda params: seen.append(bytes_with_gradients(params))):
        optimizer.step()
    wholes = OptimizerStates("", 0, owned=Optimizer.ADAMW_BNB_8BIT)  # temporaries are not counted
    assert seen == [2 * 4 * 8 * 8] * 3
    parts = seen[0] // 2  # allocated before: the owner's part and its gradient
    assert whole_bytes(engine_of(model).plan.groups, wholes) == seen[0] + parts
