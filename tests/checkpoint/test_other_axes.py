"""Checkpoints with tensor and expert parallelism: any mesh reads those of any other mesh."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import fullshard as fs
from fullshard.errors import CheckpointError, EngineError
from support.experts import mixture_net, spread
from support.other_axes import LENGTH, WIDTH, cut_net, mesh_of, net, whole_states
from support.ranks import on_ranks
from support.scripts import differences

NUM_SAMPLES = 4
NUM_STEPS = 2  # updates before the save, and after the load

# (replicate, shard, tensor) by number of ranks; a tensor axis of 0 means plain parameters.
LAYOUTS = {
    1: [(1, 1, 0)],
    2: [(1, 1, 2), (1, 2, 0)],
    4: [(1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 0)],
}
# (shard, expert): two ranks have 3 and 2 of the five experts; four ranks 2, 2, 1 and 0.
GROUPS = {1: [(1, 0)], 2: [(1, 2), (2, 0)], 4: [(2, 2), (1, 4), (4, 0)]}


def optimizer_of(model):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def sharded(axes, **settings):
    if len(axes) == 2:
        model = mixture_net()
        if axes[1]:
            mesh = init_device_mesh("cpu", axes, mesh_dim_names=("shard", "expert"))
            spread(model, mesh["expert"])
        fs.shard(model, poison=True, **settings)
        return model, optimizer_of(model)
    replicate, shard, tensor = axes
    model = net()
    if tensor:
        mesh = mesh_of(*axes)
        cut_net(model, mesh["tensor"])
        fs.shard(model, mesh=mesh["replicate", "shard"], poison=True, **settings)
    else:
        fs.shard(model, replicate=replicate, shard=shard, poison=True, **settings)
    return model, optimizer_of(model)


def train(model, optimizer, steps, axes=(1, 1, 0)):
    """Trains on the mean loss of the global batch; ranks of the tensor axis share a part of it."""
    *_, tensor = axes if len(axes) == 3 else (0,)
    num_parts = axes[0] * (axes[1] or 1)
    part = dist.get_rank() // max(tensor, 1) % num_parts if dist.is_initialized() else 0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(NUM_SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        model(batch.chunk(num_parts)[part]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(one, two):
    """Returns the names of tensors that are not bit-equal."""
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def own_part(model, optimizer):
    """Returns weights and states of this rank."""
    found = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    local = {
        name: value.to_local() if hasattr(value, "to_local") else value
        for name, value in found.items()
    }
    return {name: value.clone() for name, value in local.items()}


def write_all(root, layouts, offload="none"):
    for axes in layouts[dist.get_world_size()]:
        model, optimizer = sharded(axes, offload=offload)
        train(model, optimizer, range(NUM_STEPS), axes)
        place = Path(root) / "-".join(map(str, axes))
        fs.save(place, model, optimizer, step=NUM_STEPS, wait=False)
        expected = whole_states(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, f"{place}.pt")
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), axes)
        uninterrupted = own_part(model, optimizer)
        again, optimizer = sharded(axes, offload=offload)
        fs.load(place, again, optimizer)
        train(again, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), axes)
        assert equal(own_part(again, optimizer), uninterrupted) == []


def read_some(root, layouts):
    """Each mesh loads another mesh's checkpoint and continues like one process."""
    every = [axes for some in layouts.values() for axes in some]
    alone = mixture_net() if len(every[0]) == 2 else net()
    optimizer = optimizer_of(alone)
    train(alone, optimizer, range(2 * NUM_STEPS))
    wanted = {name: value.detach() for name, value in alone.state_dict().items()}
    for axes in layouts[dist.get_world_size()]:
        other = every[(every.index(axes) + 2) % len(every)]  # has other axes or ranks
        place = Path(root) / "-".join(map(str, other))
        model, optimizer = sharded(axes)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float("nan"))
        assert fs.load(place, model, optimizer) == {"step": NUM_STEPS}
        saved = torch.load(f"{place}.pt", weights_only=True)
        assert equal(whole_states(model, optimizer), saved) == [], (place.name, axes)
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), axes)
        found = fs.full_state_dict(model, rank0_only=False)
        problems = list(differences(found, wanted, 1e-12))
        assert not problems, f"{place.name} -> {axes}: {problems[0]}"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [GROUPS, LAYOUTS], ids=["expert", "tensor"])
def test_any_mesh_reads_any_others_checkpoint(ranks, tmp_path, layouts):
    for body in (write_all, read_some):
        for number in layouts:
            ranks(number)(body, str(tmp_path), layouts, timeout=200)


@pytest.mark.long
@pytest.mark.parametrize(
    ("written", "read"),
    [((1, 2, 2), (2, 1, 2)), ((2, 2), (1, 4)), ((1, 4, 0), (1, 2, 2)), ((4, 0), (2, 2))],
)
@on_ranks(4, timeout=200)
def test_any_mesh_loads_states_of_whole_matrices(tmp_path, written, read):
    """One mesh saves after two steps, another continues; owners see full tensors."""
    build = mixture_net if len(written) == 2 else net
    alone = build()
    adafactor = partial(torch.optim.Adafactor, lr=1e-2)
    train(alone, adafactor(alone.parameters()), range(2 * NUM_STEPS))
    for axes, first in ((written, 0), (read, NUM_STEPS)):
        model, _ = sharded(axes)
        optimizer = fs.owned(model, adafactor)
        if first:
            fs.load(tmp_path / "owned", model, optimizer)
        train(model, optimizer, range(first, first + NUM_STEPS), axes)
        fs.save(tmp_path / ("owned" if not first else "again"), model, optimizer)
    found = fs.full_state_dict(model, rank0_only=False)
    problems = list(differences(found, dict(alone.state_dict()), 1e-12))
    assert not problems, problems


@pytest.mark.long
def test_offloaded_states_are_saved_and_resumed(ranks, tmp_path):
    ranks(4)(write_all, str(tmp_path), {4: [(1, 2, 2), (1, 4, 0)]}, "cpu", timeout=300)


class Grid(nn.Module):
    """Parameters on two further axes, a and b, sharded along both, one or none of them."""

    def __init__(self, number=1.0):
        super().__init__()
        sizes = {
            "both": (7, 5),
            "later": (3, 4, 5),
            "rows": (7, 2),
            "copied": (6,),
            "plain": (3, 3),
        }
        for name, size in sizes.items():
            values = number * torch.arange(torch.Size(size).numel(), dtype=torch.float64)
            setattr(self, name, nn.Parameter(values.view(size)))


def cut_grid(model, mesh):
    places = {
        "both": (mesh["a", "b"], [Shard(1), Shard(0)]),
        "later": (mesh["a", "b"], [Replicate(), Shard(2)]),
        "rows": (mesh["b"], [Shard(0)]),
        "copied": (mesh["a", "b"], [Replicate(), Replicate()]),
    }
    for name, (axes, placements) in places.items():
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(whole, axes, placements)))


def check_grid(folder):
    mesh = DeviceMesh("cpu", [[[0, 2], [1, 3]]], mesh_dim_names=("shard", "a", "b"))
    model, again = Grid(), Grid(0.0)
    for one in (model, again):
        cut_grid(one, mesh)
        fs.shard(one, mesh=mesh["shard"])
    fs.save(folder, model)
    fs.load(folder, again)
    for name, wanted in Grid().named_parameters():
        assert torch.equal(getattr(again, name).full_tensor(), wanted), name


def test_parameters_on_two_further_axes_are_written_once(ranks, tmp_path):
    ranks(4)(check_grid, str(tmp_path / "saved"), timeout=200)
    alone = fs.shard(Grid(0.0))
    fs.load(tmp_path / "saved", alone)
    for name, wanted in Grid().named_parameters():
        assert torch.equal(getattr(alone, name), wanted), name


RESTORED = {  # by (saved under, loaded under): whether random states are restored
    ((1, 2, 2), (1, 2, 2)): True,
    ((1, 2, 2), (2, 1, 2)): True,
    ((1, 2, 2), (1, 4, 0)): False,
    ((1, 4, 0), (1, 2, 2)): False,
    ((1, 1, 4), (1, 4, 0)): False,
    ((1, 1, 4), (1, 1, 4)): True,
    ((1, 4, 0), (2, 2, 0)): True,
}


def masks_after(root, written, read):
    """Returns for each rank the first rank that draws the same numbers after a load."""
    model, optimizer = sharded(written)
    torch.manual_seed(10 + dist.get_rank() // max(written[2], 1))
    fs.save(Path(root) / "saved", model, optimizer)
    wanted = torch.rand(3)
    model, optimizer = sharded(read)
    torch.manual_seed(20 + dist.get_rank() // max(read[2], 1))
    fs.load(Path(root) / "saved", model, optimizer)
    drawn = torch.rand(3)
    assert torch.equal(drawn, wanted) is RESTORED[written, read]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, drawn.tolist())
    return [told.index(one) for one in told]


@pytest.mark.short(1)
@pytest.mark.parametrize(("written", "read"), RESTORED)
def test_ranks_draw_the_same_numbers_only_if_they_share_a_batch(ranks, tmp_path, written, read):
    same = {0: [0, 1, 2, 3], 2: [0, 0, 2, 2], 4: [0, 0, 0, 0]}[read[2]]
    assert ranks(4)(masks_after, str(tmp_path), written, read, timeout=100) == [same] * 4


@on_ranks(4, timeout=60)
def test_a_rank_that_fails_while_ranges_are_gathered_fails_the_save(tmp_path):
    axes = (1, 2, 2)
    model, optimizer = sharded(axes)
    train(model, optimizer, range(1), axes)
    place = tmp_path / "saved"

    class Fails(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to and (kwargs or {}).get("copy") and dist.get_rank() == 2:
                raise OSError(errno.ENOSPC, "No space left on device", "spilled")
            return func(*args, **(kwargs or {}))

    with pytest.raises(CheckpointError, match="spilled: expected to read or write, got No sp"):
        with Fails():
            fs.save(place, model, optimizer)
    assert not place.exists()
    fs.save(place, model, optimizer)
    train(model, optimizer, range(1, 2), axes)


def check_unreadable_state(root):
    axes = (1, 2, 2)
    model, optimizer = sharded(axes)
    train(model, optimizer, range(1), axes)
    states = optimizer.state[model.blocks[1].down.weight]
    if dist.get_rank() == 2:
        states["exp_avg"] = model.blocks[1].down.weight.as_state(
            torch.empty(states["exp_avg"].numel(), dtype=torch.float64, device="meta")
        )
    with pytest.raises(EngineError if dist.get_rank() != 2 else NotImplementedError, match="meta"):
        fs.save(root, model, optimizer)


def test_a_state_that_one_rank_cannot_read_fails_the_save(ranks, tmp_path):
    ranks(4)(check_unreadable_state, str(tmp_path / "saved"), timeout=60)


@on_ranks(4, timeout=60)
def test_states_that_one_rank_lacks_fail_the_save():
    axes = (1, 2, 2)
    model, optimizer = sharded(axes)
    train(model, optimizer, range(1), axes)
    if dist.get_rank() == 3:
        del optimizer.state[model.blocks[0].down.weight]["exp_avg"]
    with pytest.raises(EngineError, match="expected every rank to come here"):
        fs.save("never", model, optimizer)
