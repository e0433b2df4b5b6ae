"""Files of other tools, as in their documentation, train on two real ranks."""

import json
from pathlib import Path

import pytest

from fullshard.observe.metrics import read_rows
from support.text import seeded_text

DIALECTS = Path(__file__).parents[1] / "pure" / "config" / "dialects"

ELSEWHERE = {"fsdp_config.json", "accelerate_axes.yaml"}  # not files of runs, and one for 16 ranks
NAMES = sorted({p.name for p in DIALECTS.iterdir()} - ELSEWHERE)

MODEL = (
    "model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 64}"
)
MIXTURE = MODEL.replace("llama", "qwen3_moe").replace(
    "}",
    ", num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}",
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns overrides that make a run small: a model, a text, two steps."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(seeded_text(500))
    run = ["max_steps=2", "max_seq_length=32", "num_processes=2"]
    return [MODEL, f"data={text}", "data.vocab_size=300", *run]


def train(fullshard, folder, *words, num_ranks=2):
    fullshard("train", *words, f"output_dir={folder}", code=0)
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["planned"]["world_size"]) == ("finished", num_ranks)
    return [row for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_a_machine_file_and_a_recipe_train_together(fullshard, small, tmp_path):
    """The losses equal those of the same run in our own keys."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-2\nper_device_train_batch_size: 2\nwarmup_ratio: 0\n")
    files = ("--config_file", str(DIALECTS / "accelerate_fsdp1.yaml"), "--config", str(recipe))
    folder = tmp_path / "theirs"
    theirs = train(fullshard, folder, *files, *small, "--max_steps", "3")
    own = tmp_path / "own.yaml"
    own.write_text(
        "sharding: {strategy: full_shard, wrap: [LlamaDecoderLayer], param_dtype: bf16, "
        "forward_prefetch: 0}\n"
        "training: {learning_rate: 1e-2, per_device_train_batch_size: 2}\n"
    )
    ours = train(fullshard, tmp_path / "ours", str(own), *small, "--max_steps", "3")
    assert [row["loss"] for row in theirs] == [row["loss"] for row in ours]
    assert len(ours) == 3
    assert "fsdp_config.fsdp_sharding_strategy" in (folder / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_tool_trains_two_steps(fullshard, small, tmp_path, monkeypatch, name):
    monkeypatch.chdir(DIALECTS)
    more = {
        "deepspeed_zero3_nvme.json": [f"sharding.offload.folder={tmp_path}"],
        "accelerate_fsdp1_hybrid.yaml": ["freeze=[lm_head.*,model.norm.*]"],  # it ignores these
    }
    words = [*small, *more.get(name, [])]
    num_ranks = {"transformers_axes.yaml": 8}.get(name, 4 if "axes" in name else 2)
    if "axes" in name:  # tensor 2 times expert 2; transformers' file also has shard 2
        words = [MIXTURE, *small[1:], f"num_processes={num_ranks}"]
    if "lora" in name:  # adapters need weights with a tokenizer
        train(fullshard, tmp_path / "base", "trainer_flat.yaml", *small)
        words = [f"model={tmp_path / 'base' / 'model'}", small[1], *small[3:]]
    rows = train(fullshard, tmp_path / "run", name, *words, num_ranks=num_ranks)
    assert [row["step"] for row in rows] == [1, 2]
