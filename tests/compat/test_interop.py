"""Works with other parts of torch: checkpoint wrappers, distributed checkpoints, helpers."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fullshard as fs
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import OptimStateKeyType, StateDictType, always_wrap_policy
from fullshard.compat.fsdp2 import fully_shard
from fullshard.errors import EngineError, UnsupportedModelError
from support.ranks import on_ranks


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 4))


def step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_torchs_checkpoint_wrappers_inside_and_around():
    for wrap in (checkpoint_wrapper, offload_wrapper):
        for inside in (True, False):
            net = layers()
            if inside:
                model = FSDP(nn.Sequential(*[FSDP(wrap(layer)) for layer in net]))
                root = model
            else:
                root = FSDP(nn.Sequential(*[FSDP(layer) for layer in net]))
                model = wrap(root)
            reference = layers()
            for _ in range(3):
                model(torch.ones(2, 4).requires_grad_()).sum().backward()
                reference(torch.ones(2, 4)).sum().backward()
            assert list(model.state_dict()) == list(reference.state_dict())
            with FSDP.summon_full_params(model, with_grads=True):
                for ours, theirs in zip(root.parameters(), reference.parameters(), strict=True):
                    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)


@on_ranks(2)
def test_whole_states_of_an_optimizer_of_fsdp2():
    """Distributed checkpoints of both are tested in test_torchs_state_dicts.py."""
    both = []
    for _ in range(2):
        model = layers()
        for part in (*model, model):
            fully_shard(part)
        both.append((model, torch.optim.Adam(model.parameters(), lr=0.1)))
    (model, optimizer), (other, twin) = both
    step(model, optimizer)
    other.load_state_dict(model.state_dict())
    full = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, optimizer, options=full)
    assert whole["state"]["0.weight"]["exp_avg"].shape == (5, 4)
    set_optimizer_state_dict(other, twin, whole, options=full)
    for one, by in both:
        step(one, by)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.to_local(), theirs.to_local())


@on_ranks(2)
def test_distributed_checkpoints_of_fsdp1(tmp_path):
    folder = str(Path(tmp_path) / "dcp")
    model = FSDP(layers(), auto_wrap_policy=always_wrap_policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(saved, checkpoint_id=folder)
        wanted = [param.full_tensor() for param in model.parameters()]
        step(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(saved, checkpoint_id=folder)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"]))
    for param, theirs in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(param.full_tensor(), theirs)


@on_ranks(2)
def test_models_that_are_wrapped_in_part():
    """Covers states of an unsharded run, and of a model with one wrapped part."""
    model = layers()
    model[0] = FSDP(model[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    local = layers()
    alone = torch.optim.Adam(local.parameters(), lr=0.1)
    for one, by in ((model, optimizer), (local, alone)):
        step(one, by)
    named = FSDP.rekey_optim_state_dict(
        alone.state_dict(), OptimStateKeyType.PARAM_NAME, local, optim=alone
    )
    ours = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    for name, values in named["state"].items():
        assert torch.allclose(ours["state"][name]["exp_avg"], values["exp_avg"], rtol=1e-5)
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(named, model, optim=optimizer))
    step(model, optimizer), step(local, alone)
    assert torch.allclose(model[0].weight.full_tensor(), local[0].weight, rtol=1e-5)
    state = model.state_dict()
    assert list(state) == list(local.state_dict())
    state["0.more"] = state.pop("0.bias")
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["0.more"])


def test_one_process_without_a_process_group():
    model = FSDP(layers(), auto_wrap_policy=always_wrap_policy)
    reference = layers()
    for one in (model, reference):
        step(one, torch.optim.SGD(one.parameters(), lr=0.1))
    for ours, theirs in zip(
        model.state_dict().values(), reference.state_dict().values(), strict=True
    ):
        assert torch.allclose(ours, theirs)
    assert not dist.is_initialized()
    sharded = fully_shard(layers())
    assert sharded.state_dict()["0.weight"].shape == (5, 4)
    with pytest.raises(NotImplementedError, match="set_all_reduce_hook"):
        sharded.set_all_reduce_hook(None)


@on_ranks(2)
def test_a_unit_inside_one_of_the_other_interface_and_a_second_sharding():
    reference, x = layers(), torch.ones(2, 4)
    reference(x).sum().backward()

    def model_of(inner, outer):
        model = layers()
        model[1] = inner(model[1])
        return outer(model)

    ran = fully_shard(layers())
    ran(x)
    sharded = fs.shard(layers())
    for model in (
        model_of(FSDP, fully_shard),
        model_of(fully_shard, FSDP),
        FSDP(ran),
        FSDP(sharded),
    ):
        model(x).sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    sharded = fs.shard(layers())
    for wrap, module in ((fully_shard, sharded), (fully_shard, sharded[1]), (FSDP, sharded[1])):
        with pytest.raises(EngineError, match=r"fs\.shard has sharded it, alone or in a larger"):
            wrap(module)
    assert type(sharded) is nn.Sequential
    torch.testing.assert_close(sharded(x), reference(x))


def aliased(kind):
    """Layers and a tensor that shares memory with the second layer's weight."""
    net = layers()
    weight = net[1].weight
    if kind == "parameter":
        net[2].weight = nn.Parameter(weight.data.view(-1)[4:].view(4, 4))
    elif kind == "part":
        net[2].bias = nn.Parameter(weight.data.view(-1)[4:8])
    else:
        net[2].register_buffer("now", weight.detach())
    return net


@on_ranks(2)
def test_parameters_and_buffers_on_the_memory_of_another_are_refused():
    for kind in ("parameter", "part", "buffer"):
        ours, theirs = aliased(kind), FSDP(aliased(kind), auto_wrap_policy=always_wrap_policy)
        apart = aliased("parameter")
        apart = FSDP(apart, ignored_states=[apart[2].weight])
        for layer in ours:
            fully_shard(layer)
        for model in (fully_shard(ours), theirs, apart):
            with pytest.raises(
                UnsupportedModelError, match=r"^2\.\w+: expected a .* own memory.*1\.weight"
            ):
                model(torch.ones(2, 4))
    with pytest.raises(UnsupportedModelError, match=r"^2\.weight: expected a .* own memory"):
        fs.shard(aliased("parameter"), ignore=["2.weight"])
    net = layers()
    before = net.state_dict()  # shares the parameters' memory outside the model
    step(fully_shard(net), torch.optim.SGD(net.parameters(), lr=0.1))
    assert torch.equal(before["1.weight"], layers()[1].weight)
