"""Experts on their own mesh: DTensors over ranks with different batches.

transformers, or layers in torchtitan's style, shard the experts and exchange the tokens. One
process in float64 is the reference.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard as fs
from fullshard.config.schema import ShardConfig
from fullshard.engine.axes import cut_over_axes
from fullshard.engine.engine import ATTRIBUTE
from fullshard.errors import ConfigError, EngineError, UnsupportedModelError, WrapError
from fullshard.planner.mesh import Topology
from support.experts import cut_as_transformers, mixtral, mixture_net, of, qwen, spread
from support.other_axes import assert_numbers, check_steps, train_llama, train_net, vectors
from support.ranks import on_ranks

# ---- transformers


def check_transformers(build, kind, sizes, settings=None, work=train_llama):
    """Args: groups of experts and of the tensor axis; settings, or None for transformers' mesh."""

    def cut(model):
        dense = cut_as_transformers(model, *sizes)
        return settings or {"mesh": dense["fsdp"]}

    check_steps(build, cut, work, (kind,), sizes[1])


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("num_ranks", "build", "kind", "sizes"),
    [
        pytest.param(2, qwen, "sgd", (2, 1), marks=pytest.mark.long),
        pytest.param(2, mixtral, "adamw", (2, 1), marks=pytest.mark.long),
        (4, qwen, "adamw", (2, 1)),  # experts on their own mesh
        pytest.param(4, mixtral, "sgd", (2, 1), marks=pytest.mark.long),
        (4, qwen, "sgd", (2, 2)),  # with a tensor axis
        (4, mixtral, "adamw", (4, 2)),
        (4, qwen, "adafactor", (2, 2)),  # full matrices over all axes
        pytest.param(4, mixtral, "adafactor", (2, 1), marks=pytest.mark.long),
        pytest.param(4, qwen, "adamw", (4, 1), marks=pytest.mark.long),
    ],
)
def test_experts_of_transformers_train_as_one_process(ranks, num_ranks, build, kind, sizes):
    ranks(num_ranks)(check_transformers, build, kind, sizes, timeout=300)


def frozen_qwen():
    """One layer's experts and another layer's attention are frozen."""
    model = qwen()
    for name, param in model.named_parameters():
        is_frozen = "layers.0.mlp.experts" in name or "layers.1.self_attn" in name
        param.requires_grad_(not is_frozen)
    return model


def accumulate(model, step, seat):
    """The first of two micro-batches waits unreduced, or for the sum over replicas."""
    is_alone = not hasattr(model, ATTRIBUTE)
    with nullcontext() if is_alone else fs.no_sync(model, outer_only=step == 1):
        train_llama(model, step + 50, seat)
    return train_llama(model, step, seat)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sgd", {"transport": "c10d", "activation_checkpointing": "block"}),
        ("adamw", {"offload": "cpu", "replicate": 2}),
        ("sgd", {"strategy": "no_shard"}),
        ("adamw", {"strategy": "shard_grad_op", "wrap": "none", "transport": "direct"}),
    ],
    ids=str,
)
def test_frozen_experts_and_accumulation_train_as_one_process(ranks, kind, settings):
    ranks(4)(check_transformers, frozen_qwen, kind, (2, 1), settings, accumulate, timeout=300)


# ---- experts of transformers, sharded by fullshard


def starved_qwen():
    """All tokens use the experts of the first rank of a group."""
    model = qwen()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: (*out[:2], out[2] * 0))
    return model


def check_own_cut(build, kind, settings):
    def cut(model):
        topology = Topology(dist.get_world_size())
        return {"mesh": cut_over_axes(model, ShardConfig(expert=2), topology), **settings}

    check_steps(build, cut, train_llama, (kind,))


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("build", "kind", "settings"),
    [
        (starved_qwen, "adamw", {}),
        (frozen_qwen, "sgd", {"transport": "direct", "activation_checkpointing": "selective"}),
        pytest.param(mixtral, "adafactor", {"param_dtype": "float64"}, marks=pytest.mark.long),
    ],
)
def test_experts_cut_by_fullshard_train_as_in_one_process(ranks, build, kind, settings):
    ranks(4)(check_own_cut, build, kind, settings, timeout=300)


@on_ranks(2, timeout=100)
def test_grouped_products_without_masks_equal_one_process():
    build = partial(of, "qwen3_moe", moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2)
    alone, model = build().float(), build().float()
    for one in (alone, model):
        one.set_experts_implementation("grouped_mm")  # it does not support float64
    fs.shard(model, expert=2)
    for seat in range(2):
        train_llama(alone, 0, seat)
    train_llama(model, 0, dist.get_rank())
    for (name, one), ours in zip(alone.named_parameters(), model.parameters(), strict=True):
        found = ours.grad.full_tensor()
        torch.testing.assert_close(found, one.grad / 2, rtol=1e-4, atol=1e-6, msg=name)


# ---- experts in plain torch


def mesh_of_experts(*sizes):
    names = ("replicate", "shard", "expert")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def check_net(kind, sizes, skips=False):
    def cut(model):
        mesh = mesh_of_experts(*sizes)
        spread(model, mesh["expert"])
        for block in model.blocks:
            block[1].skips = skips
        return {"mesh": mesh}

    check_steps(mixture_net, cut, train_net, (kind,))


@pytest.mark.short(1)
@pytest.mark.parametrize(("kind", "skips"), [("sgd", False), ("adamw", True)])
def test_a_rank_whose_experts_get_no_token_trains_with_the_others(ranks, kind, skips):
    """The second of two ranks gets no token for its experts in one layer."""
    ranks(4)(check_net, kind, (2, 2), skips, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sizes"), [("adamw", (2, 1, 2)), ("sgd", (4, 1)), ("sgd", (1, 4))]
)
def test_an_axis_of_experts_of_any_size_trains_as_one_process(ranks, kind, sizes):
    ranks(4)(check_net, kind, sizes, timeout=300)


# ---- refusals ------------------------------------------------------------------------------------


class Beside(nn.Module):
    """Experts and a dense parameter in one module."""

    def __init__(self, mesh):
        super().__init__()
        cut = distribute_tensor(torch.ones(4, 3), mesh["expert"], [Shard(0)], src_data_rank=None)
        self.experts, self.scale = nn.Parameter(cut), nn.Parameter(torch.ones(3))


def with_placement(mesh, placement):
    model = nn.Linear(4, 4)
    cut = DTensor.from_local(torch.ones(4, 4), mesh, [placement], run_check=False)
    model.weight = nn.Parameter(cut)
    return model


@on_ranks(4, timeout=100)
def test_axes_that_experts_do_not_support_are_refused_by_name():
    mesh, model = mesh_of_experts(2, 2), mixture_net()
    spread(model, mesh["expert"])
    with pytest.raises(ConfigError, match="sample: expected a mesh of only the axes replicate and"):
        fs.shard(model, sample=vectors(0, 0))
    with pytest.raises(ConfigError, match="as this one, but their gradients would not be summed"):
        fs.shard(model, mesh=mesh["shard"])
    with pytest.raises(WrapError, match=r"unit .root.: expected experts in a module without other"):
        fs.shard(Beside(mesh))
    with pytest.raises(UnsupportedModelError, match=r"got expert Replicate\(\), over ranks"):
        fs.shard(with_placement(mesh["expert"], Replicate()))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tensor"))
    with pytest.raises(UnsupportedModelError, match="their own batches, is named expert or ep"):
        fs.shard(with_placement(other["tensor"], Shard(0)))
    crossed = nn.ModuleList([with_placement(other[name], Shard(0)) for name in ("ep", "tensor")])
    with pytest.raises(ConfigError, match=r"expert axis: .* whole groups of other axes .2 ranks"):
        fs.shard(crossed, mesh=other["ep"])
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    with pytest.raises(ConfigError, match=r"in the order .replicate, shard, expert.*got .expert"):
        fs.shard(nn.Linear(4, 4), mesh=swapped)
    fs.shard(model, mesh=mesh)  # the model is unchanged


# ---- norms and full tensors ----------------------------------------------------------------------


@on_ranks(4, timeout=100)
def test_numbers_of_experts_count_every_element_once():
    """Norms count each gradient element once; full states are saved and loaded."""
    alone, model, mesh = mixture_net(), mixture_net(), mesh_of_experts(2, 2)
    spread(model, mesh["expert"])
    fs.shard(model, mesh=mesh)
    assert fs.num_parameters(model) == sum(param.numel() for param in alone.parameters())
    at, rank = fs.sharding(model.blocks[0][1].experts.up), dist.get_rank()
    assert at.shape[0] == 5
    assert at.local_shape[0] == (3, 2)[rank % 2]
    assert at.placements == {"expert": "Shard(dim=0)"}
    assert at.unit == "blocks.0.1.experts"
    for seat in range(4):
        train_net(alone, 0, seat)
    train_net(model, 0, rank)
    assert_numbers(model, alone, 4)
    weights = {name: param.detach() for name, param in alone.named_parameters()}
    torch.testing.assert_close(fs.full_state_dict(model, rank0_only=False), weights)
    others = {name: torch.randn_like(value) for name, value in weights.items()}
    model.load_state_dict(others)
    with torch.no_grad(), fs.unsharded(model):
        for name, param in model.named_parameters():
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            assert torch.equal(whole, others[name])


@on_ranks(4, timeout=100)
def test_an_infinity_in_one_expert_skips_the_step_of_all_ranks():
    model, mesh = mixture_net(), mesh_of_experts(2, 2)
    spread(model, mesh["expert"])
    fs.shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(vectors(0, dist.get_rank())).pow(2).mean()).backward()
    if dist.get_rank() == 3:
        for param in model.blocks[2][1].experts.parameters():  # this rank has a part of it
            param.grad.to_local().fill_(float("inf"))
    before = {n: p.full_tensor() for n, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name]), name


@on_ranks(4, timeout=100)
def test_one_rank_may_write_gradients_of_its_experts_before_all_clip():
    """No other replica of the dense layers has these experts."""
    model = mixture_net()
    spread(model, init_device_mesh("cpu", (4,), mesh_dim_names=("expert",)))
    fs.shard(model, strategy="hybrid_shard", replicate=2, shard=2)
    train_net(model, 0, dist.get_rank())
    if dist.get_rank() == 1:
        for param in model.blocks[0][1].experts.parameters():
            param.grad.mul_(3.0)
    found = fs.clip_grad_norm_(model, 1e9)
    want = fs.global_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, want)
    if dist.get_rank() < 2:
        model.head.weight.grad.mul_(3.0)
    with pytest.raises(EngineError, match="same gradients on all replicas"):
        fs.clip_grad_norm_(model, 1e9)


@on_ranks(4, timeout=100)
def test_one_rank_without_a_gradient_is_an_error_where_only_experts_are_cut():
    model = mixture_net()
    spread(model, mesh_of_experts(2, 2)["expert"])
    fs.shard(model, strategy="no_shard")
    optimizer = fs.owned(model, torch.optim.Adafactor)
    train_net(model, 0, dist.get_rank())
    if dist.get_rank() == 1:
        model.blocks[0][1].experts.up.grad = None
    with pytest.raises(EngineError, match="gradients of the same parameters on every rank"):
        optimizer.step()
