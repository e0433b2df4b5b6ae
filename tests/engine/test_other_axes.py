"""Sharding with tensor parallelism: parameters are DTensors along another axis of the mesh.

torch and transformers make the DTensors; one process in float64 is the reference.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard as fs
from fullshard.engine.engine import ATTRIBUTE
from fullshard.errors import ConfigError, EngineError, UnsupportedModelError
from support.models import hugging_face
from support.other_axes import (
    LLAMA,
    assert_numbers,
    check_steps,
    cut_net,
    mesh_of,
    net,
    train_llama,
    train_net,
    vectors,
)
from support.ranks import on_ranks
from support.reference import MAX_NORM, make_optimizer

# ---- models, plain and as torch parallelizes them


def freeze_parts(model):
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith("blocks.1.") and not name.endswith("up.bias"))
    return model


def frozen_net():
    return freeze_parts(net())


def cut_frozen_net(model, mesh):
    cut_net(model, mesh)
    freeze_parts(model)  # SequenceParallel makes trained parameters


def accumulate_net(model, step, seat):
    """The first of two micro-batches waits unreduced."""
    with fs.no_sync(model) if hasattr(model, ATTRIBUTE) else nullcontext():
        train_net(model, step + 50, seat)
    return train_net(model, step, seat)


def llama(**more):
    return hugging_face("llama", **LLAMA, **more)


def cut_llama(model, mesh):
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight


# ---- parity --------------------------------------------------------------------------------------


BOTH = ("sgd", "adamw")


def check_parity(build, cut, work, axes=(1, 2, 2), settings=None, kinds=BOTH):
    def cut_over(model):
        mesh = mesh_of(*axes)
        cut(model, mesh["tensor"])
        return {"mesh": mesh["replicate", "shard"], **(settings or {})}

    check_steps(build, cut_over, work, kinds, axes[2])


@pytest.mark.short(1)
@pytest.mark.parametrize("transport", ["shared", "direct", "c10d"])
def test_tensor_and_sequence_parallel_layers_train_as_one_process(ranks, transport):
    kinds = ("adamw",) if transport == "shared" else ("sgd",)
    arguments = net, cut_net, train_net, (1, 2, 2), {"transport": transport}, kinds
    ranks(4)(check_parity, *arguments, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "kinds"),
    [
        ((1, 4, 1), ("sgd",)),
        ((2, 1, 2), ("sgd",)),
        ((1, 1, 4), ("adamw", "adafactor")),
        ((1, 2, 2), ("adafactor",)),
    ],
)
def test_any_axes_may_have_one_rank(ranks, axes, kinds):
    ranks(4)(check_parity, net, cut_net, train_net, axes, None, kinds, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize(("tied", "kinds"), [(False, ("adamw",)), (True, ("sgd",))])
def test_llama_under_a_plan_of_torchs_trains_as_one_process(ranks, tied, kinds):
    build = partial(llama, tie_word_embeddings=tied)
    arguments = build, cut_llama, train_llama, (1, 2, 2), None, kinds
    ranks(4)(check_parity, *arguments, timeout=300)


def cut_as_transformers(model, mesh):
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


def qwen():
    """Norms of queries and keys are replicated on every rank; a hook sums their gradients."""
    return hugging_face("qwen3", **LLAMA, head_dim=8)


def test_a_plan_of_transformers_trains_as_one_process(ranks):
    arguments = qwen, cut_as_transformers, train_llama, (1, 2, 2), None, ("adamw",)
    ranks(4)(check_parity, *arguments, timeout=300)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [({"offload": "cpu"}, ("adamw",)), ({"activation_checkpointing": "block"}, ("sgd",))],
)
def test_frozen_parts_train_as_one_process_with_accumulation(ranks, settings, kinds):
    arguments = frozen_net, cut_frozen_net, accumulate_net, (1, 2, 2), settings, kinds
    ranks(4)(check_parity, *arguments, timeout=300)


# ---- properties of a parameter, full tensors, refusals


def sharded_net(**settings):
    mesh, model = mesh_of(), net()
    cut_net(model, mesh["tensor"])
    return fs.shard(model, mesh=mesh["shard"], **settings)


@on_ranks(4, timeout=300)
def test_full_tensors_equal_those_of_the_unsharded_model():
    alone, model = net(), sharded_net()
    weights = {name: param.detach() for name, param in alone.named_parameters()}
    assert fs.num_parameters(model) == sum(param.numel() for param in weights.values())
    weight = model.blocks[0].down.weight
    at, tensor = fs.sharding(weight), dist.get_rank() % 2
    assert at.shape == (12, 27)
    assert at.local_shape == (12, 14 - tensor)
    assert at.placements == {"tensor": "Shard(dim=1)"}
    assert "global shape (12, 27), cut to (12, 1" in repr(weight)
    assert "ShardedParameter(" in repr(weight)
    local = weights["blocks.0.down.weight"].tensor_split([14], dim=1)[tensor].reshape(-1)
    assert torch.equal(weight.to_local().reshape(-1), local[at.start : at.stop])
    torch.testing.assert_close(fs.full_state_dict(model, rank0_only=False), weights)
    others = {name: torch.randn_like(value) for name, value in weights.items()}
    model.load_state_dict(others)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), others[name])


@on_ranks(4, timeout=300)
def test_numbers_of_gradients_count_every_element_once():
    alone, model = net(), sharded_net()
    for seat in (0, 1):
        train_net(alone, 0, seat)
    train_net(model, 0, dist.get_rank() // 2)
    assert_numbers(model, alone, 2)
    largest = max(p.grad.abs().max() for p in alone.parameters())
    found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], float("inf"))
    torch.testing.assert_close(found, largest, rtol=1e-12, atol=0)


@on_ranks(4, timeout=300)
def test_unsupported_settings_are_refused_by_name():
    mesh, model = mesh_of(), net()
    cut_net(model, mesh["tensor"])
    with pytest.raises(UnsupportedModelError, match=r"norm.weight: expected a DTensor of axes bes"):
        fs.shard(model)
    with pytest.raises(ConfigError, match="sample: expected a mesh of only the axes replicate and"):
        fs.shard(model, mesh=mesh["shard"], sample=vectors(0, 0))
    with pytest.raises(
        ConfigError, match="store the same parameters as this one, but their gradients"
    ):
        fs.shard(net(), mesh=mesh["shard"])
    partial_sum = net()
    weight = DTensor.from_local(partial_sum.head.weight.detach(), mesh["tensor"], [Partial()])
    partial_sum.head.weight = nn.Parameter(weight)
    with pytest.raises(UnsupportedModelError, match="Redistribute partial sums"):
        fs.shard(partial_sum, mesh=mesh["shard"])
    fs.shard(model, mesh=mesh["shard"])  # the model is unchanged


# ---- full states, saved and loaded


def trained_alone():
    alone = net()
    optimizer = make_optimizer("adamw", alone.parameters())
    for step in range(2):
        optimizer.zero_grad()
        train_net(alone, step, 0)
        optimizer.step()
    optimizer.zero_grad()
    return alone, optimizer


def cut_and_sharded(model):
    mesh = mesh_of()
    cut_net(model, mesh["tensor"])
    fs.shard(model, mesh=mesh["replicate", "shard"], poison=True)
    return model, make_optimizer("adamw", model.parameters())


def assert_near(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_near(found[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.short(1)
@pytest.mark.parametrize("from_rank0", [False, True])
@on_ranks(4, timeout=100)
def test_full_states_of_one_process_are_loaded_and_saved(from_rank0):
    """Loads one process's states, steps both with one batch on all ranks, and compares."""
    alone, reference = trained_alone()
    state, states = copy.deepcopy((alone.state_dict(), reference.state_dict()))
    with torch.no_grad():
        model = net()
        for param in model.parameters():
            param.fill_(float("nan"))
    model, optimizer = cut_and_sharded(model)
    if from_rank0 and dist.get_rank():
        state, states = {}, None
    fs.load_full_state(model, state, optimizer, states, from_rank0=from_rank0)
    for one, its in ((alone, reference), (model, optimizer)):
        train_net(one, 7, 0)
        its.step()
        its.zero_grad()
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())
    found = fs.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert_near(found["state"], reference.state_dict()["state"])


@on_ranks(4, timeout=100)
def test_an_optimizer_loads_the_states_of_one_process():
    """`optimizer.load_state_dict` shards full states along both axes."""
    alone, reference = trained_alone()
    model, optimizer = cut_and_sharded(copy.deepcopy(alone))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, its in ((alone, reference), (model, optimizer)):
        train_net(one, 7, 0)
        its.step()
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())


@on_ranks(4, timeout=100)
def test_unsharded_shows_the_dtensors_of_the_other_axes():
    alone, _ = trained_alone()
    model, optimizer = cut_and_sharded(copy.deepcopy(alone))
    objects = [id(param) for param in model.parameters()]
    batch = vectors(9, 0)
    with torch.no_grad(), fs.unsharded(model, writeback=False):
        torch.testing.assert_close(model(batch), alone(batch), rtol=0, atol=1e-12)
        weight = model.blocks[0].down.weight
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.full_tensor(), alone.blocks[0].down.weight)
        weight.zero_()
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())
    with torch.no_grad(), fs.unsharded(model):
        for one in (model, alone):
            for param in one.parameters():
                param.mul_(0.75)
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())
    other = net()
    with fs.unsharded(model):
        model.load_state_dict(other.state_dict())
        with pytest.raises(EngineError, match="inside fs"):
            optimizer.step()
    with pytest.raises(EngineError, match="no new gradient"), fs.unsharded(model):
        model.blocks[0].down.weight.grad = model.blocks[0].down.weight.detach().clone()
    assert [id(param) for param in model.parameters()] == objects
    its = make_optimizer("adamw", other.parameters())
    for one, updates in ((other, its), (model, optimizer)):
        train_net(one, 7, 0)
        updates.step()
    assert_near(fs.full_state_dict(model, rank0_only=False), other.state_dict())


@on_ranks(4, timeout=100)
def test_a_weight_that_its_own_forward_freezes_stays_frozen():
    def freeze(layer, _):
        layer.weight.requires_grad_(False)

    alone, reference = trained_alone()
    model, optimizer = cut_and_sharded(copy.deepcopy(alone))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, its in ((alone, reference), (model, optimizer)):
        down = one.blocks[0].down
        down.register_forward_pre_hook(freeze)
        for step in (7, 8):
            train_net(one, step, 0)
            its.step()
        assert not down.weight.requires_grad
        assert down.weight.grad is None
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())


@on_ranks(4, timeout=100)
def test_an_infinity_on_one_rank_skips_the_step_on_all():
    """The next step is taken."""
    alone, reference = trained_alone()
    model, optimizer = cut_and_sharded(copy.deepcopy(alone))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    scales = []
    for one, its in ((alone, reference), (model, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in (7, 8):
            scaler.scale(one(vectors(step, 0)).pow(2).mean()).backward()
            grad = one.blocks[1].down.weight.grad
            if step == 7:
                local = grad.to_local() if one is model else grad
                if one is alone or dist.get_rank() == 3:
                    local.view(-1)[0] = float("inf")
            scaler.unscale_(its)
            torch.nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM)
            scaler.step(its)
            scaler.update()
            its.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0]
    assert_near(fs.full_state_dict(model, rank0_only=False), alone.state_dict())
