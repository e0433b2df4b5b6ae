"""Saving takes what the plan says beside the shards, loading takes one tensor."""

import re
from pathlib import Path

import torch
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of

MIB = 1 << 20
WIDE, NARROW, LAYERS = 2048, 1024, 8
TENSOR = 4 * WIDE * NARROW
SLACK = 6 * MIB  # buffers of reads and writes, and what Python makes meanwhile


def resident(kind):
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    (found,) = re.findall(rf"{kind}:\s+(\d+) kB", status)
    return int(found) << 10


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def trained():
    """Layers of 8 MiB each, after one update."""
    layers = [nn.Linear(WIDE, NARROW, bias=False) for _ in range(LAYERS)]
    model = fs.shard(nn.ModuleList(layers), wrap=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in model:
        layer(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_and_measure(folder):
    """What saving took at most beside what was there, and what the plan says."""
    model, optimizer = trained()
    fs.save(folder / "warm", model, optimizer)  # imports, and what is kept for the next save
    forget_peak()
    before = resident("VmRSS")
    fs.save(folder / "measured", model, optimizer, wait=False)
    fs.wait()
    return resident("VmHWM") - before, engine_of(model).plan.staging_bytes


def load_and_measure(folder):
    """What loading took at most beside what is there afterwards."""
    model, optimizer = trained()
    fs.load(folder / "warm", model, optimizer)
    forget_peak()
    fs.load(folder / "measured", model, optimizer)
    return resident("VmHWM") - resident("VmRSS")


def test_saving_takes_the_staging_copy_and_loading_one_tensor(ranks, tmp_path):
    for taken, planned in ranks(2)(save_and_measure, tmp_path):
        assert planned == 3 * LAYERS * TENSOR // 2
        assert taken <= planned + TENSOR + SLACK
    assert max(ranks(3)(load_and_measure, tmp_path)) <= TENSOR + SLACK
