"""A sharded model in a single process, and the environment variables that it allows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.compat.fsdp2 import fully_shard
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import ConfigError
from support.scripts import Run, differences, train


def use_fsdp2(model):
    """Shards with torch's call, which creates the engine in the first forward."""
    fully_shard(model)(torch.ones(2, 3))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_training_without_a_process_group_is_unchanged(strategy, dtype):
    alone, sharded = Run(1, None), Run(1, 0)
    whole, model = alone.model(), sharded.model()
    sharded.shard(model, strategy=strategy, param_dtype=dtype)
    assert all(isinstance(param, ShardedParameter) for param in model.parameters())
    for run, each in ((alone, whole), (sharded, model)):
        train(run, each, torch.optim.AdamW(each.parameters(), lr=1e-2))
    assert not list(differences(fs.full_state_dict(model), whole.state_dict(), 1e-13))


def test_in_one_process_every_shard_is_full_and_keeps_its_shape():
    model = Run(1, 0).shard(Run(1, 0).model())
    weight = model.blocks[0].mid.weight
    assert weight.shape == (22, 22)
    assert model.scale.shape == ()
    assert weight.detach().sum(0).shape == weight.detach()[0].shape == (22,)
    place = fs.sharding(weight)
    assert (place.start, place.stop) == (0, 484)
    assert fs.num_parameters(model) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(("shard", "own"), [(fs.shard, False), (fs.shard, True), (use_fsdp2, True)])
def test_more_ranks_in_the_environment_than_in_the_group_are_an_error(monkeypatch, shard, own):
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(3, 3)
    if own:  # a group of only this rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError) as caught:
            shard(model)
    finally:
        if own:
            dist.destroy_process_group()
    assert str(caught.value) == (
        "WORLD_SIZE: expected a process group of the 4 ranks of torchrun; the model has "
        f"{'one of 1' if own else 'none'}. Call torch.distributed.init_process_group for all of "
        "them first, and pass the outermost module no smaller process_group. To train in smaller "
        "groups on purpose, delete the launcher's variables, such as RANK and WORLD_SIZE, from "
        "os.environ before."
    )
    assert shard is not fs.shard or type(model.weight) is nn.Parameter


def test_torchs_call_joins_the_launch_if_there_is_no_group(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="expected the address of rank 0"):
        fully_shard(nn.Linear(3, 3))


def test_one_rank_in_the_environment_needs_no_group(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert fs.shard(nn.Linear(3, 3))(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ((1, 2), "expected 1 .the number of ranks.; got 1 x 2 = 2"),
        ((2, 1), "replicate x shard: expected 1 .the number of ranks.; got 2 x 1 = 2"),
        ((0, 1), "replicate: expected an integer >= 1, got 0"),
        ((1.5, 1), "replicate: expected an integer"),
        (("a", 1), "replicate: expected an integer"),
        ((1, 1, 1), "mesh: expected .replicate, shard. or .shard,.; got .1, 1, 1."),
        ("shard", "mesh: expected a DeviceMesh"),
        (2, "mesh: expected a DeviceMesh"),
    ],
)
def test_a_mesh_that_does_not_match_the_ranks_is_an_error(mesh, text):
    with pytest.raises(ConfigError, match=text):
        fs.shard(nn.Linear(3, 3), mesh=mesh)


def test_a_model_without_parameters_is_not_changed():
    model = fs.shard(nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert torch.equal(model(torch.tensor([[-1.0, 2.0]])), torch.tensor([[0.0, 2.0]]))
    assert fs.full_state_dict(model) == {}
    assert fs.num_parameters(model) == 0
    assert fs.clip_grad_norm_(model, 1.0).item() == 0.0


def test_a_frozen_model_can_be_sharded_and_evaluated():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    wanted = model(torch.ones(2, 3))
    fs.shard(model, poison=True)
    assert torch.equal(model(torch.ones(2, 3)), wanted)
    assert fs.memory_stats(model)["gradient_shards"] == {"now": 0, "peak": 0}


def test_empty_and_odd_parameters_are_sharded():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 5))
            self.number = nn.Parameter(torch.tensor(2.0))
            self.one = nn.Parameter(torch.ones(1, 1, 1))

        def forward(self, x):
            return self.number * self.one.sum() * x + self.empty.sum()

    model = fs.shard(Odd(), poison=True)
    model(torch.ones(())).backward()
    assert [param.grad.item() for param in (model.number, model.one)] == [1.0, 2.0]
    assert {n: tuple(v.shape) for n, v in fs.full_state_dict(model).items()} == {
        "empty": (0, 5),
        "number": (),
        "one": (1, 1, 1),
    }
