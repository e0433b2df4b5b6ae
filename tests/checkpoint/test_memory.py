"""Saving takes what the plan says beside the shards; loading and exporting take one tensor."""

import re
from pathlib import Path
from threading import Event, Thread

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fullshard as fs
from fullshard.data.tokenizer import train_tokenizer
from fullshard.engine.engine import engine_of
from fullshard.models.build import save_model
from fullshard.models.config import config_from_settings, fit_to_tokenizer, quiet_libraries
from fullshard.models.generate import SamplingSettings
from fullshard.run.generation import Request, generate
from support.sizes import sizes_of
from support.text import seeded_text

MIB = 1 << 20
WIDE, NARROW, LAYERS = 2048, 1024, 8
TENSOR = 4 * WIDE * NARROW
SLACK = 6 * MIB  # buffers of reads and writes, and what Python makes meanwhile


def resident(kind):
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    (found,) = re.findall(rf"{kind}:\s+(\d+) kB", status)
    return int(found) << 10


def proportional_bytes():
    """Anonymous and shared memory of this process, a page of n processes as 1/n."""
    found = re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return sum(map(int, found)) << 10


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


SIZES = sizes_of(512, 1408, 8, 8, layers=12, model_type="llama")
MATRIX, BLOCK = 4 * 512 * 1408, 4 * (4 * 512 * 512 + 3 * 512 * 1408)


def end_and_measure(folder):
    """What exporting a sharded model took beside it, and generating from its folder."""
    quiet_libraries()
    tokenizer = train_tokenizer([seeded_text(200)], 300)
    config = config_from_settings({**SIZES, "vocab_size": 300})
    fit_to_tokenizer(config, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    fs.shard(model, transport="direct")  # shards are in this process alone
    save_model(model, config, tokenizer, folder / "warm", max_file_bytes=4 * BLOCK)
    forget_peak()
    before = resident("VmRSS")
    save_model(model, config, tokenizer, folder / "model", max_file_bytes=4 * BLOCK)
    exported = resident("VmHWM") - before
    del model
    request = Request(folder / "model", ("a",), SamplingSettings(2))
    generate(request, is_sharded=True)  # imports
    before, peak, ended = proportional_bytes(), [0], Event()

    def sample():
        while not ended.wait(0.002):
            peak[0] = max(peak[0], proportional_bytes())

    thread = Thread(target=sample)
    thread.start()
    generate(request, is_sharded=True)
    ended.set()
    thread.join()
    return exported, peak[0] - before


def test_no_rank_holds_the_model_at_the_end_of_a_run_or_to_generate(ranks, tmp_path):
    whole = SIZES["num_hidden_layers"] * BLOCK
    for exported, generated in ranks(2)(end_and_measure, tmp_path):
        assert exported <= 2 * MATRIX + SLACK
        assert generated <= whole / 2 + 2 * BLOCK + SLACK < 0.8 * whole
