"""Saving needs the planned memory in addition to shards; loading less than one tensor."""

import ctypes
import os
import re
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import fullshard as fs
from fullshard.bench.measurement import return_free_memory
from fullshard.data.tokenize import train_tokenizer
from fullshard.engine.engine import engine_of
from fullshard.formats.detect import open_source
from fullshard.formats.hugging_face import ExportSettings, Format, export_folder
from fullshard.models.build import save_model
from fullshard.models.config import config_from_settings, fit_to_tokenizer, quiet_libraries
from fullshard.models.generate import SamplingSettings
from fullshard.run.generation import Request, generate
from support.sizes import sizes_of
from support.text import seeded_text

MIB = 1 << 20
WIDE, NARROW, LAYERS = 2048, 1024, 4
TENSOR = 4 * WIDE * NARROW
PR_SET_THP_DISABLE, M_MMAP_THRESHOLD = 41, -3  # <sys/prctl.h>, <malloc.h>
SLACK = 6 * MIB  # buffers of reads and writes, and Python objects


def resident(kind):
    """Returns bytes of this process: VmRSS now, or VmHWM, the peak since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    (found,) = re.findall(rf"{kind}:\s+(\d+) kB", status)
    return int(found) << 10


def bytes_of(process):
    """Returns a process's anonymous memory, mapped shared memory, and its share of the latter."""
    status = Path(f"/proc/{process}/status").read_text()
    anonymous, mapped = re.search(
        r"RssAnon:\s+(\d+).*RssShmem:\s+(\d+)", status, re.DOTALL
    ).groups()
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    (part,) = re.findall(r"Pss_Shmem:\s+(\d+)", rollup)
    return tuple(int(found) << 10 for found in (anonymous, mapped, part))


def own_bytes():
    """Returns the anonymous memory of this process."""
    return bytes_of(os.getpid())[:1]


def own_and_joint_bytes(processes):
    """Returns this rank's memory, with its share of mapped pages, and that of all ranks.

    Neither depends on which rank touches a shared page first, or on when other forks of the same
    process end.
    """
    found = {process: bytes_of(process) for process in processes}
    anonymous, mapped, _ = found[os.getpid()]
    joint = sum(anonymous + part for anonymous, _, part in found.values())
    return anonymous + mapped // len(processes), joint


def forget_peak():
    """Resets the peak after freeing unused memory, which would distort the measurement."""
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")


def taken_by(work, measure):
    """Returns the peak increase of a measure, sampled on a thread while all ranks work."""
    peak = before = measure()
    dist.barrier()
    ended = Event()

    def sample():
        nonlocal peak
        if hasattr(os, "SCHED_OTHER"):  # preempts its rank, unlike other threads of ranks
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while not ended.wait(0.002):
            peak = tuple(map(max, peak, measure()))

    thread = Thread(target=sample)
    thread.start()
    work()
    ended.set()
    thread.join()
    peak = tuple(map(max, peak, measure()))
    dist.barrier()
    return tuple(most - first for most, first in zip(peak, before, strict=True))


def trained():
    """Returns layers of 8 MiB each after one update, and the optimizer."""
    layers = [nn.Linear(WIDE, NARROW, bias=False) for _ in range(LAYERS)]
    model = fs.shard(nn.ModuleList(layers), wrap=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in model:
        layer(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_and_measure(folder):
    """Returns the peak memory increase of a save, and the planned one."""
    model, optimizer = trained()
    fs.save(folder / "warm", model, optimizer)  # imports, and buffers that the next save reuses
    forget_peak()
    before = resident("VmRSS")
    fs.save(folder / "measured", model, optimizer, wait=False)
    fs.wait()
    return resident("VmHWM") - before, engine_of(model).plan.staging_bytes


def load_and_measure(folder):
    """Returns the peak memory increase of a load."""
    model, optimizer = trained()
    fs.load(folder / "warm", model, optimizer)
    forget_peak()
    before = resident("VmRSS")
    fs.load(folder / "measured", model, optimizer)
    return resident("VmHWM") - before


def test_saving_needs_the_staging_copy_and_loading_less_than_a_tensor(ranks, tmp_path):
    for taken, planned in ranks(2)(save_and_measure, tmp_path):
        assert planned == 3 * LAYERS * TENSOR // 2
        assert taken <= planned + TENSOR + SLACK
    assert max(ranks(3)(load_and_measure, tmp_path)) < TENSOR // 3  # a rank's part of one tensor


def read_and_measure(folder):
    """Returns the peak anonymous memory of reading a model of one matrix from a folder."""
    trained()  # imports
    return_free_memory()
    with torch.device("meta"):
        model = nn.Linear(2 * WIDE, 2 * NARROW, bias=False).requires_grad_(requires_grad=False)
    read = partial(fs.shard, model, weights=folder)
    (taken,) = taken_by(read, own_bytes)
    return taken


def test_reading_a_folder_needs_only_the_memory_of_the_weights(ranks, tmp_path):
    whole = torch.zeros(2 * NARROW, 2 * WIDE)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    (taken,) = ranks(1)(read_and_measure, tmp_path)
    assert whole.nbytes - SLACK <= taken <= whole.nbytes + SLACK


SIZES = sizes_of(512, 1408, 8, 8, layers=12, model_type="llama")
MATRIX, BLOCK = 4 * 512 * 1408, 4 * (4 * 512 * 512 + 3 * 512 * 1408)


def sharded_llama():
    """Returns the sharded model, its configuration and tokenizer."""
    quiet_libraries()
    tokenizer = train_tokenizer([seeded_text(200)], 300)
    config = config_from_settings({**SIZES, "vocab_size": 300})
    fit_to_tokenizer(config, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    fs.shard(model, transport="direct")  # shards are private to this process
    return model, config, tokenizer


def end_and_measure(folder):
    """Returns the peak increases of exporting a sharded model and of generating with it."""
    # Measurements differed by 3 MiB with huge pages, and by 5 MiB with matrices on the heap, which
    # returns only a part of free memory.
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB) == 1
    model, config, tokenizer = sharded_llama()
    export = partial(save_model, model, config, tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fullshard.models.build.MAX_FILE_BYTES", 4 * BLOCK)
        export(folder / "warm")
        taken = []  # in a process with other tests' free memory, the first may take more
        for _ in range(3):
            return_free_memory()
            taken += taken_by(partial(export, folder / "model"), own_bytes)
    del model, export
    request = Request(folder / "model", ("a",), SamplingSettings(2))
    generate(request, is_sharded=True)  # imports
    processes = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    work = partial(generate, request, is_sharded=True)
    return min(taken), *taken_by(work, partial(own_and_joint_bytes, processes))


@pytest.mark.long
def test_no_rank_holds_the_model_at_the_end_of_a_run_or_to_generate(ranks, tmp_path):
    whole = SIZES["num_hidden_layers"] * BLOCK
    for exported, generated, joint in ranks(2)(end_and_measure, tmp_path):
        assert exported <= 2 * MATRIX + SLACK
        assert generated <= whole / 2 + 2 * BLOCK + SLACK < 0.8 * whole
        assert joint <= whole + 4 * BLOCK + 2 * SLACK < 0.8 * 2 * whole


def save_llama(folder):
    model, _, _ = sharded_llama()
    fs.save(folder, model)


def export_and_measure(checkpoint, form):
    """Returns the peak increase of anonymous memory of a checkpoint's export."""

    def export(folder):
        with open_source(checkpoint) as source:
            export_folder(source, checkpoint.with_name(folder), ExportSettings(format=form))

    export(f"warm {form}")
    (taken,) = taken_by(partial(export, str(form)), own_bytes)
    return taken


def test_an_export_allocates_one_tensor_at_a_time(ranks, tmp_path):
    ranks(2)(save_llama, tmp_path / "saved")
    for form in Format:
        (taken,) = ranks(1)(export_and_measure, tmp_path / "saved", form)
        assert taken <= 2 * (MATRIX + SLACK) < SIZES["num_hidden_layers"] * BLOCK / 8, form
