"""torch's FSDP2 calls with changed imports only."""

import copy
import gc
import sys
import warnings
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import get_rank as rank
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module

import fullshard as fs
from fullshard.compat.fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.engine.engine import engine_of
from fullshard.engine.step import Runtime
from fullshard.errors import EngineError
from support.compat import (
    Net,
    assert_same_state,
    assert_trains_as_one,
    build,
    loss_of,
    train,
    train_alone,
)
from support.ranks import on_ranks


def bottom_up(model, **settings):
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def whole(model):
    state = model.state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def settings():
    model = assert_trains_as_one(bottom_up)
    assert type(model).__name__ == "FSDPNet"
    assert isinstance(model.layers[0], FSDPModule)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)  # helpers check for torch's class
    assert isinstance(model, Net)
    reference = build()
    train_alone(reference)
    assert_same_state(whole(model), reference.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    named = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    dims = DataParallelMeshDims and {"dp_mesh_dims": DataParallelMeshDims(shard=("dp_shard", "cp"))}
    for given in (
        {"reshard_after_forward": False, "mesh": mesh},
        {"mesh": named, **dims} if dims else {},
        {"reshard_after_forward": 2},
        {"mesh": hybrid},
        {"offload_policy": CPUOffloadPolicy()},
        {"shard_placement_fn": lambda param: None},
    ):
        model = assert_trains_as_one(lambda net, g=given: bottom_up(net, **g))
    assert model.state_dict()["head.weight"].to_local().shape == (7 - rank(), 16)


@pytest.mark.skipif(DataParallelMeshDims is None, reason="torch 2.11 has none")
@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ({"shard": ("dp_shard", "cp"), "replicate": "dp_replicate"}, (1, 4)),
        ({"shard": "cp", "replicate": ("dp_replicate", "dp_shard")}, (2, 2)),
        ({"replicate": ("dp_replicate", "dp_shard", "cp")}, (4, 1)),
    ],
)
@on_ranks(4)
def test_several_data_parallel_axes_of_one_kind_are_flattened(dims, shape):
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=names)
    given = DataParallelMeshDims(**dims)
    model = assert_trains_as_one(lambda net: bottom_up(net, mesh=mesh, dp_mesh_dims=given))
    found = engine_of(model).plan.mesh
    assert (found.replicate, found.shard) == shape
    assert model.state_dict()["head.weight"].full_tensor().shape == (13, 16)


def test_fully_shard_bottom_up_with_every_setting(ranks):
    ranks(2)(settings)


class Recorder(nn.Module):
    """Records the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.seen = (x.dtype, self.inner.weight.dtype)
        return self.inner(x)


@on_ranks(2)
def test_mixed_precision_is_each_units_own():
    bf16, full = torch.bfloat16, torch.float32
    model = nn.Sequential(Recorder(), Recorder(), Recorder())
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(bf16, output_dtype=full))
    fully_shard(model[1])
    fully_shard(model[2], mp_policy=MixedPrecisionPolicy(bf16, reduce_dtype=full))
    fully_shard(model)
    out = model(torch.ones(2, 4))
    assert [module.seen for module in model] == [(bf16, bf16), (full, full), (bf16, bf16)]
    assert out.dtype is bf16
    out.float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {full}
    casts = MixedPrecisionPolicy(bf16, torch.float32)
    assert_trains_as_one(lambda net: bottom_up(net.float(), mp_policy=casts), tolerance=0.05)


@on_ranks(2)
def test_meta_init_and_state_dicts_as_torchtitan_has_them():
    """Runs torchtitan's sequence of calls."""
    reference = build()
    with torch.device("meta"):
        model = Net()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard([model.embed, model.head], reshard_after_forward=False)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"meta device: \['embed.weight'\] and those of 4"):
        model(torch.zeros(1, 2, dtype=torch.long))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1]])
    params = {id(param): param for param in model.parameters()}  # an optimizer may own them
    model.to_empty(device="cpu")
    assert params.keys() == set(map(id, model.parameters()))
    torch.manual_seed(3 + rank())
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    set_model_state_dict(
        model,
        reference.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    wanted = [losses[rank()] for losses in train_alone(reference)]
    found = train(model)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-6
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert_same_state(state, reference.state_dict() if rank() == 0 else {})
    with torch.device("meta"):
        other = bottom_up(Net())
    other.load_state_dict(reference.state_dict(), assign=True)
    assert_same_state(whole(other), reference.state_dict())
    other.load_state_dict(model.state_dict())  # DTensors
    with torch.device("meta"):
        tied = Net()
    tied.head.weight = tied.embed.weight
    tied = bottom_up(tied).to_empty(device="cpu")
    assert tied.head.weight is tied.embed.weight
    assert tied.head.weight.placements == (Shard(0),)


@on_ranks(2)
def test_gradient_sync_setters():
    model, reference = bottom_up(build()), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            loss_of(model, 10 * step + micro, rank()).backward()
            grad = next(model.parameters()).grad
            if last:
                grad.full_tensor()
            else:
                with pytest.raises(EngineError, match="no_sync"):
                    grad.full_tensor()
            for other in range(2):
                (loss_of(reference, 10 * step + micro, other) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(whole(model), reference.state_dict())


@on_ranks(2)
def test_a_gradient_divisor_applies_to_one_call_of_fully_shard():
    """A factor applies to one call of fully_shard, as in torch; layers 1 and 2 are one call."""
    found = []
    warnings.simplefilter("ignore")  # a warning of torch about a view that the model returns
    for wrap in (fully_shard, torch.distributed.fsdp.fully_shard):
        model = build().double()  # gloo lacks the premultiplied sums that torch uses in float32
        wrap(model.layers[0])
        wrap([model.layers[1], model.layers[2]])
        wrap(model)
        model.layers[0].set_gradient_divide_factor(8.0)
        loss_of(model, 5, rank()).backward()
        model.layers[1].set_gradient_divide_factor(3.0)
        loss_of(model, 6, rank()).backward()
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    assert_same_state(*found)


@on_ranks(2)
def test_changes_between_steps_are_adopted():
    """Takes over users' changes between steps; see compat/wrapping.py."""
    model, reference = bottom_up(build()), build()
    wanted = [losses[rank()] for losses in train_alone(reference, steps=1)]
    assert abs(train(model, steps=1)[0] - wanted[0]) < 2e-6
    model.double(), reference.double()
    for step in (1, 2):
        loss_of(model, step, rank()).backward()
        for other in range(2):
            (loss_of(reference, step, other) / 2).backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
    for name, param in model.named_parameters():
        theirs = reference.get_parameter(name).grad
        assert torch.allclose(param.grad.full_tensor(), theirs, atol=1e-7), name
    model.set_reshard_after_forward(False)
    loss_of(model, 3, rank()).backward()
    frozen = model.layers[1].up.weight
    frozen.requires_grad_(False)
    loss_of(model, 4, rank()).backward()
    frozen.requires_grad_(True)
    with torch.no_grad():
        new = nn.Parameter(reference.head.weight.detach().clone())
    model.head.weight = new  # a full tensor
    reference.head.weight = nn.Parameter(new.detach().clone())
    model.embed.weight.data = model.embed.weight.data.clone()
    model.zero_grad(), reference.zero_grad()
    loss_of(model, 5, rank()).backward()
    for other in range(2):
        (loss_of(reference, 5, other) / 2).backward()
    assert new.grad is not None
    for name, param in model.named_parameters():
        theirs = reference.get_parameter(name).grad
        assert torch.allclose(param.grad.full_tensor(), theirs, atol=1e-6), name


class TwoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x)

    def encode(self, x, scale):
        return scale * self.a(x)


@on_ranks(2)
def test_methods_of_modules():
    torch.manual_seed(0)
    model = TwoMethods()
    plain = copy.deepcopy(model)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    x = torch.ones(2, 4)
    out = model.encode(x, scale=2.0)
    assert torch.allclose(out, plain.encode(x, 2.0))
    out.sum().backward()
    assert model.a.weight.grad is not None
    handle = model.unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.a.weight, plain.a.weight)
    model.reshard()
    assert "elements [" in repr(model.a.weight)
    model.unshard()
    assert torch.allclose(model(x), plain(x))  # the plan gathers it again
    share_comm_ctx([model])
    layers = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    stack = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert type(stack).__name__ == "FSDPSequential"
    assert type(stack[:2]) is nn.Sequential
    kept = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(kept, ignored_params=set(kept[1].parameters()))
    kept(x).sum().backward()
    assert type(kept[1].weight) is nn.Parameter
    assert kept[1].weight.shape == (4, 4)


@on_ranks(2)
def test_compiled_blocks_are_units_as_in_torch():
    """torchtitan compiles blocks before it shards them."""
    model, reference = build(), build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torch's compiler warns
        for at, layer in enumerate(model.layers):
            model.layers[at] = fully_shard(torch.compile(layer, backend="eager"))
        train(fully_shard(model))
    train_alone(reference)
    state = {name.replace("_orig_mod.", ""): value for name, value in whole(model).items()}
    assert_same_state(state, reference.state_dict())
    assert len(engine_of(model).units) == 1 + len(model.layers)


def _reshard(value):
    fully_shard(nn.Linear(2, 2), reshard_after_forward=value)


def _axes(**dims):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    fully_shard(Net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))


def _distributed():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    layer = distribute_module(nn.Linear(2, 2), mesh)
    fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp_shard"))


def _place(dim):
    fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Shard(dim))


def _prefetch(line):
    line.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@on_ranks(2)
def test_what_is_refused():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5).t())

    line = nn.Linear(2, 2)
    fully_shard(line)
    cases = [
        (NotImplementedError, "got a lazy one", lambda: fully_shard(nn.LazyLinear(2))),
        (ValueError, "scalar parameters", lambda: fully_shard(Scalar())),
        (NotImplementedError, "non-contiguous", lambda: fully_shard(Strided())),
        (ValueError, "containers", lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)]))),
        (AssertionError, "applied to a module once", lambda: fully_shard(line)),
        (AssertionError, "does not support deepcopy", lambda: copy.deepcopy(line)),
        (ValueError, "factor of 2, not 3", lambda: _reshard(3)),
        (ValueError, "bool or an int", lambda: _reshard("always")),
        (ValueError, "Expects FSDPModule", lambda: _prefetch(line)),
        (NotImplementedError, "set_all_reduce_hook", lambda: line.set_all_reduce_hook(print)),
        (NotImplementedError, "finalization", lambda: line.set_manual_backward_finalization(True)),
        (NotImplementedError, "finalize_backward", lambda: line.finalize_backward(async_op=True)),
        (NotImplementedError, "set_custom", lambda: line.set_custom_all_gather(None)),
        (NotImplementedError, "set_custom", lambda: line.set_custom_reduce_scatter(None)),
        (AssertionError, "Shard dim 1 is invalid for 1D", lambda: _place(1)),
        (ValueError, "should be a bool", lambda: line.set_reshard_after_forward(2)),
        (ValueError, "does not have a method", lambda: register_fsdp_forward_method(line, "no")),
    ]
    if DataParallelMeshDims:
        cases += [
            (NotImplementedError, "dp_mesh_dims: expected", lambda: _axes(shard="tp")),
            (NotImplementedError, "expected a plain parameter; got a DTensor", _distributed),
        ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    _place(0)
    assert type(line).__name__ == "FSDPLinear"
    assert fully_shard.state(line) is not None
    assert fully_shard.state(nn.Linear(2, 2)) is None


class Optimized:
    """Stands for a torch.cuda.Event of a stream that runs the optimizer."""

    def __init__(self, log):
        self.log = log

    def wait(self):
        self.log.append("waited")


@on_ranks(2)
def test_the_next_forward_waits_for_the_optimizers_event():
    model = bottom_up(build())
    log: list[str] = []
    batch = torch.ones(2, 8, dtype=torch.int64)
    model(batch)
    with patch.object(Runtime, "is_in_backward", autospec=True) as begins:
        begins.side_effect = lambda *_, **__: log.append("begins")
        model.set_post_optim_event(Optimized(log))
        assert log == []
        model(batch)
        assert log[:2] == ["waited", "begins"]
        model(batch)
    assert log.count("waited") == 1


def test_values_move_to_the_device_of_this_rank(monkeypatch):
    """torch moves them too. CPU 0, an index that no tensor reports, stands in for a GPU."""
    model, there, moved, to = build(), torch.device("cpu", 0), [], torch.Tensor.to

    def noted(tensor, device):
        moved.append(tensor)
        return to(tensor, device)

    fully_shard(model.layers[0])
    ignored = model.layers[1].up.weight
    monkeypatch.setattr(sys.modules[fully_shard.__module__], "default_device", lambda: there)
    monkeypatch.setattr(torch.Tensor, "to", noted)
    fully_shard(model, ignored_params={ignored})
    monkeypatch.undo()
    stayed = {id(p) for p in model.layers[0].parameters()} | {id(ignored)}
    wanted = {id(p) for p in model.parameters()} - stayed | {id(model.shift)}
    assert {id(tensor) for tensor in moved} == wanted


@on_ranks(2)
def test_a_model_that_is_dropped_while_a_unit_is_shown_whole_is_freed():
    model = build()
    bottom_up(model)
    model.unshard()
    model.layers[0].unshard()
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None


@on_ranks(2)
@pytest.mark.parametrize("rank0_only", [True, False])
def test_the_full_state_dict_has_whole_plain_tensors(rank0_only):
    reference = build()
    model = bottom_up(build())
    with pytest.raises(EngineError, match=r"got FSDPNet, which has shards.*first forward"):
        fs.full_state_dict(model)
    train(model)
    train_alone(reference)
    state = fs.full_state_dict(model, rank0_only=rank0_only)
    assert {type(value) for value in state.values()} <= {torch.Tensor}
    assert_same_state(state, reference.state_dict() if rank() == 0 or not rank0_only else {})
