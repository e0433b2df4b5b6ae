"""FSDP1 scripts with changed imports only: losses equal those of one process."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.compat.fsdp1 import (
    BackwardPrefetch,
    CheckpointImpl,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import EngineError
from support.compat import (
    MAX_NORM,
    Net,
    TransformerBlock,
    adamw,
    assert_trains_as_one,
    build,
    loss_of,
    train_alone,
)
from support.ranks import on_ranks

BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock})


def root_clip(model):
    model.clip_grad_norm_(MAX_NORM)


@pytest.mark.short(3)
@pytest.mark.parametrize("name", [strategy.name for strategy in ShardingStrategy])
@on_ranks(2)
def test_every_strategy_with_and_without_a_policy(name):
    strategy = ShardingStrategy[name]
    model = assert_trains_as_one(
        lambda net: FSDP(
            net,
            sharding_strategy=strategy,
            auto_wrap_policy=BLOCKS,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            limit_all_gathers=True,
            use_orig_params=True,
            sync_module_states=True,
            device_id=torch.device("cpu"),
        ),
        clip=root_clip,
    )
    assert len(FSDP.fsdp_modules(model)) == 4
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert model.sharding_strategy is strategy
    assert model.layers[1].sharding_strategy is strategy
    assert isinstance(model.module, Net)
    cut = not name.startswith("NO_SHARD")
    assert ("elements [" in repr(next(model.parameters()))) is True
    local = sum(param.numel() for param in model.parameters())
    whole = sum(param.numel() for param in Net().parameters())
    assert (local < whole) is cut
    assert_trains_as_one(lambda net: FSDP(net, sharding_strategy=strategy), clip=root_clip)


@on_ranks(2)
def test_every_wrap_policy_trains_as_one_process():
    policies = {
        "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=700), 7),
        "classes": (ModuleWrapPolicy({TransformerBlock, nn.Embedding}), 5),
        "lambda": (
            functools.partial(
                lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)
            ),
            4,
        ),
        "custom": (
            CustomPolicy(
                lambda m: (
                    {"sharding_strategy": ShardingStrategy.NO_SHARD}
                    if isinstance(m, TransformerBlock)
                    else isinstance(m, nn.Embedding)
                )
            ),
            5,
        ),
    }
    for name, (policy, units) in policies.items():
        model = assert_trains_as_one(lambda net, p=policy: FSDP(net, auto_wrap_policy=p))
        assert len(FSDP.fsdp_modules(model)) == units, name
    assert model.layers[0].sharding_strategy is ShardingStrategy.NO_SHARD
    assert model.embed.sharding_strategy is ShardingStrategy.FULL_SHARD


def by_hand(net):
    net.layers[0] = FSDP(net.layers[0], sharding_strategy=ShardingStrategy.NO_SHARD)
    net.layers[1] = FSDP(net.layers[1], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    net.layers[2] = FSDP(net.layers[2])
    return FSDP(net)


def children_alone(net):
    for at, layer in enumerate(net.layers):
        net.layers[at] = FSDP(layer)
    net.embed, net.head = FSDP(net.embed), FSDP(net.head)
    return net


def with_wrap(net):
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        for at, layer in enumerate(net.layers):
            net.layers[at] = wrap(layer)
        return wrap(net)


@on_ranks(2)
def test_wrapping_by_hand_bottom_up_and_without_a_root():
    model = assert_trains_as_one(by_hand, clip=root_clip)
    assert [m.sharding_strategy.name for m in model.layers] == [
        "NO_SHARD",
        "SHARD_GRAD_OP",
        "FULL_SHARD",
    ]
    assert [layer.check_is_root() for layer in model.layers] == [False] * 3
    assert assert_trains_as_one(children_alone).layers[0].check_is_root()
    model = assert_trains_as_one(with_wrap)
    assert len(FSDP.fsdp_modules(model)) == 4
    tied = assert_trains_as_one(by_hand, tied=True)
    assert tied.head.weight is tied.embed.weight


@on_ranks(2)
def test_activation_checkpointing_acts_in_place_and_offload():
    def around(net):
        for layer in net.layers:
            checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)  # dropped
        return FSDP(net, auto_wrap_policy=BLOCKS)

    def after(net):
        model = FSDP(net, auto_wrap_policy=BLOCKS)
        calls: list[int] = []
        model.layers[0].norm.register_forward_hook(lambda *_: calls.append(1))
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, TransformerBlock),
        )
        model.calls = calls
        return model

    assert_trains_as_one(around)
    assert len(assert_trains_as_one(after).calls) == 8  # four steps, each layer twice
    offload = CPUOffload(offload_params=True)
    assert_trains_as_one(lambda net: FSDP(net, cpu_offload=offload, auto_wrap_policy=BLOCKS))


@on_ranks(2)
def test_mixed_precision_casts_buffers_only_when_asked():
    bf16 = torch.bfloat16
    policy = MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32, buffer_dtype=bf16)
    model = assert_trains_as_one(
        lambda net: FSDP(net, mixed_precision=policy, auto_wrap_policy=BLOCKS), tolerance=0.05
    )
    assert model.shift.dtype is bf16
    assert model.state_dict()["shift"].dtype is torch.float32  # as in the model
    assert next(model.parameters()).dtype is torch.float32
    untouched = FSDP(build(), mixed_precision=MixedPrecision(reduce_dtype=bf16))
    loss_of(untouched, 0, dist.get_rank()).backward()
    assert untouched.shift.dtype is torch.float32
    stored = FSDP(build().to(bf16), auto_wrap_policy=BLOCKS)
    loss_of(stored, 0, dist.get_rank()).backward()
    assert {p.dtype for p in stored.parameters()} == {bf16}
    assert {p.grad.dtype for p in stored.parameters()} == {bf16}


@on_ranks(2)
def test_float16_with_the_sharded_scaler_and_a_warning_without():
    half = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16)
    model = FSDP(build(), mixed_precision=half, auto_wrap_policy=BLOCKS)
    with pytest.warns(UserWarning, match="no gradient scaler"):
        loss_of(model, 0, dist.get_rank())
    scaler = ShardedGradScaler(init_scale=256.0)
    model = FSDP(build(), mixed_precision=half, auto_wrap_policy=BLOCKS)
    reference = train_alone(build())
    optimizer = adamw(model)
    for step in range(4):
        loss = loss_of(model, step, dist.get_rank())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert abs(float(loss.detach()) - reference[step][dist.get_rank()]) < 0.02
    before = [param.to_local().clone() for param in model.parameters()]
    loss = loss_of(model, 9, dist.get_rank()) * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # skipped on all ranks
    scaler.update()
    assert all(
        torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)
    )
    assert scaler.get_scale() == 128.0


@on_ranks(2)
def test_no_sync_defers():
    model, reference = FSDP(build(), auto_wrap_policy=BLOCKS), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        with model.no_sync():
            loss_of(model, 10 * step, dist.get_rank()).backward()
            with pytest.raises(EngineError, match="no_sync"):
                next(model.parameters()).grad.full_tensor()
        loss_of(model, 10 * step + 1, dist.get_rank()).backward()
        for micro in range(2):
            for rank in range(2):
                (loss_of(reference, 10 * step + micro, rank) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    with pytest.raises(RuntimeError, match="inner FSDP instances"), model.layers[0].no_sync():
        pass


def _compile(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.long
@on_ranks(2)
def test_compiled_blocks_and_models():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo reads attributes that warn
        model = assert_trains_as_one(lambda net: _compile(FSDP(net, auto_wrap_policy=BLOCKS)))
        assert isinstance(next(model.parameters()), ShardedParameter)
        net = FSDP(build(), auto_wrap_policy=BLOCKS)
        whole = torch.compile(net, backend="aot_eager")
        loss = loss_of(whole, 0, dist.get_rank())
        loss.backward()
        wanted = loss_of(build(), 0, dist.get_rank())
        assert torch.allclose(loss, wanted, atol=1e-6)
        assert all(param.grad is not None for param in net.parameters())
