"""Users' own reductions with `register_comm_hook`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import ModuleWrapPolicy, ShardingStrategy
from support.compat import TransformerBlock, assert_trains_as_one, build, loss_of
from support.ranks import on_ranks

BLOCKS = ModuleWrapPolicy({TransformerBlock})


def mean_of_part(calls, full, part):
    """A reduce-scatter implemented with an all-reduce."""
    calls.append(full.numel())
    dist.all_reduce(full)
    part.copy_(full.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())


@on_ranks(2)
def test_a_hook_reduces_in_place_of_the_engine():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        calls: list[int] = []

        def wrap(net, strategy=strategy, calls=calls):
            model = FSDP(net, auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
            model.register_comm_hook(calls, mean_of_part)
            return model

        assert_trains_as_one(wrap)
        assert len(calls) == 4 * 4  # steps times units

    def replicas(net):
        model = FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD)
        state = default_hooks.DefaultState(dist.group.WORLD)
        model.register_comm_hook(state, default_hooks.allreduce_hook)
        return model

    assert_trains_as_one(replicas)


@on_ranks(2)
def test_a_hook_gets_the_gradient_in_the_reduce_dtype():
    """A hook may also replace `.data` and be registered after the first step."""
    seen: list[Any] = []

    def halves(state, full, part):
        state.append((full.dtype, part.dtype, full.numel() // part.numel()))
        full.data = full.data.to(torch.float64)
        mean_of_part([], full, part)

    model = FSDP(build(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    plain = FSDP(build(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    loss_of(model, 0, dist.get_rank()).backward()
    model.zero_grad()
    model.register_comm_hook(seen, halves)
    for each in (model, plain):
        loss_of(each, 0, dist.get_rank()).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16, 2)]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close = torch.isclose(ours.grad, theirs.grad, rtol=0.02, atol=1e-3)
        assert close.all()


@on_ranks(2)
def test_unsupported_hooks_are_refused():
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    model.register_comm_hook(None, print)
    assert all(module._comm_hook is print for module in FSDP.fsdp_modules(model))
    hybrid = FSDP(build(), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    for kind, text, module, hook in [
        (AssertionError, "already registered", model, print),
        (AssertionError, "on a root instance", model.layers[0], print),
        (AssertionError, "not supported for hybrid", hybrid, print),
        (ValueError, "must be callable", FSDP(build()), 3),
    ]:
        with pytest.raises(kind, match=text):
            module.register_comm_hook(None, hook)
