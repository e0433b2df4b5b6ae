"""Every optimizer of torch is right on shards, or refused by name."""

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import optim

import fullshard as fs
from fullshard.engine import optimizers, parameter
from fullshard.errors import EngineError
from support.models import chain, mean_square, vectors
from support.ranks import on_ranks
from support.scripts import Run, compare, counted, differences, error_of, sharded_run, train

MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"foreach": None, "fused": True},
}
SETTINGS = {
    "AdamW": [
        (optim.AdamW, {"lr": 1e-2}),
        (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
        (optim.AdamW, {"lr": 1e-2, "maximize": True}),
    ],
    "Adam": [(optim.Adam, {"lr": 1e-2, "weight_decay": 0.1})],
    "SGD": [
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ],
    "Adagrad": [(optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1})],
    "RMSprop": [
        (optim.RMSprop, {"lr": 1e-2}),
        (optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ],
    "NAdam": [(optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True})],
    "RAdam": [(optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1})],
    "Adadelta": [(optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1})],
    "Adamax": [(optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1})],
    "ASGD": [(optim.ASGD, {"lr": 0.1, "t0": 1, "weight_decay": 0.1})],
    "Rprop": [(optim.Rprop, {"lr": 1e-2})],
}
TRANSPORTS = ("shared", "direct", "c10d")
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")


# ---- each optimizer of torch, in each of its implementations ----------------------------------


def made_after(run, kind, settings):
    model = run.shard(run.model())
    optimizer = kind(model.parameters(), **settings)
    train(run, model, optimizer)
    return run.result(model)


def made_before(run, kind, settings):
    model = run.model()
    optimizer = kind(model.parameters(), **settings)
    run.shard(model)
    train(run, model, optimizer)
    return run.result(model)


FIRST = [("AdamW", "fused", 3), ("SGD", "foreach", 2), ("Adam", "for-loop", 2)]


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        *FIRST,
        *(
            (name, mode, 2)
            for name in SETTINGS
            for mode in MODES
            if (mode != "fused" or name in FUSED) and (name, mode, 2) not in FIRST
        ),
    ],
)
@on_ranks("size")
def test_an_elementwise_optimizer_steps_as_in_one_process(name, mode):
    scripts = (made_after, made_before) if name == "AdamW" else (made_after,)
    for kind, settings in SETTINGS[name]:
        for script in scripts:
            compare(partial(script, kind=kind, settings={**settings, **MODES[mode]}))


# ---- the optimizer inside backward ------------------------------------------------------------


def stepped_by_hooks(run, **config):
    """One AdamW per parameter, which steps when its gradient is ready."""
    model = run.shard(run.model(), **config)
    optimizers = {p: optim.AdamW([p], lr=1e-2, eps=1e-4) for p in model.parameters()}

    def step_and_forget(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_forget)
    for step in range(3):
        run.loss(model, step).backward()
    left = [param.grad is None for param in model.parameters()]
    return run.result(model, left=left, stepped=[len(o.state) > 0 for o in optimizers.values()])


@pytest.mark.short(2)
@pytest.mark.parametrize(
    "config",
    [*({"transport": name} for name in TRANSPORTS), {"offload": "cpu"}, {"strategy": "no_shard"}],
    ids=str,
)
def test_optimizers_in_hooks_on_gradients_step_as_in_one_process(ranks, config):
    ranks(2)(compare, partial(stepped_by_hooks, **config))


# ---- refused ----------------------------------------------------------------------------------


def refusals():
    """Returns the errors of the first step of each whole-matrix optimizer."""
    run, model = sharded_run()
    matrices = [p for n, p in model.blocks.named_parameters() if n.endswith("mid.weight")]
    run.loss(model, 0).backward()
    before = run.result(model)
    texts = {}
    for optimizer in (
        optim.Adafactor(model.parameters()),
        optim.Muon(matrices),
        optim.LBFGS(model.parameters()),
    ):
        name = type(optimizer).__name__
        texts[name] = error_of(partial(optimizer.step, lambda: run.loss(model, 0)))
    assert not list(differences(run.result(model), before, 0.0))
    return texts


def test_an_optimizer_that_mixes_elements_is_refused_at_its_first_step(ranks, snapshot):
    texts = ranks(2)(refusals)
    assert texts[0] == texts[1]
    assert texts[0] == snapshot


@pytest.mark.parametrize(("trained", "told"), [(True, 1), (False, 0)])
@on_ranks(2)
def test_parameters_outside_the_model_are_reported_by_one_rank(trained, told):
    """Weights of a criterion, whose gradients no rank sums."""
    run, model = sharded_run()
    criterion = torch.nn.Linear(3, 2, bias=False).requires_grad_(trained)
    optimizer = optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with patch.object(optimizers.logger, "warning") as warning:
        for step in range(2):
            run.loss(model, step).backward()
            optimizer.step()
    assert [call.args[1:] for call in warning.call_args_list] == [
        ("SGD", 1, (2, 3)) for _ in range(told) if run.rank == 0
    ]


@on_ranks(2)
def test_the_probe_works_with_a_learning_rate_of_zero():
    run, model = sharded_run()
    optimizer = optim.Adafactor(model.parameters(), lr=0.0)
    run.loss(model, 0).backward()
    assert error_of(optimizer.step).startswith("NotElementwise")


def whole_matrices_under_no_shard(run):
    model = run.shard(run.model(), strategy="no_shard")
    train(run, model, optim.Adafactor(model.parameters(), lr=1e-2))
    return run.result(model)


def test_whole_matrix_optimizers_are_right_on_unsharded_parameters(ranks):
    ranks(2)(compare, whole_matrices_under_no_shard)


# ---- states of unsharded runs -----------------------------------------------------------------


def unsharded_state_loaded(run, when, kind, settings):
    """Two unsharded steps, then loads the state dict into an optimizer over shards."""
    alone = Run(run.world_size, None)
    model = alone.model()
    first = kind(model.parameters(), **settings)
    train(alone, model, first, 2)
    saved = first.state_dict()
    run.shard(model)
    optimizer = kind(model.parameters(), **settings)
    if when == "later":
        run.loss(model, 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    train(run, model, optimizer, 2)
    return run.result(model)


def state_carried_to_a_second_optimizer(run):
    model = run.shard(run.model())
    first = optim.AdamW(model.parameters(), lr=1e-2)
    train(run, model, first, 2)
    second = optim.AdamW(model.parameters(), lr=0.5)
    second.load_state_dict(first.state_dict())
    train(run, model, second, 2)
    keys = [sorted(state) for state in second.state_dict()["state"].values()]
    return run.result(model, keys=keys, rate=second.param_groups[0]["lr"])


def test_an_optimizer_state_of_shards_is_carried_to_a_second_optimizer(ranks):
    ranks(2)(compare, state_carried_to_a_second_optimizer)


def reloaded(run, kind, settings):
    """Loads state dicts between steps, directly and as deep copies."""
    model = run.shard(run.model())
    optimizer = kind(model.parameters(), **settings)
    for step in range(5):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state) if step % 2 else state)
    return run.result(model, types=[sorted(state) for state in optimizer.state.values()])


@pytest.mark.short(1)
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_optimizers_resume_from_their_own_state_dicts_and_unsharded_ones(name):
    for number, (kind, settings) in enumerate(SETTINGS[name]):
        compare(partial(reloaded, kind=kind, settings=settings))
        for when in ("later",) if number else ("later", "at the start"):
            compare(partial(unsharded_state_loaded, when=when, kind=kind, settings=settings))


def test_a_state_at_the_address_of_a_freed_one_is_a_new_state():
    part: Any = object.__new__(optimizers.OptimizerPart)
    param, kept = torch.zeros(2), []
    part.weights, states = [(param, 1)], {param: {"momentum": torch.zeros(2)}}
    part.note(states)
    address = id(states[param].pop("momentum"))
    while id(state := torch.zeros(2)) != address:
        kept.append(state)
        assert len(kept) < 1000
    states[param]["momentum"] = state
    (seen,), (now,) = part.seen, part.versions(states)
    assert optimizers.differ(seen, now)
    assert not optimizers.differ(now, *part.versions(states))


class OwnShapes(optim.Optimizer):
    """Momentum in tensors with the shape of this rank's shard."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros(p.shape, dtype=p.dtype))
            momentum.mul_(0.9).add_(p.grad)
            p.add_(momentum, alpha=-0.1)


def test_states_in_the_shape_of_a_shard_are_reloaded_too(ranks):
    ranks(2)(compare, partial(reloaded, kind=OwnShapes, settings={}))


# ---- the probe ----


@pytest.mark.short(1)
@pytest.mark.parametrize(("schedule", "count"), [("moved", 1), ("zeroed", 2)])
@on_ranks(2)
def test_a_schedule_of_numbers_is_probed_once_and_a_number_turned_off_again(schedule, count):
    run, model = sharded_run()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    cycle = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    with patch.object(optimizers, "probe", wraps=optimizers.probe) as probed:
        for step in range(10):
            run.loss(model, step).backward()
            optimizer.step()
            cycle.step()
            if schedule == "zeroed" and step == 5:
                optimizer.param_groups[0]["weight_decay"] = 0.0
    assert probed.call_count == count


def test_the_probe_runs_on_the_device_of_the_parameters():
    seen = []

    class Here(optim.SGD):
        def step(self, closure=None):
            seen.extend(p.device.type for group in self.param_groups for p in group["params"])
            return super().step(closure)

    optimizer = Here([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    group, like = optimizer.param_groups[0], torch.empty(0, device="meta")
    with pytest.raises(RuntimeError, match="meta"):  # meta tensors have no values to compare
        optimizers.WATCHED._probe_once(optimizer, group, like)
    assert set(seen) == {"meta"}


@pytest.mark.parametrize(("dtype", "tried"), [("fp32", {"fp32"}), ("bf16", {"fp32", "bf16"})])
def test_the_probe_has_the_precision_of_the_parameters(dtype, tried):
    seen, names = set(), {torch.float32: "fp32", torch.bfloat16: "bf16"}

    class Noting(optim.SGD):
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            seen.update(names[p.dtype] for p in params if not hasattr(p, "full_tensor"))
            return super().step(closure)

    model = fs.shard(chain().float(), transport="fake", shard=2, master_dtype=dtype)
    mean_square(model(vectors(0, 0)["x"].to(model.blocks[0].up.weight.dtype))).backward()
    Noting(model.parameters(), lr=0.1).step()
    assert seen == tried


class OneRateForAll(optim.SGD):
    """Like Prodigy: one rate for the whole model, from dot products of tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rate = sum((p.grad * p.grad).sum() for p in params)
        for p in params:
            p.sub_(p.grad * float(rate))


class Flattening(optim.SGD):
    """Elementwise, but on flattened tensors, which a small trial cannot distinguish."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad.flatten().view_as(p), alpha=0.1)


@pytest.mark.parametrize(
    ("kind", "says"), [(OneRateForAll, ": expected"), (Flattening, ".step calls flatten: expected")]
)
@on_ranks(2)
def test_an_optimizer_that_needs_full_tensors_is_refused_by_name(kind, says):
    run, model = sharded_run()
    run.loss(model, 0).backward()
    text = error_of(kind(model.parameters(), lr=0.1).step)
    assert text.startswith(f"NotElementwiseError: {kind.__name__}{says}")
    assert "fs.owned(model" in text
    assert "no_shard" in text


class Container(optim.Optimizer):
    """Like torchtitan's: an optimizer of the model's parameters that steps others."""

    def __init__(self, params, kinds, sweeps=None):
        params = list(params)
        half = len(params) // 2
        self.inner = [kind(params[: half or 1], lr=1e-2) for kind in kinds[:1]]
        self.inner += [kind(params[half:], lr=1e-2) for kind in kinds[1:]]
        self.sweeps = sweeps
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.inner:
            one.step()
        for param in self.param_groups[0]["params"]:
            if self.sweeps is not None:
                self.sweeps(param)


def contained(run, kinds):
    model = run.shard(run.model())
    train(run, model, Container(model.parameters(), kinds))
    return run.result(model)


@on_ranks(2)
def test_inner_optimizers_are_probed_and_the_outer_one_is_not():
    compare(partial(contained, kinds=(optim.AdamW, optim.SGD)))


@on_ranks(2)
def test_an_outer_optimizer_is_probed_unless_inner_ones_have_all_parameters():
    run = Run(2, torch.distributed.get_rank())
    found = {}
    for name, kinds, sweeps in (
        ("an inner one mixes", (optim.SGD, optim.Adafactor), None),
        ("half has none", (optim.SGD,), None),
        ("the outer one mixes", (optim.SGD, optim.SGD), lambda p: p.flatten()),
        ("out of sight", (optim.SGD, optim.SGD), lambda p: p.data.flatten()),
    ):
        model = run.shard(run.model())
        run.loss(model, 0).backward()
        found[name] = error_of(Container(model.parameters(), kinds, sweeps).step)
    assert "Adafactor: expected an elementwise optimizer" in found["an inner one mixes"]
    assert "Container: expected an optimizer that can be tried" in found["half has none"]
    assert "Container.step calls flatten: expected" in found["the outer one mixes"]
    assert "Container.step calls flatten: expected" in found["out of sight"]


@on_ranks(2)
def test_unsharded_parameters_are_named_when_they_come_to_an_optimizer():
    run, model = sharded_run()
    early, late = (torch.nn.Parameter(torch.ones(n)) for n in (3, 4))
    optimizer = optim.SGD([*model.parameters(), early], lr=0.1)
    with patch.object(optimizers.logger, "warning") as warned:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [late]})
            run.loss(model, step).backward()
            optimizer.step()
    told = [call.args[1:] for call in warned.call_args_list]
    assert told == ([] if torch.distributed.get_rank() else [("SGD", 1, (3,)), ("SGD", 1, (4,))])


# ---- the fast paths ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"fused": True}, {"_fused_adamw_": 1, "_foreach_lerp_": 0}),
        ({"foreach": True}, {"_fused_adamw_": 0, "_foreach_lerp_": 1, "_foreach_addcdiv_": 1}),
    ],
    ids=["fused", "foreach"],
)
@on_ranks(2)
def test_a_step_of_adamw_is_one_call_per_operation(settings, wanted):
    run, model = sharded_run()
    optimizer = optim.AdamW(model.parameters(), **settings)
    for step in range(2):  # the class is probed at the first step
        run.loss(model, step).backward()
        if step == 0:
            optimizer.step()
    with counted(*wanted) as calls:
        optimizer.step()
    assert {name: call.call_count for name, call in calls.items()} == wanted


@on_ranks(2)
def test_states_with_views_are_written_without_a_search():
    _, model = sharded_run()
    states = [torch.zeros_like(param) for param in model.parameters()]
    views = [state.detach() for state in states]
    with patch.object(parameter, "params_of", wraps=parameter.params_of) as searches:
        torch._foreach_add_(states, 1.0)
        assert not searches.call_count
        param = next(model.parameters())
        param.data = views[0]
        torch._foreach_add_(states, 1.0)  # a parameter shares the memory of one
        assert searches.call_count == len(states)
    assert param.record.norms.wrote


def steps(model, optimizer):
    optimizer.step()


def writes_a_gradient(model, optimizer):
    model[1].weight.grad = torch.ones(3, 3)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_hook_on_a_module_neither_steps_nor_sees_gradients(strategy):
    """Gradients are summed at the end of backward; before that, p.grad is None."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(fs.shard(model, strategy=strategy).parameters())
    for act in (steps, writes_a_gradient):
        hook = model[1].register_full_backward_hook(lambda *_, act=act: act(model, optimizer))
        with pytest.raises(EngineError, match=r"[01].weight.grad inside a backward: expected"):
            model(torch.ones(2, 3)).sum().backward()
        hook.remove()
    assert model[1].weight.grad is None
