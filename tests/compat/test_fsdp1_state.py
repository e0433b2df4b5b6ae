"""FSDP1's state dicts, optimizer twins and whole parameters."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import get_rank as rank

import fullshard as fs
from fullshard.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    transformer_auto_wrap_policy,
)
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.errors import EngineError
from support.compat import (
    Net,
    TransformerBlock,
    adamw,
    assert_same_state,
    build,
    loss_of,
    train,
    train_alone,
)
from support.ranks import on_ranks

BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock})


def wrapped(strategy="FULL_SHARD", **arguments):
    return FSDP(
        build(**arguments), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=BLOCKS
    )


def trained(strategy="FULL_SHARD", steps=2, **arguments):
    model = wrapped(strategy, **arguments)
    optimizer = adamw(model)
    train(model, steps=steps, optimizer=optimizer)
    return model, optimizer


def trained_alone(steps=2, **arguments):
    model = build(**arguments)
    optimizer = adamw(model)
    train_alone(model, steps=steps, optimizer=optimizer)
    return model, optimizer


@pytest.mark.parametrize(("strategy", "tied"), [("FULL_SHARD", True), ("NO_SHARD", False)])
@on_ranks(2)
def test_the_full_state_dict_is_that_of_one_process(strategy, tied):
    model, _ = trained(strategy, tied=tied)
    wanted = trained_alone(tied=tied)[0].state_dict()
    assert_same_state(model.state_dict(), wanted)  # the default type
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
        inner = model.layers[1].state_dict()
    if rank() == 0:
        assert_same_state(state, wanted)
        assert all(type(value) is torch.Tensor for value in state.values())
        prefix = "layers.1."
        part = {k.removeprefix(prefix): v for k, v in wanted.items() if k.startswith(prefix)}
        assert_same_state(inner, part)
    else:
        assert state == inner == {}
    plain = build(tied=tied)
    plain.load_state_dict(model.state_dict())
    assert_same_state(plain.state_dict(), wanted)
    for kind in StateDictType:  # the same for each of them
        with FSDP.state_dict_type(
            model, kind, config if kind is StateDictType.FULL_STATE_DICT else None
        ):
            assert_same_state(fs.full_state_dict(model, rank0_only=False), wanted)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("FULL_STATE_DICT", "SHARD_GRAD_OP"),
        ("SHARDED_STATE_DICT", "NO_SHARD"),
        ("LOCAL_STATE_DICT", "FULL_SHARD"),
    ],
)
@on_ranks(2)
def test_resume_from_each_type_gives_the_same_losses(tmp_path, kind, target):
    model, optimizer = trained()
    kind_of = StateDictType[kind]
    with FSDP.state_dict_type(model, kind_of):
        path = tmp_path / f"{kind}_{rank()}.pt"
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        torch.save(state, path)
    following = train(model, steps=2, optimizer=optimizer, first=2)
    torch.manual_seed(7)
    again = FSDP(Net(), sharding_strategy=ShardingStrategy[target], auto_wrap_policy=BLOCKS)
    optimizer = adamw(again)
    loaded = torch.load(path, weights_only=True)
    with FSDP.state_dict_type(again, kind_of):
        result = again.load_state_dict(loaded["model"])
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        state = FSDP.optim_state_dict_to_load(
            model=again, optim=optimizer, optim_state_dict=loaded["optim"]
        )
        optimizer.load_state_dict(state)
    found = train(again, steps=2, optimizer=optimizer, first=2)
    assert max(abs(a - b) for a, b in zip(found, following, strict=True)) < 1e-6


@on_ranks(2)
def test_state_dict_settings():
    model = wrapped()
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.LOCAL_STATE_DICT
        assert model.state_dict()["head.weight"].dim() == 1
    assert isinstance(FSDP.get_state_dict_type(model).state_dict_config, FullStateDictConfig)
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())
    FSDP.set_state_dict_type(model.layers[0], StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(AssertionError, match="must have the same state dict settings"):
        FSDP.get_state_dict_type(model)


@on_ranks(2)
def test_optimizer_state_dicts_go_through_every_twin():
    model, optimizer = trained()
    reference, plain = trained_alone()
    names = [name for name, _ in reference.named_parameters()]
    wanted = plain.state_dict()["state"]
    full = FSDP.full_optim_state_dict(model, optimizer)
    if rank() == 0:
        assert set(full["state"]) == set(names)
        assert full["param_groups"][0]["params"] == names
        for number, name in enumerate(names):
            found, theirs = full["state"][name], wanted[number]
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.allclose(found[key], theirs[key], atol=1e-6), (name, key)
    else:
        assert full == {}
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    twin = wrapped("SHARD_GRAD_OP")
    twin.load_state_dict(model.state_dict())
    following = train(model, steps=1, optimizer=optimizer, first=2)
    for load in (
        lambda o: FSDP.shard_full_optim_state_dict(everywhere, twin, optim=o),
        lambda o: FSDP.scatter_full_optim_state_dict(full or None, twin, optim=o),
        lambda o: FSDP.optim_state_dict_to_load(twin, o, everywhere),
    ):
        other = adamw(twin)
        other.load_state_dict(load(other))
        assert abs(float(loss_of(twin, 2, rank()).detach()) - following[0]) < 1e-6
    found = train(twin, steps=1, optimizer=other, first=2)
    assert abs(found[0] - following[0]) < 1e-6
    for name, param in model.named_parameters():
        ours = twin.get_parameter(name)
        assert torch.allclose(param.full_tensor(), ours.full_tensor(), atol=1e-6), name
    ids = FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, twin, optim=other)
    assert set(ids["state"]) == set(range(len(names)))
    back = FSDP.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, twin, optim=other)
    assert set(back["state"]) == set(names)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    assert sharded["state"]["head.weight"]["exp_avg"].to_local().shape == (7 - rank(), 16)
    other.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, twin, other))
    local = other.state[twin.head.weight]["exp_avg"].to_local()
    assert torch.allclose(local, optimizer.state[model.head.weight]["exp_avg"].to_local())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FSDP.shard_full_optim_state_dict(everywhere, twin, optim_input=list(twin.parameters()))
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        on_zero = FSDP.optim_state_dict(model, optimizer)
        assert bool(on_zero) is (rank() == 0)
        FSDP.optim_state_dict_to_load(model, optimizer, on_zero, load_directly=True)


@on_ranks(2)
def test_summon_full_params():
    model, _ = trained(steps=1)
    wanted = trained_alone(steps=1)[0]
    with FSDP.summon_full_params(model):
        assert_same_state(dict(model.named_parameters()), dict(wanted.named_parameters()))
        assert all(type(param) is nn.Parameter for param in model.parameters())
        with torch.no_grad():
            model.head.bias.fill_(3.0)
    assert torch.equal(model.head.bias.full_tensor(), torch.full((13,), 3.0))
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.head.bias.zero_()
    assert torch.equal(model.head.bias.full_tensor(), torch.full((13,), 3.0))
    with FSDP.summon_full_params(model, recurse=False):
        assert model.head.weight.shape == (13, 16)
        assert "elements [" in repr(model.layers[0].up.weight)
    with FSDP.summon_full_params(model.layers[0]):
        assert model.layers[0].up.weight.shape == (48, 16)
        assert "elements [" in repr(model.head.weight)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert (model.head.weight.shape == (13, 16)) is (rank() == 0)
    loss_of(model, 5, rank()).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert model.head.weight.grad.shape == (13, 16)
        kept = model.layers[0].up.weight.grad.clone()
        model.layers[0].up.weight.grad.mul_(2.0)
    grad = model.layers[0].up.weight.grad
    assert torch.allclose(grad.full_tensor(), 2.0 * kept)
    seen = []
    model.apply(lambda module: seen.append(type(module)))
    assert len(seen) == len(list(model.modules()))
    train(model, steps=1, first=6)


@on_ranks(2)
def test_summons_that_are_refused():
    model = wrapped()
    with pytest.raises(NotImplementedError, match="writeback=True and rank0_only=True"):
        with FSDP.summon_full_params(model, rank0_only=True):
            pass
    with pytest.raises(NotImplementedError, match="with_grads=True"):
        with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
            pass
    with FSDP.summon_full_params(model):
        with pytest.raises(AssertionError, match="already unsharding"):
            with FSDP.summon_full_params(model):
                pass
        with pytest.raises(ValueError, match="SUMMON_FULL_PARAMS"):
            model.apply(lambda _: None)
    raised = []

    def inside(*_):
        try:
            with FSDP.summon_full_params(model):
                pass
        except AssertionError as error:
            raised.append(str(error))

    handle = model.layers[0].register_forward_hook(inside)
    loss = loss_of(model, 0, rank())
    handle.remove()
    loss.register_hook(inside)
    loss.backward()
    assert raised == ["Cannot manually unshard parameters during forward/backward"] * 2
    no_shard = wrapped("NO_SHARD")
    with pytest.raises(NotImplementedError, match="offload_to_cpu=True and NO_SHARD"):
        with FSDP.summon_full_params(
            no_shard, offload_to_cpu=True, rank0_only=True, writeback=False
        ):
            pass


def save_by_the_engine(folder):
    model, optimizer = trained()[:2]
    with pytest.raises(EngineError) as caught:
        fs.save(folder, model, optimizer)
    return str(caught.value)


def test_the_engines_own_save_names_the_interface_that_wrapped(ranks, tmp_path):
    said = ranks(2)(save_by_the_engine, str(tmp_path / "saved"))
    assert all("by FSDP.state_dict_type" in text for text in said)
    assert list(tmp_path.iterdir()) == []
