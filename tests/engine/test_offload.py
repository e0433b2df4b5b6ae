"""State whose home is the host: the same bits, and the planned bytes in the planned place.

Here the host computes as well; tests/gpu has the copies between host and device.
"""

import os
from pathlib import Path

import pytest
import torch

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError, EngineError
from support.models import CASES, Chain, perturbed
from support.parity import assert_parity, assert_planned_events

KINDS = {
    "parameters": ("parameter shards", "parameter_shards"),
    "gradients": ("gradient shards", "gradient_shards"),
}


def check(name, settings):
    case = CASES[name]
    model = assert_parity(case.build, case.work, {**settings, "offload": "cpu"})
    assert_planned_events(model, 1)
    plan, stats = engine_of(model).plan, fs.memory_stats(model)
    rows = {row.name: row for row in plan.memory}
    for planned, measured in KINDS.values():
        assert rows[planned].place == "host"
        assert rows[planned].num_bytes == stats[measured]["now"]
    assert rows["slots"].place == "device"
    assert rows["slots"].num_bytes == stats["slots"]["now"] > 0
    assert rows["communication buffers"].num_bytes == stats["communication_buffers"]["now"]
    assert plan.peak_bytes["host"] > 0


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_state_trains_as_in_one_process(ranks, world_size, strategy):
    ranks(world_size)(check, "tied llama", {"strategy": strategy}, timeout=100)


def test_offloaded_state_trains_on_a_hybrid_mesh(ranks):
    ranks(4)(check, "chain", {"strategy": "hybrid_shard", "replicate": 2}, timeout=100)


def test_parts_of_the_state_alone_are_refused():
    with pytest.raises(ConfigError, match=r"offload: .*optimizer: device.*Write offload: cpu"):
        fs.shard(Chain(3), offload={"parameters": "cpu", "gradients": "cpu"})


def test_what_trains_is_not_on_disk_in_part():
    with pytest.raises(ConfigError, match=r"got parameters: nvme.*nothing trains may offload"):
        fs.shard(Chain(3), offload={"parameters": "nvme"})


def trained(folder, offload, strategy, checkpoint=None):
    """Losses of four steps of AdamW; the last two after loading what was saved after two."""
    model = perturbed(Chain(3)).double()
    if offload is not None:
        offload = {**offload, "folder": folder}
    fs.shard(model, strategy=strategy, transport="direct", offload=offload, poison=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        if step == 2:
            fs.save(folder + "/kept", model, optimizer, step=2)
            optimizer.state.clear()
            fs.load(folder + "/kept", model, optimizer)
        loss = model(torch.full((2, 12), step + 1.0, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, mapped_bytes(folder)


def mapped_bytes(folder):
    """Of files without a name in a folder, in this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{folder}/.fullshard-" in line:
            start, _, stop = line.split()[0].partition("-")
            found += int(stop, 16) - int(start, 16)
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_is_on_disk_trains_to_the_bit_as_in_memory(ranks, tmp_path, strategy):
    results = {}
    cases = {"memory": None, "optimizer": ("cpu", "nvme"), "all": ("nvme", "nvme")}
    for name, homes in cases.items():
        offload = homes and dict(zip(("parameters", "optimizer"), homes, strict=True))
        offload = offload and {**offload, "gradients": "cpu" if name == "optimizer" else "nvme"}
        (tmp_path / name).mkdir()
        results[name] = ranks(2)(trained, str(tmp_path / name), offload, strategy)
    (losses, nothing), (same, states), (also, everything) = (
        tuple(zip(*results[name], strict=True)) for name in cases
    )
    assert losses == same == also
    assert nothing == (0, 0)
    assert all(0 < some < all_ for some, all_ in zip(states, everything, strict=True))
    assert [p.name for p in (tmp_path / "all").iterdir()] == ["kept"]


def forwards_from_disk(folder, strategy):
    model = perturbed(Chain(3)).double().requires_grad_(requires_grad=False)
    x = torch.ones(4, 12, dtype=torch.float64)
    wanted = [model(x * at) for at in range(2)]
    offload = {"parameters": "nvme", "folder": folder}
    fs.shard(model, strategy=strategy, offload=offload, poison=True)
    rows = {row.name: row for row in engine_of(model).plan.memory}
    equal = all(torch.equal(model(x * at), wanted[at]) for at in range(2))
    shards, peak = rows["parameter shards"], engine_of(model).plan.peak_bytes["disk"]
    maps = Path("/proc/self/maps").read_text().count(f"{folder}/.fullshard-")
    return equal, shards.place, peak == shards.num_bytes > 0, maps > 0


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_that_does_not_train_is_read_from_disk_by_units(ranks, tmp_path, strategy):
    found = ranks(2)(forwards_from_disk, str(tmp_path), strategy)
    assert found == [(True, "disk", True, True)] * 2
    assert not list(tmp_path.iterdir())


def test_a_model_whose_shard_failed_half_way_is_refused(tmp_path, monkeypatch):
    calls = []

    def fallocate(*_):
        calls.append(0)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    model = Chain(3).requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match=r"No space left on device.*and start anew"):
        fs.shard(model, offload={"parameters": "nvme", "folder": str(tmp_path)})
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        EngineError, match=r"was cut with another model .*or by an fs.shard that failed"
    ):
        fs.shard(model)


@pytest.mark.parametrize(
    ("offload", "why"),
    [
        ({"folder": "x"}, "folder: expected nvme beside it"),
        ({"parameters": "cpu", "folder": "x"}, "folder: expected nvme beside it"),
        ({"parameters": "cpu", "optimizer": "cpu"}, "offload: expected cpu or nvme for each of"),
    ],
)
def test_what_would_have_no_effect_is_refused(offload, why):
    with pytest.raises(ConfigError, match=why):
        fs.shard(Chain(3).requires_grad_(requires_grad=False), offload=offload)


def test_a_folder_that_cannot_hold_the_files_is_named(tmp_path):
    model = Chain(3).requires_grad_(requires_grad=False)
    offload = {"parameters": "nvme", "folder": str(tmp_path / "nowhere")}
    with pytest.raises(ConfigError, match=r"state on nvme: expected .* in '.*nowhere'; No such"):
        fs.shard(model, offload=offload)


def test_an_evaluation_reads_offloaded_weights():
    model = Chain(3).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    wanted = model(x).detach()
    fs.shard(model, offload="cpu", poison=True)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
