"""FSDP2 behind a configuration, and the rule of thumb for memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.compat import fsdp1
from fullshard.compat.fsdp2 import (
    FSDP2Config,
    FSDP2Wrapper,
    FSDPModule,
    apply_activation_checkpointing,
    load_fsdp2_checkpoint,
    save_fsdp2_checkpoint,
    wrap_model_fsdp2,
)
from fullshard.planner.mesh import ROWS
from support.compat import adamw, assert_trains_as_one, build, train
from support.ranks import on_ranks


@pytest.mark.short(2)
@pytest.mark.parametrize("name", ["full", "hybrid_full", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_each_strategy_trains_as_one_process(name):
    config = FSDP2Config(sharding_strategy=name, backward_prefetch="post", cpu_offload=False)
    model = assert_trains_as_one(lambda net: wrap_model_fsdp2(net, config))
    assert isinstance(model.layers[0], FSDPModule)  # class name TransformerBlock
    numel, whole = (sum(p.numel() for p in net.parameters()) for net in (model, build()))
    assert (numel < whole) is (name != "no_shard")


@on_ranks(2)
def test_each_policy_wraps_and_trains():
    sizes = FSDP2Config(auto_wrap_policy="size_based", auto_wrap_min_params=700, cpu_offload=True)
    model = assert_trains_as_one(lambda net: wrap_model_fsdp2(net, sizes))
    assert isinstance(model.layers[0].up, FSDPModule)
    single = FSDP2Config(auto_wrap_policy=None, backward_prefetch=None)
    model = assert_trains_as_one(lambda net: wrap_model_fsdp2(net, single))
    assert not isinstance(model.layers[0], FSDPModule)


@on_ranks(2)
def test_parts_by_hand_with_other_strategies():
    """Shards parts first, each with its own strategy."""

    def wrap(net):
        none = FSDP2Config(sharding_strategy="no_shard", auto_wrap_policy=None)
        wrap_model_fsdp2(net.layers[0], none)
        wrap_model_fsdp2(net.layers[1], FSDP2Config(sharding_strategy="shard_grad_op"))
        return wrap_model_fsdp2(net, FSDP2Config())

    model = assert_trains_as_one(wrap)
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds == ["FSDPTransformerBlock"] * 3
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert shapes["layers.0.up.weight"] == (48, 16)
    assert shapes["layers.1.up.weight"] != (48, 16)
    assert "elements [" in repr(model.layers[1].up.weight)


@on_ranks(2)
def test_dtypes_recompute_first_values_and_memory():
    bf16 = torch.bfloat16
    mixed = FSDP2Config(mixed_precision=True, compute_dtype=bf16, reduce_dtype=torch.float32)
    model = assert_trains_as_one(lambda net: wrap_model_fsdp2(net.float(), mixed), tolerance=0.05)
    assert next(model.parameters()).dtype is torch.float32
    stored = wrap_model_fsdp2(build(), FSDP2Config(param_dtype="bf16"))
    assert {param.dtype for param in stored.parameters()} == {bf16}
    config = FSDP2Config(activation_checkpointing=True)
    assert_trains_as_one(lambda net: wrap_model_fsdp2(net, config))
    for order in ("before", "after"):

        def wrap(net, order=order):
            if order == "before":
                return wrap_model_fsdp2(apply_activation_checkpointing(net))
            return apply_activation_checkpointing(wrap_model_fsdp2(net))

        calls: list[int] = []
        model = assert_trains_as_one(wrap)
        model.layers[0].norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        train(model, steps=1)
        assert len(calls) == 2, order
    torch.manual_seed(dist.get_rank())
    differs = FSDP2Wrapper(FSDP2Config(sync_module_states=True))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    differs.wrap_model(net)
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param, theirs in zip(net.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), theirs)
    stats = differs.get_memory_stats(net)
    assert 0 < stats["allocated_gb"] <= stats["max_allocated_gb"] < 1e-3


@on_ranks(2)
def test_checkpoints_at_exactly_that_path(tmp_path):
    model = wrap_model_fsdp2(build(), FSDP2Config())
    optimizer = adamw(model)
    train(model, steps=2, optimizer=optimizer)
    path = tmp_path / "checkpoint.pt"
    save_fsdp2_checkpoint(model, optimizer, str(path), rank=0)
    following = train(model, steps=2, optimizer=optimizer, first=2)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint.pt"]
    for name in ("shard_grad_op", "no_shard", "full"):
        again = wrap_model_fsdp2(build(), FSDP2Config(sharding_strategy=name))
        optimizer = adamw(again)
        load_fsdp2_checkpoint(again, optimizer, str(path))
        found = train(again, steps=2, optimizer=optimizer, first=2)
        assert max(abs(a - b) for a, b in zip(found, following, strict=True)) < 1e-6, name


def test_unknown_words_are_refused_at_once():
    for wrong in (
        {"sharding_strategy": "fully"},
        {"auto_wrap_policy": "blocks"},
        {"backward_prefetch": "soon"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FSDP2Config(**wrong)


def test_estimates_of_memory():
    estimate = fs.estimate_fsdp_memory
    assert fsdp1.estimate_fsdp_memory is estimate
    full = estimate(7.0, 8, True, "FULL_SHARD")
    assert set(full) == {"params_gb", "gradients_gb", "optimizer_gb", "temporary_gb", "total_gb"}
    assert full["params_gb"] == pytest.approx(3.5)  # the float32 master of 1/8
    assert full["optimizer_gb"] == pytest.approx(7.0)
    assert full["temporary_gb"] == pytest.approx((2 + 4) * 7.0 * 2 / 32)
    order = [estimate(7.0, 8, True, s) for s in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")]
    totals = [found["total_gb"] for found in order]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 7.0 * 16
    for found in order:
        assert sum(v for k, v in found.items() if k != "total_gb") == pytest.approx(
            found["total_gb"]
        )
    hybrid = estimate(7.0, 64, True, fsdp1.ShardingStrategy.HYBRID_SHARD)
    assert hybrid["params_gb"] == pytest.approx(3.5)  # over the 8 ranks of a host
    for strategy in ROWS:
        assert estimate(1.0, 4, False, strategy.value)["total_gb"] > 0
    with pytest.raises(ValueError, match="sharding_strategy"):
        estimate(7.0, 8, True, "SHARD_ALL")
