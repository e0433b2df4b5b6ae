"""Unusual states of models, optimizers and callers are neither lost nor mixed up."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import saving
from fullshard.checkpoint.read import remove, superfluous
from support.ranks import on_ranks
from support.scripts import error_of


class Odd(nn.Module):
    """Non-contiguous buffers and parameters, and a module with its own state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.free = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("across", torch.arange(12.0).view(3, 4).t())
        self.counter = Counter()

    def forward(self, x):
        return self.second(self.first(x)) + self.free.weight.sum() * 0


class Counter(nn.Module):
    seen = 3

    def get_extra_state(self):
        return torch.tensor([self.seen, 7])

    def set_extra_state(self, state):
        self.seen = int(state[0])


def odd(**config):
    model = Odd()
    fs.shard(model, ignore=["free"], **config)
    return model


def restores_all(folder):
    model = odd()
    wanted = {
        name: value.clone() for name, value in fs.full_state_dict(model, rank0_only=False).items()
    }
    fs.save(folder, model)
    model.counter.seen = 0
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model.across.zero_()
    fs.load(folder, model)
    found = fs.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert model.counter.seen == 3
    assert not model.across.is_contiguous()


def test_buffers_ignored_parameters_and_extra_states_come_back(ranks, tmp_path):
    ranks(2)(restores_all, str(tmp_path / "c"))


class Blocks(torch.optim.SGD):
    """States that are neither sliced nor scalar: one value per block, and one per rank."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                own = float(10 * dist.get_rank() + 1)
                self.state[param]["scales"] = torch.full((2,), own)
                self.state[param]["one"] = torch.full((1,), own)


def opaque(folder):
    model = odd()
    optimizer = Blocks(
        [p for n, p in model.named_parameters() if "free" not in n], lr=0.1, momentum=0.9
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    fs.save(folder, model, optimizer)
    saved = {id(p): dict(s) for p, s in optimizer.state.items()}
    optimizer.state.clear()
    fs.load(folder, model, optimizer)
    for param, states in optimizer.state.items():
        assert states.keys() == saved[id(param)].keys()
        for key in ("scales", "one"):
            assert torch.equal(states[key], saved[id(param)][key]), key
    other = odd(strategy="no_shard")
    params = [p for n, p in other.named_parameters() if "free" not in n]
    return [error_of(lambda: fs.load(folder, other, Blocks(params, lr=0.1, momentum=0.9)))]


def opaque_on_three(folder):
    model = odd()
    params = [p for n, p in model.named_parameters() if "free" not in n]
    return error_of(lambda: fs.load(folder, model, Blocks(params, lr=0.1, momentum=0.9)))


def test_states_that_cannot_be_sliced_are_saved_per_rank(ranks, tmp_path):
    folder = str(tmp_path / "c")
    for (said,) in ranks(2)(opaque, folder):
        assert "expected the same strategy, because optimizer/" in said
    for said in ranks(3)(opaque_on_three, folder):
        assert "expected 2 ranks" in said


def values(folder):
    model = odd()
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    mixed = {1: "one", "1": "text", "$rank": 5}
    fs.save(folder, model, nested=state, mixed=mixed, random="mine", own=dist.get_rank())
    found = fs.load(folder, model)
    assert torch.equal(found["nested"]["a.b"], torch.ones(2))
    assert torch.equal(found["nested"]["a"]["b"], torch.zeros(2))
    assert found["mixed"] == mixed
    assert (found["random"], found["own"]) == ("mine", dist.get_rank())


def test_similar_names_and_reserved_words_are_not_confused(ranks, tmp_path):
    ranks(2)(values, str(tmp_path / "c"))


def groups(folder):
    model = odd()
    weights, biases = [model.first.weight, model.second.weight], [model.first.bias]
    optimizer = torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1)
    fs.save(folder, model, optimizer)
    with torch.no_grad():
        model.first.weight.add_(1.0)
    before = model.first.weight.to_local().clone()
    texts = [
        error_of(lambda: fs.load(folder, model, torch.optim.SGD(weights + biases, lr=0.1))),
        error_of(lambda: fs.load(folder, model, torch.optim.SGD(weights, lr=0.1))),
        error_of(lambda: fs.load(folder, model, torch.optim.Adam(weights, lr=0.1))),
    ]
    assert torch.equal(model.first.weight.to_local(), before)
    return texts


def test_an_optimizer_of_another_kind_or_other_groups_changes_nothing(ranks, tmp_path):
    one, two = ranks(2)(groups, str(tmp_path / "c"))
    assert one == two
    assert all(
        "expected the groups of the checkpoint, which have 2, 1 parameters" in t for t in one[:2]
    )
    assert "expected the states of Adam; it has SGD" in one[2]


def over(folder):
    model = odd()
    root = Path(folder)
    fs.save(root / "steps", model, step=1)
    os.chdir(root)
    link = root / "link"
    if dist.get_rank() == 0:
        link.symlink_to(root / "real")
    dist.barrier()
    fs.save("link", model)
    fs.save("link", model, wait=False)
    os.chdir("/")
    fs.wait()
    dist.barrier()
    assert link.is_symlink()
    assert (root / "real" / "COMPLETE.json").is_file()
    return [
        error_of(lambda: fs.save(root / "steps", model)),
        error_of(lambda: fs.save(root / "file", model)),
        error_of(lambda: fs.save(root / "steps", model, step=-1)),
    ]


def test_files_that_are_no_checkpoint_are_never_replaced(ranks, tmp_path):
    (tmp_path / "file").write_text("mine")
    for first, second, third in ranks(2)(over, str(tmp_path)):
        assert "it contains other files, which would be lost" in first
        assert "it contains other files, which would be lost" in second
        assert "expected a step >= 0, an integer or None; got -1" in third
    assert (tmp_path / "steps" / "step-00000001" / "COMPLETE.json").is_file()
    assert (tmp_path / "file").read_text() == "mine"


def many(folder):
    model = odd()
    for step in (10, 20, 30):
        fs.save(folder, model, step=step)
    fs.save(folder, model, step=40, wait=False)
    return fs.load(folder, model)["step"]


def test_pruning_counts_from_the_saved_step_and_keeps_other_files(ranks, tmp_path):
    assert ranks(2)(many, str(tmp_path)) == [40, 40]
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "precious.txt").write_text("mine")
    (tmp_path / ".step-00000010.saving-abc").mkdir()
    found = superfluous(tmp_path, 1, newest=20)
    remove(found)
    assert sorted(entry.path.name for entry in found) == [
        ".step-00000010.saving-abc",
        "step-00000010",
    ]
    left = sorted(path.name[-2:] for path in tmp_path.iterdir())
    assert left == ["05", "20", "30", "40"]


def from_meta(folder):
    model = odd(strategy="no_shard")
    fs.save(folder, model)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    full = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.manual_seed(3)
    for param in full.parameters():
        nn.init.normal_(param)
    fs.save(folder + "2", fs.shard(full))
    torch.manual_seed(4)
    fs.shard(empty, weights=folder + "2")
    found, wanted = (fs.full_state_dict(m, rank0_only=False) for m in (empty, full))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_on_meta_loads_its_weights_from_a_checkpoint(ranks, tmp_path):
    ranks(2)(from_meta, str(tmp_path / "c"))


@pytest.mark.parametrize("wait", [True, False])
def test_one_process_without_a_group_saves_and_loads(tmp_path, wait):
    model = fs.shard(nn.Linear(4, 4))
    wanted = model.weight.detach().clone()
    fs.save(tmp_path / "c", model, wait=wait, note="hello")
    with torch.no_grad():
        model.weight.zero_()
    assert fs.load(tmp_path / "c", model) == {"note": "hello", "step": None}
    assert torch.equal(model.weight.to_local().view(4, 4), wanted.to_local().view(4, 4))


def test_a_save_copies_nothing_while_the_one_before_it_is_written(tmp_path, monkeypatch):
    model, write = fs.shard(nn.Linear(4, 4)), saving.write_tensors
    monkeypatch.setattr(saving, "write_tensors", lambda *of: time.sleep(0.1) or write(*of))
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        fs.save(tmp_path, model, step=step, wait=False)
    fs.wait()
    for folder in tmp_path.glob("step-*"):
        step = fs.load(folder, model)["step"]
        assert torch.equal(model.weight.to_local(), torch.full((16,), step).view(4, 4))
    assert len(list(tmp_path.glob("step-*"))) == 2


@on_ranks(1)  # this pool has few other objects
def test_staging_copies_are_freed_with_their_model(tmp_path):
    def copies():
        """Counts tensors with the size of the weight."""
        gc.collect()
        return sum(type(o) is torch.Tensor and o.numel() == 31 * 37 for o in gc.get_objects())

    before = copies()
    model = fs.shard(nn.Linear(31, 37))
    for step in range(2):
        fs.save(tmp_path / "c", model, step=step, wait=False)
    fs.wait()
    with_model = copies()
    del model
    assert copies() == before < with_model


class Keeps(torch.optim.SGD):
    """States that alias the last gradients, and at first each other."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            own = self.state[param]
            own["last"] = param.grad
            own["slow"], own["fast"] = own.get("fast"), torch.full_like(param, len(own))
            own["slow"] = own["fast"] if own["slow"] is None else own["slow"]


def local_of(state):
    return state.to_local() if hasattr(state, "to_local") else state


def loads_beside_gradients(folder, settings):
    """Saves, steps, loads, and accumulates into existing gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fs.shard(model, ignore=["1"], **settings)
    optimizer = Keeps(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((1, 8), step + 1.0)).sum().backward()
        optimizer.step()
        if step == 1:
            fs.save(folder, model, optimizer)
            saved = [
                {key: local_of(value).clone() for key, value in optimizer.state[param].items()}
                for param in model.parameters()
            ]
        optimizer.zero_grad()
    optimizer.state.clear()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()  # its states share memory with each other, and with gradients
    fs.load(folder, model, optimizer)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    for param, wanted in zip(model.parameters(), saved, strict=True):
        for key, value in wanted.items():
            assert torch.equal(local_of(optimizer.state[param][key]), value), key


@pytest.mark.parametrize("settings", [{"transport": "direct"}, {"strategy": "no_shard"}], ids=str)
def test_a_loaded_state_shares_no_memory_with_gradients_or_other_states(ranks, tmp_path, settings):
    ranks(2)(loads_beside_gradients, str(tmp_path / "c"), settings)
