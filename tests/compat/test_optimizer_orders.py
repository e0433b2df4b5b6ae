"""Optimizer states if ranks order parameters differently, or have separate models."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank as rank

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import ModuleWrapPolicy
from support.compat import TransformerBlock, assert_same_state, build, loss_of, train
from support.ranks import on_ranks

BLOCKS = ModuleWrapPolicy({TransformerBlock})


def stepped(params, model):
    optimizer = torch.optim.Adam(params, lr=0.01)
    loss_of(model, 0, rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@on_ranks(2)
def test_ranks_may_order_parameters_of_their_optimizers_differently():
    wanted = FSDP(build(), auto_wrap_policy=BLOCKS)
    states = FSDP.full_optim_state_dict(
        wanted, stepped(list(wanted.parameters()), wanted), rank0_only=False
    )
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    params = list(model.parameters())
    optimizer = stepped(params[::-1] if rank() else params, model)
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert sorted(found["state"]) == sorted(states["state"])
    for name, values in states["state"].items():
        assert_same_state(found["state"][name], values, 1e-6)
    rows = FSDP.sharded_optim_state_dict(model, optimizer)
    loaded = FSDP.flatten_sharded_optim_state_dict(rows, model, optimizer)
    for number, state in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(loaded["state"][number]["exp_avg"], state["exp_avg"])
    fewer = stepped(params[: len(params) - rank()], model)
    with pytest.raises(RuntimeError, match=r"some ranks are missing some .* on rank 1"):
        FSDP.full_optim_state_dict(model, fewer)


@on_ranks(2)
def test_named_optimizers_are_saved_and_loaded():
    """A plain module around FSDP shows the names that its optimizer uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch's own modules
        from torch.distributed.optim import _NamedOptimizer
    model = nn.Sequential(FSDP(nn.Linear(4, 4)), nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, module=model, lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(FSDP.optim_state_dict(model, optimizer))
    optimizer.step()
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)
    optimizer.load_state_dict(loaded)
    again = FSDP.optim_state_dict(model, optimizer)
    assert list(again["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {float(state["step"]) for state in again["state"].values()} == {1.0}


@on_ranks(2)
def test_state_dicts_without_groups():
    """The caller's groups stay unchanged."""
    model = FSDP(build())
    optimizer = stepped(list(model.parameters()), model)
    own = {"state": optimizer.state_dict()["state"]}
    found = FSDP.optim_state_dict(model, optimizer, optim_state_dict=own)
    assert list(found) == ["state"]
    assert list(FSDP.optim_state_dict_to_load(model, optimizer, found)) == ["state"]
    groups = [{"params": list(model.parameters())}]
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP.shard_full_optim_state_dict(whole, model, optim_input=groups)
    assert list(groups[0]) == ["params"]


@on_ranks(2)
def test_a_model_of_one_rank_beside_others():
    groups = [dist.new_group([0]), dist.new_group([1])]
    if rank() == 0:  # no other rank takes part
        model = FSDP(build(), groups[0], auto_wrap_policy=BLOCKS)
        reference = build()
        assert train(model) == train(copy.deepcopy(reference))
        optimizer = stepped(list(model.parameters()), model)
        state = FSDP.full_optim_state_dict(model, optimizer)
        loaded = FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer, group=groups[0])
        optimizer.load_state_dict(loaded)
        assert list(model.state_dict()) == list(reference.state_dict())
