"""Saving and loading weights: state dicts, full units, averages."""

import copy
import itertools
import os
import pickle
import re
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import get_rank as rank

import fullshard as fs
from fullshard.errors import ConfigError, EngineError
from support.grid import STRATEGIES
from support.ranks import on_ranks
from support.scripts import Run, Tiny, compare, differences, error_of, tokens_of


def sharded(tied=False, **config):
    """Returns the run, the sharded model, and the same model unsharded."""
    run = Run(torch.distributed.get_world_size(), rank())
    return run, run.shard(run.model(tied=tied), **config), run.model(tied=tied)


def same(found, wanted):
    return not list(differences(found, wanted, 0.0))


# ---- full_state_dict --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "strategy", "world_size"),
    [*itertools.product([False, True], STRATEGIES, [2]), (True, "full_shard", 3)],
)
@on_ranks("world_size")
def test_full_state_dict_is_the_unsharded_state_dict(tied, strategy):
    _, model, whole = sharded(tied, strategy=strategy)
    state, wanted = fs.full_state_dict(model, rank0_only=False), whole.state_dict()
    assert list(state) == list(wanted)
    assert "scratch" not in state  # not persistent
    assert same(state, wanted)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert [value.dtype for value in state.values()] == [v.dtype for v in wanted.values()]
    if tied:
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    on_zero = fs.full_state_dict(model)
    assert on_zero == {} if rank() else same(on_zero, wanted)
    small = fs.full_state_dict(model, dtype=torch.bfloat16, rank0_only=False)
    assert small["steps"].dtype == torch.int64
    assert same(small["shift"], wanted["shift"].bfloat16())
    assert same(small["head.weight"], wanted["head.weight"].bfloat16())


@on_ranks(2)
def test_a_full_state_dict_has_a_floating_point_dtype_or_is_refused():
    _, model, _ = sharded(tied=False)
    start = "fs.full_state_dict: dtype: expected one of float64, float32, bfloat16, float16; got "
    for dtype, got in {
        torch.int8: "torch.int8",
        torch.bool: "torch.bool",
        "int8": "'int8'",
        "bflot16": "'bflot16'. Did you mean 'bfloat16'?",
        16: "16",
    }.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(start + got)}$"):
            fs.full_state_dict(model, dtype=dtype)
    words = [fs.full_state_dict(model, dtype=d, rank0_only=False) for d in ("bf16", torch.bfloat16)]
    assert same(*(state["head.weight"] for state in words))
    assert words[0]["head.weight"].dtype == torch.bfloat16


class WithExtras(Tiny):
    """A model whose state dict also has values that are not tensors, under its own name."""

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        self.version = state["version"]


def renamed(module, state, prefix, metadata):
    state["output.weight"] = state.pop("head.weight")


@on_ranks(2)
def test_full_state_dict_runs_the_models_own_hooks():
    run = Run(2, rank())
    model = run.model(WithExtras)
    model.register_state_dict_post_hook(renamed)
    wanted = model.state_dict()
    run.shard(model)
    state = fs.full_state_dict(model, rank0_only=False)
    assert state["_extra_state"] == {"version": 3}
    assert same(state, wanted)


# ---- loading ----------------------------------------------------------------------------------


def filled(model, seed=5):
    """Returns a full state dict with different values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_loading_a_whole_state_dict_slices_it_on_every_rank(tied, strategy):
    _, model, whole = sharded(tied, strategy=strategy)
    state = filled(whole)
    if tied:
        state["head.weight"] = state["embed.weight"]
    kept = dict(state)
    result = model.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(state[name] is kept[name] for name in kept)  # the caller's dict is unchanged
    assert same(fs.full_state_dict(model, rank0_only=False), state)
    part = filled(whole, seed=6)
    prefix = "blocks.1."
    inner = {k.removeprefix(prefix): v.float() for k, v in part.items() if k.startswith(prefix)}
    model.blocks[1].load_state_dict(inner)  # also in another dtype
    found = fs.full_state_dict(model, rank0_only=False)
    assert same(found, {**state, **{prefix + k: v.double() for k, v in inner.items()}})
    older = whole.scale.detach().view(1)  # torch accepts it for a zero-dimensional parameter
    model.load_state_dict({**whole.state_dict(), "scale": older})
    assert same(model(tokens_of(0, rank())), whole(tokens_of(0, rank())))


def failed_loads():
    _, model, whole = sharded()
    before = fs.full_state_dict(model, rank0_only=False)
    state = whole.state_dict()
    cases = {
        "missing": {k: v for k, v in state.items() if k != "head.weight"},
        "unexpected": {**state, "extra.weight": torch.ones(2)},
        "wrong shape": {**state, "head.weight": torch.ones(3, 10)},
        "shape of a shard": {**state, "embed.weight": torch.ones(model.embed.weight.shape)},
    }
    texts = {name: error_of(partial(model.load_state_dict, case)) for name, case in cases.items()}
    texts["assign"] = error_of(partial(model.load_state_dict, state, assign=True))
    with patch.object(torch.__future__, "get_swap_module_params_on_conversion", lambda: True):
        texts["swap"] = error_of(partial(model.load_state_dict, state))
    assert same(fs.full_state_dict(model, rank0_only=False), before)
    result = model.load_state_dict(cases["missing"], strict=False)
    texts["not strict"] = str(result)
    return texts


def test_failed_loads_say_what_torch_says_and_change_nothing(ranks, snapshot):
    texts = ranks(2)(failed_loads)
    assert texts[0].pop("shape of a shard").startswith("UNTYPED RuntimeError")
    assert texts[0] == snapshot


# ---- saving shards -----------------------------------------------------------------------------


def state_dict_on_one_rank():
    """model.state_dict() is no collective."""
    run, model, whole = sharded()
    names = []
    if rank() == 0:
        state = model.state_dict()
        assert list(state) == list(whole.state_dict())
        names = [type(value).__name__ for value in state.values()]
    run.loss(model, 0).backward()
    return names


def test_state_dict_may_be_called_on_one_rank_alone(ranks):
    names, nothing = ranks(2)(state_dict_on_one_rank)
    assert nothing == []
    assert set(names) == {"ShardedTensor", "Tensor"}


def saved_anyway(folder):
    import safetensors.torch

    run, model, _ = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    run.loss(model, 0).backward()
    optimizer.step()
    file = folder / f"rank_{rank()}"
    weight = model.blocks[0].mid.weight
    state = model.state_dict()
    texts = {
        "torch.save(model.state_dict())": error_of(lambda: torch.save(state, file)),
        "torch.save(optimizer.state_dict())": error_of(
            lambda: torch.save(optimizer.state_dict(), file)
        ),
        "torch.save(model)": error_of(lambda: torch.save(model, file)),
        "pickle.dumps(weight)": error_of(lambda: pickle.dumps(weight)),
        "pickle.dumps(weight.grad)": error_of(lambda: pickle.dumps(weight.grad)),
        "copy.copy(weight)": error_of(lambda: copy.copy(weight)),
    }
    reads = error_of(lambda: torch.load(file, weights_only=True))
    assert reads.startswith("UNTYPED RuntimeError: PytorchStreamReader"), reads
    file.unlink()
    tensors = {name: value for name, value in state.items() if name != "steps"}
    texts |= {
        "safetensors save_file": error_of(lambda: safetensors.torch.save_file(tensors, file)),
        "safetensors save": error_of(lambda: safetensors.torch.save(tensors)),
        "safetensors save_model": error_of(lambda: safetensors.torch.save_model(model, str(file))),
        "weight.numpy()": error_of(lambda: weight.detach().numpy()),
        "weight.data_ptr()": error_of(weight.data_ptr),
        "weight.untyped_storage()": error_of(weight.untyped_storage),
        "weight.tolist()": error_of(weight.tolist),
    }
    assert not os.path.exists(file)  # noqa: PTH110
    return texts


def test_saving_a_shard_raises_and_leaves_no_file_that_loads(ranks, snapshot, tmp_path):
    assert ranks(2)(saved_anyway, tmp_path)[0] == snapshot


@on_ranks(2)
def test_torch_save_works_with_unsharded_parameters(tmp_path):
    _, model, whole = sharded(strategy="no_shard")
    if rank() == 0:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        assert same(state, whole.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_whole_tensors_of_a_state_dict_share_storages_only_if_tied(strategy, tmp_path):
    from accelerate.utils.modeling import id_tensor_storage

    _, model, whole = sharded(strategy=strategy, tied=True)
    with nullcontext() if strategy == "no_shard" else fs.unsharded(model):
        state = model.state_dict()
        assert len({id_tensor_storage(value) for value in state.values()}) == len(state) - 1
        sizes = []
        for number, saved in enumerate((state, whole.state_dict())):
            torch.save(saved, file := tmp_path / f"{rank()}_{number}.pt")
            sizes.append(file.stat().st_size)
        assert sizes[0] < 1.1 * sizes[1]
        one = state["blocks.0.mid.weight"]
        with torch.no_grad():
            one.mul_(2)
        assert same({"": model.blocks[0].mid.weight.detach()}, {"": one})


# ---- fs.unsharded -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_inside_unsharded_parameters_are_whole_and_edits_are_kept(strategy):
    run, model, whole = sharded(strategy=strategy)
    params = dict(model.named_parameters())
    with fs.unsharded(model):
        assert same(dict(model.state_dict()), whole.state_dict())
        assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(params)
        assert all(p is params[name] for name, p in model.named_parameters())
        with torch.no_grad():
            assert same(model(tokens_of(0, 0)), whole(tokens_of(0, 0)))
            model.head.weight.mul_(3)
            model.blocks[0].up.bias[2:5] = 7.0
        model.embed.load_state_dict({"weight": torch.full((11, 10), 0.5)})
    with torch.no_grad():
        whole.head.weight.mul_(3)
        whole.blocks[0].up.bias[2:5] = 7.0
        whole.embed.weight.fill_(0.5)
    assert same(fs.full_state_dict(model, rank0_only=False), whole.state_dict())
    with fs.unsharded(model, writeback=False):
        model.head.weight.data.zero_()
    assert same(fs.full_state_dict(model, rank0_only=False), whole.state_dict())
    with pytest.raises(ZeroDivisionError), fs.unsharded(model):
        raise ZeroDivisionError
    run.loss(model, 0).backward()
    assert all(p is params[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_data_assigned_inside_unsharded_is_kept(strategy):
    _, model, whole = sharded(strategy=strategy)

    def assign(a, b, model):
        a.data, b.data = b.data.t(), a.data.t()  # each is a view of the other's memory
        model.head.weight.data = model.head.weight.data * 3
        vector = nn.utils.parameters_to_vector(model.blocks[1].parameters())
        nn.utils.vector_to_parameters(vector * 2, model.blocks[1].parameters())

    with fs.unsharded(model):
        assign(model.blocks[0].mid.weight, model.blocks[2].mid.weight, model)
    assign(whole.blocks[0].mid.weight, whole.blocks[2].mid.weight, whole)
    assert same(fs.full_state_dict(model, rank0_only=False), whole.state_dict())
    block = fs.unsharded(model)
    block.__enter__()
    model.scale.data = torch.zeros(2)
    model.head.weight.data = whole.head.weight.data * 2
    with pytest.raises(EngineError, match=r"scale.*kept.*shape and dtype"):
        block.__exit__(None, None, None)
    whole.head.weight.data *= 2
    assert same(fs.full_state_dict(model, rank0_only=False), whole.state_dict())


@pytest.mark.parametrize("name", ["head.weight", "scale"])  # one rank has all of scale
@on_ranks(2)
def test_a_gradient_assigned_inside_unsharded_is_an_error_on_all_ranks(name):
    run, model, _ = sharded()
    param = model.get_parameter(name)
    with pytest.raises(EngineError, match=f"no new gradient.*{name}.*dropped"):
        with fs.unsharded(model):
            param.grad = torch.ones_like(param)
    assert param.grad is None
    run.loss(model, 0).backward()
    with fs.unsharded(model):
        param.grad.mul_(2)  # the gradient of the shard


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_gradients_set_inside_unsharded_equal_those_set_outside(strategy):
    found = []
    for block in (nullcontext, fs.unsharded):
        run, model, _ = sharded(strategy=strategy)
        with fs.no_sync(model):
            run.loss(model, 1).backward()
        with block(model):
            model.head.weight.grad = None  # drops deferred gradients
            if strategy == "no_shard":
                model.scale.grad = torch.ones(model.scale.shape, dtype=model.scale.dtype)
        run.loss(model, 0).backward()
        fs.clip_grad_norm_(model, 0.5)
        found.append([p.grad.to_local().clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def misused_blocks():
    run, model, _ = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.loss(model, 0).backward()
    optimizer.step()  # shards here, full tensors below
    nested, waits = fs.unsharded(model), run.loss(model, 0)
    with fs.unsharded(model):
        texts = {
            "training": error_of(lambda: run.loss(model, 0)),
            "backward": error_of(waits.backward),
            "optimizer": error_of(optimizer.step),
            "full_state_dict": error_of(lambda: fs.full_state_dict(model)),
            "nested": error_of(nested.__enter__),
        }
    run.loss(model, 1).backward()
    optimizer.step()
    return texts


def test_misuse_inside_unsharded_is_said(ranks, snapshot):
    assert ranks(2)(misused_blocks)[0] == snapshot


# ---- averages and copies ----------------------------------------------------------------------


def averaged(run, update):
    """Keeps an exponential moving average of the weights, and evaluates it."""
    model = run.shard(run.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
    whole = {n: a.full_tensor() if run.sharded else a for n, a in average.items()}
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(average[name])
        loss = run.loss(model, 9)
        for name, param in model.named_parameters():
            param.data.copy_(kept[name])
    if run.sharded:
        torch.distributed.all_reduce(loss)
        loss /= 2
    return run.result(model, average=whole, loss=loss)


def by_data(average, model):
    for name, param in model.named_parameters():
        average[name].mul_(0.9).add_(param.data, alpha=0.1)


def by_lerp(average, model):
    with torch.no_grad():
        torch._foreach_lerp_(list(average.values()), list(model.parameters()), 0.1)


def by_state_dict(average, model):
    state = model.state_dict()
    for name, value in average.items():
        value.copy_(0.9 * value + (1 - 0.9) * state[name])


def by_torch(average, model):
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    update(list(average.values()), [p.detach() for p in model.parameters()], torch.tensor(1))


@pytest.mark.short(2)
@pytest.mark.parametrize("update", [by_data, by_lerp, by_state_dict, by_torch])
def test_an_average_of_shards_is_the_shard_of_the_average(ranks, update):
    ranks(2)(compare, partial(averaged, update=update))


def taught_by_an_average(run, update):
    """A frozen teacher follows a partly frozen student."""
    student, teacher = run.model(), run.model()
    for part in (student.embed, student.blocks[1].mid):
        part.requires_grad_(False)
    if update == "lerp":  # corresponding elements: both are sharded alike, then frozen
        for part in (teacher.embed, teacher.blocks[1].mid):
            part.requires_grad_(False)
    else:
        teacher.requires_grad_(False)
    run.shard(student)
    run.shard(teacher).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        with torch.no_grad():
            run.loss(teacher, step)
        run.loss(student, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update == "load":
            teacher.load_state_dict(student.state_dict())
            continue
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return [run.result(student), run.result(teacher)]


@pytest.mark.short(1)
@pytest.mark.parametrize("update", ["load", "lerp"])
def test_a_teacher_follows_a_student_that_is_frozen_in_part(ranks, update):
    ranks(2)(compare, partial(taught_by_an_average, update=update))


def met_while_cut_otherwise():
    """Combines shards of two models with different offsets."""
    run = Run(2, rank())
    student, teacher = run.model(), run.model()
    student.blocks[1].mid.requires_grad_(False)
    run.shard(student)
    run.shard(teacher)
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    texts = [error_of(lambda: t.data.lerp_(s.data, 0.1)) for t, s in pairs]  # noqa: B023
    return [text for text in texts if not text.startswith("NO ERROR")]


def test_shards_with_other_offsets_are_refused_on_all_ranks_with_a_remedy(ranks):
    first, second = ranks(2)(met_while_cut_otherwise)
    assert first
    assert len(first) == len(second)
    assert all("freeze parameters after fs.shard" in text for text in first + second)


def copies():
    run, model, _ = sharded()
    weight = model.blocks[0].mid.weight
    run.loss(model, 0).backward()
    copied, gradient = copy.deepcopy(weight), copy.deepcopy(weight.grad)
    assert (type(copied).__name__, type(gradient).__name__) == (
        "ShardedParameter",
        "ShardedGradient",
    )
    weight.data.add_(1)
    assert (copied.full_tensor() + 1 - weight.full_tensor()).abs().max() == 0
    swa = torch.optim.swa_utils.AveragedModel
    _, uncut, _ = sharded(strategy="no_shard")
    return {
        "copy.deepcopy(model)": error_of(lambda: copy.deepcopy(model)),
        "copy.deepcopy(block)": error_of(lambda: copy.deepcopy(model.blocks[0])),
        "copy.deepcopy(linear)": error_of(lambda: copy.deepcopy(model.blocks[0].up)),
        "pickle.dumps(linear)": error_of(lambda: pickle.dumps(uncut.blocks[0].up)),
        "AveragedModel(model)": error_of(lambda: swa(model)),
        "sum of a copy along a dimension": error_of(lambda: copied.sum(0)),
    }


def test_copies_of_shards_are_shards_and_of_models_are_refused(ranks, snapshot):
    assert ranks(2)(copies)[0] == snapshot


# ---- a unit on its own ------------------------------------------------------------------------


def load_twice_the_weights(model, folder):
    other = copy_of_layers()
    twice(other)
    fs.load(fs.save(folder / "twice", other), model)


def twice(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def twice_in_unsharded(model, _):
    with fs.unsharded(model):
        twice(model)


def twice_by_an_owned_optimizer(model, _):
    optimizer = fs.owned(model, partial(torch.optim.SGD, lr=1.0), list(model.parameters()))
    for param in model.parameters():
        param.grad = -param.detach()
    optimizer.step()


def copy_of_layers():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return fs.shard(layers, strategy="shard_grad_op", param_dtype="bf16", wrap=["Linear"])


@pytest.mark.parametrize(
    "write",
    [
        load_twice_the_weights,
        twice_in_unsharded,
        twice_by_an_owned_optimizer,
        lambda model, _: twice(model),
    ],
)
def test_a_unit_on_its_own_computes_with_what_was_written_after_a_forward(write, tmp_path):
    model, x = copy_of_layers(), torch.ones(2, 8, dtype=torch.bfloat16)
    model(x)
    before = model[1](x).detach().clone()
    write(model, tmp_path)
    assert torch.equal(model[1](x), 2 * before)
