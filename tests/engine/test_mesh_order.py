"""A DeviceMesh defines the place of each rank; ranks need not be numbered row by row."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fullshard as fs
from fullshard.compat import fsdp1, fsdp2
from fullshard.errors import ConfigError
from support.compat import TransformerBlock, assert_trains_as_one, build
from support.grid import chequered
from support.ranks import on_ranks

ORDER = [[0, 2], [1, 3]]
FALLING = [[3, 1], [0, 2]]  # torch sorts the ranks of a group unless it is told not to


def device_mesh(order=ORDER):
    return DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("replicate", "shard"))


def first_half(model):
    """Returns the ranks with elements of a parameter in the first half of its unit."""
    (param,) = (p for n, p in model.named_parameters() if n.endswith("0.up.weight"))
    found: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(found, param.numel() > 0)
    return found


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("transport", "order"), chequered(["c10d", "direct", "shared"], [ORDER, FALLING]), ids=str
)
@on_ranks(4)
def test_shard_groups_are_those_of_the_mesh(transport, order, tmp_path):
    folder = str(tmp_path / "saved")
    mesh = device_mesh(order)
    wrap = partial(fs.shard, mesh=mesh, strategy="hybrid_shard", wrap=["TransformerBlock"])
    model = assert_trains_as_one(lambda net: wrap(net, transport=transport, poison=True))
    assert first_half(model) == [any(rank == row[0] for row in order) for rank in range(4)]
    fs.save(folder, model)
    other = fs.shard(build(), strategy="full_shard", wrap=["TransformerBlock"], transport=transport)
    fs.load(folder, other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), two.full_tensor(), rtol=0, atol=0)


@on_ranks(4)
def test_facades_take_the_order_of_the_mesh_too():
    def torchs(net):
        for layer in net.layers:
            fsdp2.fully_shard(layer, mesh=device_mesh())
        return fsdp2.fully_shard(net, mesh=device_mesh())

    model = assert_trains_as_one(torchs)
    assert first_half(model) == [True, True, False, False]
    rows = model.state_dict()["layers.0.up.weight"]
    assert rows.device_mesh.mesh.tolist() == ORDER
    torch.testing.assert_close(rows.full_tensor(), model.layers[0].up.weight.full_tensor())
    policy = fsdp1.ModuleWrapPolicy({TransformerBlock})
    hybrid = fsdp1.ShardingStrategy.HYBRID_SHARD
    wrapped = assert_trains_as_one(
        lambda net: fsdp1.FullyShardedDataParallel(
            net, device_mesh=device_mesh(), sharding_strategy=hybrid, auto_wrap_policy=policy
        )
    )
    assert first_half(wrapped) == [True, True, False, False]


@on_ranks(2)
def test_a_mesh_of_a_part_of_the_ranks_is_refused():
    whole = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("shard",))
    model = fs.shard(torch.nn.Linear(64, 64), mesh=whole, wrap="none")
    assert (fs.sharding(model.weight).start == 0) is (dist.get_rank() == 1)
    part = DeviceMesh("cpu", torch.tensor([1]), mesh_dim_names=("shard",))
    with pytest.raises(ConfigError, match="expected a mesh of all ranks"):
        fs.shard(torch.nn.Linear(64, 64), mesh=part, wrap="none")
