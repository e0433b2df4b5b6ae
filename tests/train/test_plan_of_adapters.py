"""The plan of a run that trains only adapters, compared with the memory of its ranks."""

import json

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory import MemoryCase
from benchmarks.memory_rank import live_peak_bytes, train
from transformers import AutoModelForCausalLM

import fullshard as fs
from fullshard.cli.app import invoke
from fullshard.config.load import load_config
from fullshard.models.build import given_model_config
from fullshard.outlook.predict import Machine
from fullshard.planner.units import Place
from fullshard.run.outlook import look_at

RANK, WIDTH, INNER, NUM_LAYERS = 4, 128, 344, 4
ADAPTERS = NUM_LAYERS * RANK * ((WIDTH + WIDTH) + (INNER + WIDTH))  # of q_proj and down_proj


def words_of(folder):
    words = [w for w in MemoryCase("llama", "full_shard", "none").words() if "model." not in w]
    lora = ["lora.target_modules=[q_proj,down_proj]", f"lora.r={RANK}"]
    return [*words, f"model={folder}", *lora]


def held(folder):
    """Returns state after steps and the peak on this rank, and the planned ones."""
    config = load_config(None, words_of(folder)).config
    kept = []
    peak = live_peak_bytes(lambda: kept.append(train(config)))
    model, optimizer = kept[0]
    states = [value for state in optimizer.state.values() for value in state.values()]
    outlook = look_at(config, dist.get_world_size(), Machine(None, None))
    return {
        "stats": {kind: row["now"] for kind, row in fs.memory_stats(model).items()},
        "states": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
        "peak": peak,
        "planned": outlook.peak_bytes[Place.DEVICE],
        "rows": {row.name: row.num_bytes for row in outlook.rows},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = given_model_config(MemoryCase("llama", "full_shard", "none").config())
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.long
def test_state_of_adapters_is_planned_to_the_byte_and_the_peak_within_3_percent(ranks, folder):
    found = ranks(2)(held, folder)
    rows = found[0]["rows"]
    for name in ("parameter shards", "gradient shards", "slots", "gradient slots"):
        assert rows[name] == max(one["stats"][name.replace(" ", "_")] for one in found), name
    assert rows["optimizer (AdamW)"] == max(one["states"] for one in found)
    assert max(one["peak"] for one in found) == pytest.approx(found[0]["planned"], rel=0.03)


def test_only_adapters_have_gradients_and_states_in_the_plan(folder):
    outcome = invoke(["plan", *words_of(folder), "--gpus", "2"])
    found = json.loads(json.dumps(outcome.result))
    rows = {row["name"]: row["bytes"] for row in found["rows"]}
    trained = 4 * ADAPTERS / 2
    assert trained <= rows["gradient shards"] <= 1.02 * trained  # padded
    num_matrices = 2 * 2 * NUM_LAYERS  # each with a step count
    assert rows["optimizer (AdamW)"] == 2 * rows["gradient shards"] + 4 * num_matrices
    assert rows["parameter shards"] > 100 * trained
