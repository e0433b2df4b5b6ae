"""Checkpoints of mixtures whose experts have a mesh of their own: any mesh reads any other's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fullshard as fs
from support.experts import mixture_net, spread
from support.other_axes import LENGTH, WIDTH, whole_states
from support.scripts import differences

NUM_SAMPLES = 4
NUM_STEPS = 2  # before the save, and after the load
# Ranks in a group of experts, by the number of ranks; 0: plain parameters. Two ranks have three and
# two of the five experts, four ranks 2, 2, 1 and none.
GROUPS = {1: [0], 2: [2, 0], 4: [2, 4, 0]}


def sharded(group):
    model = mixture_net()
    if group:
        sizes = (dist.get_world_size() // group, group)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "expert"))
        spread(model, mesh["expert"])
    fs.shard(model, poison=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    """Mean loss over the global batch, which the ranks share."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(NUM_SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        model(batch.chunk(world)[rank]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def write_all(root):
    """Resumed training has the bits of uninterrupted training on the same mesh."""
    for group in GROUPS[dist.get_world_size()]:
        model, optimizer = sharded(group)
        train(model, optimizer, range(NUM_STEPS))
        place = Path(root) / f"{dist.get_world_size()}-{group}"
        fs.save(place, model, optimizer, step=NUM_STEPS)
        expected = whole_states(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, f"{place}.pt")
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
        uninterrupted = whole_states(model, optimizer)
        again, optimizer = sharded(group)
        fs.load(place, again, optimizer)
        train(again, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
        assert_equal(whole_states(again, optimizer), uninterrupted)


def read_all(root):
    """Each checkpoint under each mesh: the bits that were saved, then one process's steps."""
    alone = mixture_net()
    train_alone(alone)
    wanted = {name: value.detach() for name, value in alone.state_dict().items()}
    places = sorted(path for path in Path(root).iterdir() if path.is_dir())
    for place in places:
        for group in GROUPS[dist.get_world_size()]:
            model, optimizer = sharded(group)
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(float("nan"))
            assert fs.load(place, model, optimizer) == {"step": NUM_STEPS}
            saved = torch.load(f"{place}.pt", weights_only=True)
            assert_equal(whole_states(model, optimizer), saved)
            train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
            found = fs.full_state_dict(model, rank0_only=False)
            problems = list(differences(found, wanted, 1e-12))
            assert not problems, f"{place.name} -> {group}: {problems[0]}"
    return len(places)


def train_alone(model):
    """All steps of one process, with the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2 * NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(NUM_SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.timeout(400)
def test_any_mesh_reads_the_experts_of_any_other(ranks, tmp_path):
    for number in GROUPS:
        ranks(number)(write_all, str(tmp_path), timeout=200)
    written = sum(map(len, GROUPS.values()))
    for number in GROUPS:
        assert ranks(number)(read_all, str(tmp_path), timeout=200) == [written] * number
