"""Offloaded state gives the same bits, with the planned bytes in the planned place.

Here the host also computes; tests/gpu covers copies between host and device.
"""

import contextlib
import copy
import faulthandler
import os
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.engine.disk import Room
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError, EngineError
from support.grid import STRATEGIES, chequered
from support.models import CASES, Chain, perturbed
from support.parity import assert_parity, assert_planned_events
from support.ranks import on_ranks
from support.scripts import error_of

KINDS = {
    "parameters": ("parameter shards", "parameter_shards"),
    "gradients": ("gradient shards", "gradient_shards"),
}


@pytest.mark.short(4)
@pytest.mark.parametrize(
    ("world_size", "name", "settings"),
    [
        *((2, "tied llama", {"strategy": strategy}) for strategy in STRATEGIES),
        (4, "chain", {"strategy": "hybrid_shard", "replicate": 2}),
        *((1, "tied llama", {"strategy": strategy}) for strategy in STRATEGIES),
    ],
    ids=str,
)
@on_ranks("world_size", timeout=100)
def test_offloaded_state_trains_as_in_one_process(name, settings):
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


def adapted():
    """Blocks with two flat buffers: trained and frozen parameters."""
    model = CASES["chain"].build()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    return model


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("transport", "offload"), chequered(["direct", "c10d"], ["cpu", "nvme"]))
@on_ranks("world_size")
def test_units_of_several_offloaded_buffers_are_gathered_by_messages(transport, offload):
    settings = {"transport": transport, "offload": offload, "wrap": ["Block"]}
    model = assert_parity(adapted, CASES["chain"].work, settings)
    assert engine_of(model).transport.name == transport
    assert any(len(unit.gathered) > 1 for unit in engine_of(model).units)
    assert_planned_events(model, 1)


def trained(folder, offload, strategy, checkpoint=None):
    """Losses of four steps of AdamW, the last two after loading the save from after two."""
    model = perturbed(Chain(3)).double()
    if offload is not None:
        offload = {**offload, "folder": folder}
    transport = "direct" if offload is None else "auto"  # full shards, gathered in memory
    fs.shard(model, strategy=strategy, transport=transport, offload=offload, poison=True)
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
    steps = {state["step"].item() for state in optimizer.state.values()}
    assert steps == {4}, "steps of shards without elements were not counted"
    return losses, mapped_bytes(folder)


def mapped_bytes(folder):
    """Returns the mapped bytes of unnamed files in a folder, in this process."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            if str(link.readlink()).startswith(f"{folder}/.fullshard-"):
                stat = link.stat()
                found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


@pytest.mark.short(1)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_training_from_disk_is_bit_identical_to_memory(ranks, tmp_path, strategy):
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


def hooked(params):
    """AdamW with hooks that use gradients, which an update in turns would hide."""
    optimizer = torch.optim.AdamW(params)

    def clamp(optimizer, *_):
        for param in optimizer.param_groups[0]["params"]:
            param.grad.clamp_(-1e-6, 1e-6)

    optimizer.register_step_pre_hook(clamp)
    return optimizer


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "nadam": torch.optim.NAdam,  # its states include a product over steps
    "hooked": hooked,
    "adafactor": torch.optim.Adafactor,  # mixes elements, so takes no turns
}


def large(folder, name, settings):
    """Parameters and other states after three steps; shards begin anywhere in a page.

    A rank without elements of a bias counts its steps too, because a loading rank may get some.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70_001), torch.nn.Linear(70_001, 35))
    offload = None if folder is None else {**dict.fromkeys(KINDS, "nvme"), "folder": folder}
    offload = offload and {**offload, "optimizer": "nvme"}
    transport = "direct" if offload is None else "auto"
    fs.shard(model, wrap=["Linear"], transport=transport, offload=offload, **settings)
    optimizer = OPTIMIZERS[name](model.parameters())
    for at in range(4):
        x = torch.linspace(-1, 1, 4 * 33).view(4, 33) * (at + 1)
        model(x).square().sum().mul(1e-4).backward()
        if at != 1:  # the second step has two backwards
            fs.clip_grad_norm_(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    states = [state for of in optimizer.state.values() for state in of.values()]
    others = [torch.as_tensor(state) for state in states if not hasattr(state, "record")]
    assert others
    return [*(p.to_local().clone() for p in model.parameters()), *others]


def first_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {"strategy": "full_shard", "param_dtype": "bf16"}),
        ("hooked", {"strategy": "full_shard"}),
        ("fused", {"strategy": "no_shard"}),
        ("nadam", {"strategy": "full_shard"}),
        ("adafactor", {"strategy": "no_shard"}),
    ],
)
@on_ranks(2, timeout=100)
def test_updating_large_shards_on_disk_in_turns_is_bit_identical(tmp_path, name, settings):
    kind = type(OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]))
    with mock.patch.object(kind.step, "__wrapped__", wraps=kind.step.__wrapped__) as step:
        on_disk = large(str(tmp_path), name, settings)
    assert all(map(torch.equal, on_disk, large(None, name, settings)))
    turns = [call for call in step.call_args_list if hasattr(first_of(call.args[0]), "record")]
    assert len(turns) > 3 if name not in ("hooked", "adafactor") else not turns
    dist.barrier()
    assert not list(tmp_path.iterdir())


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
def test_a_model_for_inference_is_read_from_disk_by_units(ranks, tmp_path, strategy):
    found = ranks(2)(forwards_from_disk, str(tmp_path), strategy)
    assert found == [(True, "disk", True, True)] * 2
    assert not list(tmp_path.iterdir())


def test_a_model_whose_sharding_failed_half_way_is_refused(tmp_path, monkeypatch):
    calls = []

    def fallocate(*_):
        calls.append(0)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    model = Chain(3).requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match=r"No space left on device.*and start again"):
        fs.shard(model, offload={"parameters": "nvme", "folder": str(tmp_path)})
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        EngineError, match=r"was cut with another model .*or by an fs.shard that failed"
    ):
        fs.shard(model)


CPU = {"parameters": "cpu", "gradients": "cpu"}


@pytest.mark.parametrize(
    ("trains", "offload", "why"),
    [
        (True, CPU, r"offload: .*optimizer: device.*Write offload: cpu"),
        (
            True,
            {"parameters": "nvme"},
            r"got parameters: nvme.*without trained parameters may offload",
        ),
        (False, {"folder": "x"}, "folder: no effect without nvme"),
        (False, {"parameters": "cpu", "folder": "x"}, "folder: no effect without nvme"),
        (
            False,
            {"parameters": "cpu", "optimizer": "cpu"},
            "offload: expected cpu or nvme for each of",
        ),
    ],
)
def test_offload_in_part_or_without_effect_is_refused(trains, offload, why):
    with pytest.raises(ConfigError, match=why):
        fs.shard(Chain(3).requires_grad_(requires_grad=trains), offload=offload)


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


def stepped(folder, *, num_steps=3):
    """Steps a model on disk, or in memory, in inference mode; returns it and its optimizer."""
    torch.manual_seed(0)
    model = perturbed(Chain(3))
    kinds = dict.fromkeys((*KINDS, "optimizer"), "nvme")
    fs.shard(model, offload=folder and {**kinds, "folder": str(folder)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        model(torch.ones(2, 12)).sum().backward()
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_steps_in_inference_mode_write_to_disk(tmp_path):
    (on_disk, _), (in_memory, _) = stepped(tmp_path), stepped(None)
    for one, other in zip(on_disk.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_gradients_on_disk_are_zeroed_only_between_writes(tmp_path, monkeypatch):
    """A mapping and a direct write of the same file are mutually exclusive."""
    model, _ = stepped(tmp_path, num_steps=1)
    under_way, seen = [], []
    write, zero = Room.write, torch.Tensor.zero_

    def slow(*args):
        under_way.append(args)
        time.sleep(0.05)
        write(*args)
        under_way.pop()

    def zeroed(tensor):
        seen.append(len(under_way))
        return zero(tensor)

    model(torch.ones(2, 12)).sum().backward()
    for block in model.blocks:
        block.up.weight.grad = None  # other parameters of its unit keep theirs
    monkeypatch.setattr(Room, "write", slow)
    monkeypatch.setattr(torch.Tensor, "zero_", zeroed)
    model(torch.ones(2, 12)).sum().backward()
    assert seen == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # issued by jax
def test_a_forked_process_leaves_state_on_disk_alone(tmp_path):
    model, optimizer = stepped(tmp_path)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    before = [moment.clone() for moment in moments]
    if (pid := os.fork()) == 0:
        moments.clear()
        optimizer.state.clear()
        with torch.no_grad():  # on its own threads
            is_finite = bool(model(torch.ones(2, 12)).isfinite().all())
        os._exit(not is_finite)
    assert os.waitpid(pid, 0)[1] == 0
    if (pid := os.fork()) == 0:
        for param in model.parameters():
            param.grad = param.detach().clone()
        step = torch.inference_mode()(optimizer.step)
        os._exit("forked process" not in error_of(step))
    assert os.waitpid(pid, 0)[1] == 0
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        for moment in moments:
            moment.to_local().zero_()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGSEGV
    assert all(map(torch.equal, moments, before))
    assert all(moment.any() for moment in before)


@pytest.mark.parametrize("moved", [OSError(5, "Input/output error"), 0])
def test_a_disk_that_fails_in_a_step_is_named(tmp_path, monkeypatch, moved):
    model, _ = stepped(tmp_path, num_steps=1)

    def preadv(*_):
        if isinstance(moved, OSError):
            raise moved
        return moved

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(EngineError, match=r"state on nvme: expected preadv of .*; (Input|the fil)"):
        model(torch.ones(2, 12))


class Skips(nn.Module):
    """Layers of which one is skipped."""

    left: int | None = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(5)])

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = x if at == self.left else torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("left", [1, 3, 4])
@pytest.mark.parametrize("transport", ["c10d", "shared"])
@on_ranks(2)
def test_peers_gather_a_unit_on_disk_that_a_rank_skips(transport, left):
    """Each gather begins late: after the read of this rank's part, or with its next call."""
    torch.manual_seed(0)
    model, x = Skips().double(), torch.randn(4, 12, dtype=torch.float64)
    one = copy.deepcopy(model)
    fs.shard(model, wrap=["Linear"], offload="nvme", transport=transport, poison=True)
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), one(x))
        dist.barrier()  # no gather begins while a rank waits here
        model(x).square().mean().backward()
        dist.barrier()
        model.left = one.left = left if dist.get_rank() and not step else None
