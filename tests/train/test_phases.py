"""The planned memory of each phase of a run equals the measured live bytes and files."""

import json
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from benchmarks import memory_rank
from benchmarks.memory import MemoryCase
from benchmarks.memory_rank import live_peak_bytes

import fullshard as fs
from fullshard.checkpoint.format import Kind
from fullshard.config.load import load_config
from fullshard.models.build import given_model_config
from fullshard.outlook.memory import WeightsSource
from fullshard.outlook.predict import Machine
from fullshard.recipes.base import Seat
from fullshard.recipes.pretrain.recipe import sharded
from fullshard.run.optim import build_optimizer
from fullshard.run.outlook import look_at, storage_of

TOLERANCE = 0.03

pytestmark = pytest.mark.timeout(300)
CPU = torch.device("cpu")


def config_of(recompute, folder):
    # In 16 bits the peak of forward is lower than that of backward.
    compute = "bfloat16" if recompute == "block" else "float32"
    words = MemoryCase("llama", "full_shard", recompute, compute).words()
    words = [w for w in words if "max_seq_length" not in w] + ["max_seq_length=128"]
    if folder is not None:
        words = [*(w for w in words if not w.startswith("model.")), f"model={folder}"]
    return load_config(None, words).config


def build(config):
    return sharded(config, given_model_config(config), Seat(0, 1, CPU))


def forward(config):
    """Returns a model that has computed a loss, but no gradient."""
    (model, objective), training = build(config), config.training
    ids = torch.randint(2000, (training.per_device_train_batch_size, training.max_seq_length))
    loss = objective(model, {"input_ids": ids, "labels": ids.clone()})
    return model, loss


def resume(config, checkpoint):
    model, _ = build(config)
    optimizer = build_optimizer(model, config.training)
    fs.load(checkpoint, model, optimizer)
    return model, optimizer


def measured(recompute, folder, checkpoint):
    """Returns live bytes on this rank by phase, and on the first rank the planned ones."""
    config = config_of(recompute, folder)
    with patch.object(memory_rank, "NUM_STEPS", 1):
        fs.save(checkpoint, *memory_rank.train(config))
    found = {
        "built": live_peak_bytes(lambda: build(config)),
        "forward": live_peak_bytes(lambda: forward(config)),
        "resumed": live_peak_bytes(lambda: resume(config, checkpoint)),
    }
    if dist.get_rank() > 0:
        return found
    storage = storage_of(config)
    outlook = look_at(config, dist.get_world_size(), Machine(None, None))
    planned = {one.name: one for one in outlook.phases(storage)}
    shard = planned["shard"].device
    return found | {
        "source": storage.source,
        "checkpoint": outlook.plan.checkpoint_bytes,
        "planned": {
            "built": max(shard, planned["load"].device + planned["load"].host),
            "forward": shard + outlook.forward_bytes,
            "resumed": planned["resume"].device,
        },
    }


def stored_bytes(checkpoint):
    """Returns bytes of all tensors of model and optimizer from the headers of their files."""
    total = 0
    for kind in (Kind.MODEL, Kind.OPTIMIZER):
        for path in checkpoint.glob(f"{kind}-*.safetensors"):
            with path.open("rb") as file:
                table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            table.pop("__metadata__")
            total += sum(end - begin for begin, end in (e["data_offsets"] for e in table.values()))
    return total


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("recompute", "source"),
    [
        pytest.param("none", WeightsSource.INITIAL, marks=pytest.mark.long),
        ("block", WeightsSource.FOLDER),
    ],
)
def test_each_phase_needs_the_planned_memory(ranks, tmp_path, recompute, source):
    folder = None
    if source is WeightsSource.FOLDER:
        from transformers import AutoModelForCausalLM

        folder = str(tmp_path / "model")
        whole = AutoModelForCausalLM.from_config(given_model_config(config_of("none", None)))
        whole.save_pretrained(folder, max_shard_size="1MB")  # torch counts mapped files too
    found = ranks(2)(measured, recompute, folder, tmp_path / "checkpoint", timeout=240)
    assert found[0]["source"] is source
    for phase, planned in found[0]["planned"].items():
        most = max(one[phase] for one in found)
        print(f"{phase}: planned {planned:,}, measured {most:,}, {planned / most - 1:+.2%}")
        assert planned == pytest.approx(most, rel=TOLERANCE), phase


@pytest.mark.long
def test_a_checkpoint_needs_the_planned_disk_space(ranks, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    planned = ranks(2)(measured, "none", None, checkpoint, timeout=240)[0]["checkpoint"]
    assert stored_bytes(checkpoint) == planned
    on_disk = sum(file.stat().st_size for file in checkpoint.iterdir())
    print(f"tensors {planned:,}, on disk {on_disk:,}, {on_disk / planned - 1:+.2%}")
    assert planned <= on_disk <= 1.02 * planned
