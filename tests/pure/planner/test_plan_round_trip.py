"""A plan survives a JSON round trip, is equal in every process, and covers every element."""

import json
import os

import pytest
from torch import nn

import fullshard as fs
from fullshard.errors import ConfigError
from fullshard.planner.plan import Plan
from support.processes import python

SCRIPT = """
import fullshard as fs
config = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
print(fs.plan(config, world_size=8, param_dtype="bf16").to_json())
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def _plan_text(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return python("-c", SCRIPT, env=environment).stdout.strip()


@pytest.mark.long
def test_the_json_is_the_same_in_every_process_and_reads_back():
    plan = fs.plan(LLAMA, world_size=8, param_dtype="bf16")
    text = plan.to_json().strip()
    # Hash seeds differ between the processes.
    assert _plan_text("2" if os.environ.get("PYTHONHASHSEED") == "1" else "1") == text
    assert Plan.from_json(text) == plan


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"foo": 1}, "foo: Unexpected"),
        ({"mesh": {"replicate": 1, "shard": "x"}}, "mesh.shard: Input should be a valid integer"),
        ({"rings": [{"name": "a"}]}, "rings.0.dtype: Field required"),
        ({"schema_version": 2}, "expected schema_version 1 or older, got 2"),
    ],
)
def test_text_that_is_no_plan_of_this_version_is_refused_by_field(field, says):
    plan = json.loads(fs.plan(nn.Linear(4, 4), world_size=2).to_json())
    with pytest.raises(ConfigError, match=says):
        Plan.from_json(json.dumps(plan | field))


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("full_shard", {}),
        ("shard_grad_op", {}),
        ("hybrid_shard", {"replicate": 2}),
        ("no_shard", {}),
    ],
)
def test_the_ranks_store_every_element_once_per_replica(strategy, sizes):
    plan = fs.plan(LLAMA, world_size=6, strategy=strategy, **sizes)
    held = sum(piece.numel for rank in range(6) for piece in plan.view(rank).all_slices())
    assert held == plan.num_parameters * plan.mesh.replicate
    shards = next(row["bytes"] for row in plan.rows() if row["name"] == "parameter shards")
    whole = 4 * plan.num_parameters / plan.mesh.shard
    assert whole <= shards <= whole + 4 * sum(unit.padding for unit in plan.units)


def test_tied_weights_belong_to_the_root_and_are_counted_once():
    tied = fs.plan({**LLAMA, "tie_word_embeddings": True}, world_size=2)
    untied = fs.plan({**LLAMA, "tie_word_embeddings": False}, world_size=2)
    assert untied.num_parameters - tied.num_parameters == 512 * 64
    names = {names for group in tied.units[0].groups for names in group.names}
    assert ("model.embed_tokens.weight", "lm_head.weight") in names


def test_sizes_that_do_not_multiply_to_the_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"expected 8 .*got 3 x 2 = 6"):
        fs.plan(LLAMA, world_size=8, strategy="hybrid_shard", replicate=3, shard=2)
