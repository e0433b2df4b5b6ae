"""A model on meta is sharded under a memory limit below the size of the model.

Four new processes each limit their private memory to their current use plus their planned share,
the slots, one block and some slack, and shard a model whose weights are more than twice as large.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from support.sizes import sizes_of

WORLD_SIZE = 4
SLACK_BYTES = 24 * 2**20  # one matrix twice, thread stacks, message buffers
SIZES = sizes_of(512, 1408, 8, 8, layers=28, vocab_size=2048)
LARGE = 2**16  # larger allocations are separate mappings, which end when they are freed
HELD_ROWS = ("parameter shards", "gradient shards", "slots", "gradient slots", "buffers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux"),
]


def make(num_layers=SIZES["num_hidden_layers"]):
    """Builds the seeded model; it is frozen, so that weights need most of the memory."""
    import torch
    import transformers

    torch.manual_seed(3)
    sizes = {**SIZES, "num_hidden_layers": num_layers}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)


def make_on_meta(num_layers=SIZES["num_hidden_layers"]):
    import torch

    with torch.device("meta"):
        return make(num_layers)


# ---- on a rank -----------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(extra_bytes):
    """Context that limits the additional private memory."""
    status = Path("/proc/self/status").read_text().split("VmData:")[1]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(status.split()[0]) * 1024 + extra_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def wrong_shards(model, folder):
    """Returns parameters whose shard differs from the slice in the files."""
    import torch
    from safetensors import safe_open

    import fullshard as fs

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wrong = []
    for name, param in model.named_parameters():
        place = fs.sharding(param)
        with safe_open(folder / index[name], framework="pt") as file:
            whole = file.get_tensor(name).view(-1)
            if not torch.equal(param.to_local().view(-1), whole[place.start : place.stop]):
                wrong.append(name)
    return wrong


def stream(folder, extra_bytes):
    """Shards a model for inference to disk, with memory only for its slots."""
    import fullshard as fs

    model = make_on_meta().requires_grad_(requires_grad=False)
    offload = {"parameters": "nvme", "folder": str(folder.parent)}
    with limited(extra_bytes):
        fs.shard(model, weights=folder, offload=offload)
    return wrong_shards(model, folder)


def step(folder, home, extra_bytes):
    """Runs a training step with all state in one home under a limit; returns the missing memory."""
    import torch

    import fullshard as fs

    model = make_on_meta().requires_grad_(requires_grad=True)
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), home)
    offload = {**kinds, "folder": str(folder.parent)} if home == "nvme" else kinds
    tokens = torch.arange(8)[None]
    try:
        with limited(extra_bytes):
            fs.shard(model, weights=folder, offload=offload)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    except (MemoryError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def run_rank(rank, store, folder):
    """Runs all trials on one rank."""
    import torch
    import torch.distributed as dist

    import fullshard as fs

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),  # the other ranks wait for a rank that lacks memory
    )
    fs.shard(make_on_meta(2))  # process groups, imports
    plan = fs.plan(make_on_meta(), world_size=WORLD_SIZE)
    rows = {row.name: row.num_bytes for row in plan.memory}
    block_bytes = max(4 * unit.numel for unit in plan.units)
    extra = sum(rows[name] for name in HELD_ROWS) + block_bytes + SLACK_BYTES
    found: dict[str, Any] = {"extra_bytes": extra, "model_bytes": 4 * plan.num_parameters}
    try:
        with limited(extra):
            make()
    except (MemoryError, RuntimeError) as error:
        found["unsharded"] = str(error) or type(error).__name__
    for name, weights in (("initialised", None), ("read", folder)):
        dist.barrier()
        torch.manual_seed(3)
        model = make_on_meta()
        with limited(extra):
            fs.shard(model, weights=weights)
        found[name] = wrong_shards(model, folder)
        del model
    found["streamed"] = stream(folder, rows["slots"] + block_bytes + SLACK_BYTES)
    plan = fs.plan(make_on_meta().requires_grad_(requires_grad=True), world_size=WORLD_SIZE)
    rows = {row.name: row.num_bytes for row in plan.memory}
    beside = ("slots", "gradient slots", "communication buffers", "buffers")
    few = sum(rows[name] for name in beside) + block_bytes + 2 * SLACK_BYTES  # autograd's threads
    found["state_bytes"] = sum(rows.values()) - sum(rows[name] for name in beside)
    found["few_bytes"] = few
    dist.barrier()
    found["trained_on_disk"] = step(folder, "nvme", few)
    dist.barrier()
    found["trained_on_host"] = step(folder, "cpu", few)
    dist.destroy_process_group()
    return found


# ---- in the test ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns each rank's results."""
    folder = tmp_path_factory.mktemp("meta_memory")
    make().save_pretrained(folder / "model", max_shard_size="20MB")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(LARGE), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder / "store"), str(folder / "model")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        shown = [rank.communicate(timeout=360) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = [err for rank, (_, err) in zip(ranks, shown, strict=True) if rank.returncode]
    assert not errors, "\n".join(errors)
    return [json.loads(out.splitlines()[-1]) for out, _ in shown]


def test_the_whole_model_does_not_fit_into_the_limit(found):
    for rank in found:
        assert 2 * rank["extra_bytes"] < rank["model_bytes"]
        assert "memory" in rank["unsharded"].lower()


def test_a_model_on_meta_is_initialised_within_the_limit(found):
    assert [rank["initialised"] for rank in found] == [[]] * WORLD_SIZE


def test_a_folder_is_read_within_the_limit(found):
    assert [rank["read"] for rank in found] == [[]] * WORLD_SIZE


def test_a_model_streamed_from_disk_needs_only_its_slots(found):
    assert [rank["streamed"] for rank in found] == [[]] * WORLD_SIZE


def test_state_on_disk_trains_within_a_limit_that_state_in_memory_does_not_fit_into(found):
    for rank in found:
        assert 2 * rank["few_bytes"] < rank["state_bytes"]
        assert rank["trained_on_disk"] == ""
        assert "memory" in rank["trained_on_host"].lower()


if __name__ == "__main__":
    print(json.dumps(run_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))))
