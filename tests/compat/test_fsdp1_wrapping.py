"""Arguments of FSDP1's constructor that are supported, and those that are refused."""

import functools
import os
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_rank as rank
from torch.distributed.device_mesh import init_device_mesh

from fullshard.compat import fsdp1
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import ConfigError
from support.compat import (
    Net,
    TransformerBlock,
    assert_same_state,
    assert_trains_as_one,
    build,
    loss_of,
    train,
    train_alone,
)
from support.ranks import on_ranks

BLOCKS = ModuleWrapPolicy({TransformerBlock})


@on_ranks(2)
def test_ignored_modules_and_states():
    net = build()
    kept = net.layers[1]
    model = FSDP(net, ignored_modules=[kept], auto_wrap_policy=BLOCKS)
    loss_of(model, 0, rank()).backward()
    assert type(kept.up.weight) is nn.Parameter
    reference = build()
    loss_of(reference, 0, rank()).backward()  # this rank's gradient, which is not reduced
    assert torch.allclose(kept.up.weight.grad, reference.layers[1].up.weight.grad, atol=1e-6)
    assert list(model.state_dict()) == list(reference.state_dict())
    net = build()
    model = FSDP(net, ignored_states=[net.head.weight])
    loss_of(model, 0, rank()).backward()
    assert type(net.head.weight) is nn.Parameter
    assert isinstance(net.head.bias, ShardedParameter)
    for kind, text, given in [
        (TypeError, "should be an iterable", {"ignored_modules": net.head}),
        (ValueError, r"expects nn.Module list .* \[<class 'int'>\]", {"ignored_modules": [1]}),
        (ValueError, "not include FSDP", {"ignored_modules": [FSDP(nn.Linear(2, 2))]}),
        (ValueError, "Cannot pass both", {"ignored_modules": [], "ignored_states": []}),
        (ValueError, "all nn.Parameter or all", {"ignored_states": [net.head, net.head.weight]}),
    ]:
        with pytest.raises(kind, match=text):
            FSDP(build(), **given)
    net = build(tied=True)
    loss_of(FSDP(net, ignored_states=[net.head.weight]), 0, rank())
    assert type(net.embed.weight) is type(net.head.weight) is nn.Parameter
    net = build()
    with pytest.warns(UserWarning, match="all parameters being ignored"):
        whole = FSDP(net, ignored_modules=[net])
    loss_of(whole, 0, rank()).backward()
    assert torch.equal(whole.state_dict()["head.bias"], net.head.bias)
    net.layers[0] = FSDP(net.layers[0], limit_all_gathers=False)
    with pytest.raises(ValueError, match="one homogeneous value for limit_all_gathers"):
        loss_of(FSDP(net), 0, rank())
    for name in ("_handle", "params"):
        with pytest.raises(AttributeError, match="flat parameters do not exist"):
            getattr(model, name)


@on_ranks(2)
def test_first_values_from_rank_0_and_from_meta():
    reference = build()
    wanted = [losses[rank()] for losses in train_alone(build())]
    torch.manual_seed(10 + rank())  # different weights on each rank
    model = FSDP(
        reference if rank() == 0 else Net(), auto_wrap_policy=BLOCKS, sync_module_states=True
    )
    assert max(abs(a - b) for a, b in zip(train(model), wanted, strict=True)) < 2e-6
    with torch.device("meta"):
        empty = Net()
    model = FSDP(
        build() if rank() == 0 else empty,
        auto_wrap_policy=BLOCKS,
        sync_module_states=True,
        device_id=torch.device("cpu"),
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    assert max(abs(a - b) for a, b in zip(train(model), wanted, strict=True)) < 2e-6
    torch.manual_seed(20 + rank())  # replicas start equal despite unequal seeds
    copies = FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    torch.manual_seed(20)
    assert_same_state(copies.state_dict(), Net().state_dict(), 0.0)
    with torch.device("meta"):
        stack = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    torch.manual_seed(0)
    model = FSDP(stack, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    assert_same_state(model.state_dict(), plain.state_dict(), 0.0)
    with torch.device("meta"):
        bare = build().__class__()
    bare.shift = torch.zeros(16)
    with pytest.raises(ValueError, match="to be callable"):
        FSDP(bare, param_init_fn=3)


@on_ranks(2)
def test_process_groups_and_meshes():
    groups = (dist.new_group([rank()]), None)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    for given in (
        {"device_mesh": mesh, "sharding_strategy": hybrid},
        {
            "process_group": (mesh.get_group("shard"), mesh.get_group("replicate")),
            "sharding_strategy": hybrid,
        },
        {"process_group": dist.group.WORLD},
        {"device_mesh": init_device_mesh("cpu", (2,))},
    ):
        model = assert_trains_as_one(lambda net, g=given: FSDP(net, auto_wrap_policy=BLOCKS, **g))
    state = model.state_dict()
    with (
        FSDP.state_dict_type(model, fsdp1.StateDictType.LOCAL_STATE_DICT),
        pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"),
    ):
        model.state_dict()
    with FSDP.state_dict_type(model, fsdp1.StateDictType.SHARDED_STATE_DICT):
        assert FSDP.get_state_dict_type(model).state_dict_config._use_dtensor
        assert model.state_dict()["head.weight"].device_mesh.shape == (2,)
    assert state["head.weight"].shape == (13, 16)
    with pytest.raises(ValueError, match="both process_group and device_mesh"):
        FSDP(build(), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(ValueError, match=r"Tuple\[dist.ProcessGroup"):
        FSDP(build(), process_group=dist.group.WORLD, sharding_strategy=hybrid)
    expert = FSDP(nn.Linear(16, 16), process_group=groups[0])
    model = FSDP(nn.Sequential(nn.Linear(16, 16), expert))
    x = torch.full((2, 16), float(rank() + 1))
    model(x).sum().backward()
    assert type(expert.module.weight) is nn.Parameter  # this rank's gradient, not reduced
    assert expert.module.weight.grad.shape == (16, 16)
    launch = {"RANK": str(rank()), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    apart = FSDP(build(), process_group=groups[0])
    with patch.dict(os.environ, launch):
        assert model(x).shape == (2, 16)
        with pytest.raises(ValueError, match="the 2 ranks of torchrun; the model has one of 1"):
            apart(x)


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.up(x))


@on_ranks(2)
def test_models_that_need_care():
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with pytest.warns(UserWarning, match="mixed precision disabled"):
        model = FSDP(
            WithNorm(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
        )
    seen = []
    model.norm.module.register_forward_hook(lambda m, a, o: seen.append(m.weight.dtype))
    out = model(torch.ones(3, 4) * (rank() + 1))
    out.float().sum().backward()
    assert seen == [torch.float32]
    assert out.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="already have FSDP applied"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy=BLOCKS)
    with pytest.warns(UserWarning, match="not all-gather parameters for containers"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(AssertionError, match="only be called on a root"):
        model.up.register_comm_hook(None, print)
    with pytest.raises(RuntimeError, match="only be called on the root"):
        model.up.clip_grad_norm_(1.0)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.clip_grad_norm_(1.0) == 0.0
    assert any("with no gradients" in str(one.message) for one in caught)
    stack = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert stack[1] is stack.module[1]
    assert repr(stack).startswith("FullyShardedDataParallel")
    assert next(name for name, _ in stack.named_parameters()) == "0.weight"


@on_ranks(2)
def test_clipping_with_any_norm():
    for order in (1.0, 2.0, 3.0, float("inf")):
        reference = build()
        for other in range(2):
            (loss_of(reference, 0, other) / 2).backward()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order)

        def mixed(net):
            net.layers[0] = FSDP(net.layers[0], sharding_strategy=ShardingStrategy.NO_SHARD)
            return FSDP(net)

        for wrap in (functools.partial(FSDP, auto_wrap_policy=BLOCKS), mixed):
            model = wrap(build())
            loss_of(model, 0, rank()).backward()
            assert torch.allclose(model.clip_grad_norm_(0.1, order), wanted, rtol=1e-5)
            with FSDP.summon_full_params(model, with_grads=True):
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-8)


@on_ranks(2)
def test_hooks_on_modules_and_parameters():
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    seen: list[str] = []
    weight = model.layers[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad).__name__))
    model.layers[1].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    loss_of(model, 0, rank()).backward()
    assert seen == ["forward", "backward", "ShardedGradient"]


@on_ranks(2)
def test_strategies_are_words_too_and_shards_have_the_names_that_users_know():
    model = FSDP(build(), sharding_strategy="FULL_SHARD", auto_wrap_policy=BLOCKS)
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    with pytest.raises(ConfigError, match=r"sharding_strategy: .*Did you mean 'full_shard'"):
        FSDP(build(), sharding_strategy="FULL_SHRAD")
    loss_of(model, 0, rank()).backward()
    texts = [repr(param) for param in model.parameters()]
    assert texts
    assert not any("_fsdp_wrapped_module" in text for text in texts)


def test_every_name_of_torch_is_there():
    import torch.distributed.fsdp as theirs
    import torch.distributed.fsdp.api as api
    import torch.distributed.fsdp.wrap as wrap

    import fullshard.compat.fsdp1.api as our_api
    import fullshard.compat.fsdp1.checkpoint_wrapper as our_checkpoint_wrapper
    import fullshard.compat.fsdp1.wrap as our_wrap
    from fullshard.compat import fsdp2

    for name in theirs.__all__:
        assert hasattr(fsdp1, name) or hasattr(fsdp2, name), name
    assert set(api.__all__) <= set(our_api.__all__)
    assert set(wrap.__all__) <= set(our_wrap.__all__)
    methods = [name for name in vars(theirs.FullyShardedDataParallel) if not name.startswith("_")]
    assert [name for name in methods if not hasattr(FSDP, name)] == []
    methods = [name for name in vars(theirs.FSDPModule) if not name.startswith("_")]
    assert [name for name in methods if not hasattr(fsdp2.FSDPModule, name)] == []
    assert our_wrap.enable_wrap is wrap.enable_wrap
    line = nn.Linear(2, 2)
    assert fsdp1.wrap(line) is line  # a module and a function of the same name both work
    assert fsdp1.checkpoint_wrapper(line) is our_checkpoint_wrapper.checkpoint_wrapper(line)
    assert fsdp1.ShardingStrategy is theirs.ShardingStrategy
