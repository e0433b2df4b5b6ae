"""Further dtypes: modules in float32, bf16 masters, buffers, outputs, fp16 with a loss scaler."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from fullshard.planner.schedule import EventKind
from support.grid import chequered
from support.models import CASES, CHAIN, Chain, float32_batch, float32_model, perturbed, vectors
from support.parity import (
    assert_planned_events,
    unlike_gradients,
    whole_gradients,
    whole_params,
)
from support.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
LR = 0.1


# ---- modules in float32 --------------------------------------------------------------------------


def is_norm(module):
    return type(module).__name__ in ("LayerNorm", "LlamaRMSNorm", "Qwen3MoeRMSNorm")


def mixed(whole):
    """Returns a bf16 copy whose norms run in float32 through hooks."""
    model = copy.deepcopy(whole)
    for param in model.parameters():
        param.data = param.to(BF16)
    for own, module in zip(whole.modules(), model.modules(), strict=True):
        if is_norm(module):
            module.to(FP32).load_state_dict(own.state_dict())
            module.register_forward_pre_hook(lambda _, args: (args[0].to(FP32),))
            module.register_forward_hook(lambda _, __, output: output.to(BF16))
    return model


def emulated_gradients(name, world_size):
    case, whole, total = CASES[name], float32_model(name), {}
    for rank in range(world_size):
        model = mixed(whole)
        case.loss(model(**float32_batch(name, 0, rank, BF16))).backward()
        for key, param in model.named_parameters():
            total[key] = total.get(key, 0.0) + param.grad.float()
    return {key: value / world_size for key, value in total.items()}


@pytest.mark.short(2)
@pytest.mark.parametrize("transport", ["direct", "c10d"])
@pytest.mark.parametrize("name", ["chain", "tied llama"])
@on_ranks(2)
def test_modules_in_float32_have_the_bits_of_an_emulation(name, transport):
    wanted = emulated_gradients(name, dist.get_world_size())
    settings = {"fp32_modules": "*norm*", "transport": transport, "poison": True}
    model = fs.shard(float32_model(name), param_dtype="bf16", **settings)
    engine = engine_of(model)
    calls, fetch = [], engine.transport.fetch
    engine.transport.fetch = lambda fulls, unit="": calls.append(len(fulls)) or fetch(fulls, unit)
    CASES[name].loss(model(**float32_batch(name, 0, dist.get_rank()))).backward()
    own = list(calls)  # whole_gradients uses a separate exchange
    found = whole_gradients(model)
    wrong = [key for key in wanted if not torch.equal(found[key], wanted[key])]
    assert not wrong, wrong
    assert_planned_events(model, 0)
    gathers = [e.unit for e in engine.recorder.events(0) if e.kind is EventKind.GATHER]
    assert len(own) == len(gathers)  # one collective for both dtypes
    assert 2 in own


def test_a_missing_module_is_refused():
    with pytest.raises(ConfigError, match=r"fp32_modules: .*'blocks.0.nrom'.*Did you mean"):
        fs.shard(Chain(3), param_dtype="bf16", fp32_modules=["blocks.0.nrom"])
    tied = Chain(3)
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    with pytest.raises(ConfigError, match=r"fp32_modules: .* tied .*Name blocks.0.up too"):
        fs.shard(tied, param_dtype="bf16", fp32_modules=["blocks.1"])


def test_one_module_of_two_names_may_be_in_float32():
    model = Chain(3)
    model.last = model.blocks[2].norm
    fs.shard(model, param_dtype="bf16", fp32_modules=["blocks.2.norm"])
    assert model.last.weight.dtype is torch.float32


def test_a_teacher_may_have_its_weights_in_float16():
    model = fs.shard(Chain(3).requires_grad_(False), master_dtype="float16")
    assert {param.dtype for param in model.parameters()} == {torch.float16}


# ---- bf16 masters --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_bf16_masters_accumulate_in_float32(strategy):
    """Two backwards, then a step: sums in float32, cast once."""
    case, rank, size = CHAIN, dist.get_rank(), dist.get_world_size()
    whole = float32_model("chain").to(BF16)
    sums = {key: torch.zeros_like(p, dtype=FP32) for key, p in whole.named_parameters()}
    for step in range(2):
        total = {key: torch.zeros_like(value) for key, value in sums.items()}
        for other in range(size):
            case.loss(whole(**float32_batch("chain", step, other, BF16))).backward()
            for key, param in whole.named_parameters():
                total[key] += param.grad.float()
                param.grad = None
        for key in sums:
            sums[key] += total[key] / size
    model = fs.shard(float32_model("chain"), master_dtype="bf16", strategy=strategy, poison=True)
    for step in range(2):
        case.loss(model(**float32_batch("chain", step, rank, BF16))).backward()
    assert all(p.dtype is BF16 and p.grad.dtype is BF16 for p in model.parameters())
    found = whole_gradients(model)
    for key, value in sums.items():
        assert torch.equal(found[key], value.to(BF16)), key
    for param in model.parameters():
        param.grad.mul_(0.5)  # changes through the shown gradient count
    case.loss(model(**float32_batch("chain", 0, rank, BF16))).backward()
    norm = fs.clip_grad_norm_(model, 1e-3)
    assert norm > 1e-3
    clipped = fs.global_norm([p.grad for p in model.parameters()])
    assert abs(float(clipped) - 1e-3) < 1e-5
    torch.optim.AdamW(model.parameters(), lr=LR).step()
    assert all(value.dtype is BF16 for value in whole_params(model).values())
    stats = fs.memory_stats(model)["gradient_shards"]["now"]
    rows = {row.name: row.num_bytes for row in engine_of(model).plan.memory}
    assert stats == rows["gradient shards"]


# ---- buffers and outputs -------------------------------------------------------------------------


def test_floating_point_buffers_alone_are_cast():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("mean", model[1].running_mean)
    model[0].register_buffer("part", model[1].running_mean[2:])
    fs.shard(model, buffer_dtype="fp64", wrap="none")
    model[1].running_mean.fill_(3.0)
    assert (model[0].mean.sum(), model[0].part.sum()) == (12.0, 6.0)  # still share memory
    assert model[1].running_mean.dtype is torch.float64
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert {param.dtype for param in model.parameters()} == {FP32}


def test_outputs_are_cast_and_give_gradients():
    model = fs.shard(perturbed(Chain(3)), param_dtype="bf16", output_dtype="fp32")
    scores, states = model(torch.randn(5, 12), states=True)
    assert scores.dtype is FP32
    assert {state.dtype for state in states} == {FP32}
    scores.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- writes into p.grad of a bf16 master ---------------------------------------------------------


@on_ranks(2)
def test_writes_into_gradients_of_bf16_masters_count():
    """Covers zeroing in place, a scaler's division, and parameters without gradients."""
    model = fs.shard(perturbed(Chain(3)), master_dtype="bf16", param_dtype="fp16")
    x = float32_batch("chain", 0, dist.get_rank())["x"]
    model(x).square().mean().backward()
    first = whole_gradients(model)
    for param in model.parameters():
        param.grad.data.zero_()
    model(x).square().mean().backward()
    again = whole_gradients(model)
    assert all(torch.equal(again[key], first[key]) for key in first)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    fs.clip_grad_norm_(model, 1e-2)
    norm = float(fs.global_norm([p.grad for p in model.parameters()]))
    assert norm == pytest.approx(1e-2, rel=1e-2)


def test_norms_in_float32_beside_a_bf16_master_also_for_hooks_of_the_user():
    model, seen = perturbed(Chain(3)), set()
    norm = model.blocks[0].norm
    norm.register_forward_pre_hook(lambda _, args: seen.add(("input", args[0].dtype)))
    norm.register_forward_hook(lambda _m, _a, output: seen.add(("output", output.dtype)))
    fs.shard(model, master_dtype="bf16", fp32_modules="*norm*")
    model(torch.randn(4, 12, dtype=BF16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert seen == {("input", torch.float32), ("output", torch.float32)}


# ---- casts that several graphs share


def accumulate(model, rank, share, *, used):
    """One torch.autocast around all micro-batches; one graph waits for its backward."""
    batches = [vectors(step, rank)["x"].float() for step in range(3)]
    with torch.autocast("cpu", dtype=BF16):
        first = share * model(batches[0]).float().square().mean()
        for x in batches[1:]:
            (share * model(x).float().square().mean()).backward()
        if used:
            first.backward()


@pytest.mark.parametrize(
    ("transport", "used"), chequered(["direct", "c10d", "shared"], [True, False])
)
@on_ranks(2)
def test_micro_batches_share_casts_with_a_kept_graph(transport, used):
    alone = perturbed(Chain(4))
    model = fs.shard(copy.deepcopy(alone), transport=transport, poison=True)
    for _ in range(2):
        accumulate(model, dist.get_rank(), 1.0, used=used)
        for rank in range(2):
            accumulate(alone, rank, 0.5, used=used)
    assert unlike_gradients(model, alone, rtol=1e-4, atol=1e-6) == []
