"""`fullshard sft` on real ranks: adapters, merged weights, resuming, the recipe of other tools."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fullshard.observe.metrics import read_rows
from support.model_folder import small_config, write_chats, write_model

pytestmark = pytest.mark.timeout(300)

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""
RECIPE = """\
model_name_or_path: {base}
dataset_name: {data}
learning_rate: 5.0e-2
packing: true
max_length: 64
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
logging_steps: 1
save_steps: 2
use_peft: true
lora_r: 4
lora_alpha: 8
lora_target_modules: [q_proj, down_proj]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder, chat data, and the two configuration files of the command."""
    folder = tmp_path_factory.mktemp("sft")
    text = write_chats(folder / "chat.jsonl", 96)
    write_model(folder / "base", small_config(), text)
    (folder / "fsdp.yaml").write_text(ACCELERATE)
    data, base = folder / "chat.jsonl", folder / "base"
    (folder / "recipe.yaml").write_text(RECIPE.format(base=base, data=data))
    return folder


def command(folder):
    config_file, recipe = str(folder / "fsdp.yaml"), str(folder / "recipe.yaml")
    return ["sft", "--config_file", config_file, "--config", recipe, "--output_dir"]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_trained_text_without_the_end_of_generated_text_is_told(
    fullshard, files, tmp_path, caplog, command
):
    base, words = tmp_path / "base", ["num_processes=1", "max_seq_length=64", "--dry-run"]
    shutil.copytree(files / "base", base)
    end = PreTrainedTokenizerFast.from_pretrained(base).eos_token_id
    text = files / ("chat.jsonl" if command == "sft" else "recipe.yaml")
    words += [f"model={base}", f"data.path={text}", "data.validation_fraction=0"]
    words += ["max_steps=1", "per_device_train_batch_size=1"]
    (base / "generation_config.json").write_text(f'{{"eos_token_id": [7, {end}]}}')
    fullshard(command, *words, code=0)
    assert "will not end" not in caplog.text
    (base / "generation_config.json").write_text('{"eos_token_id": [7, 4000]}')
    fullshard(command, *words, code=0)
    assert "(eos_token_id of the model: 7, 4000), none is trained" in caplog.text
    (base / "generation_config.json").write_text("version https://git-lfs")
    assert (
        "generation_config.json': expected a JSON object" in fullshard(command, *words, code=2).err
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # in peft
def test_the_recipe_of_other_tools_trains_adapters_and_resumes(
    fullshard, files, monkeypatch, caplog
):
    from peft import PeftModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    run = files / "run"
    first = fullshard(*command(files), run, "--max_steps", "4", code=0)
    assert "examples in" in first.out
    assert "asked" in first.out
    assert "answers" in first.out
    fullshard(*command(files), run, "--max_steps", "6", code=0)
    assert "prepared 1 of 1 parts" in caplog.text
    rows = list(read_rows(run / "metrics.jsonl"))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert losses[-1] < losses[0] - 0.1
    record = json.loads((run / "run.json").read_text())
    assert (record["command"], record["status"]) == ("sft", "finished")

    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(files / "base")
    before = base(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, str(run / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora_target_modules", "[q_prj]"], "lora.target_modules: expected ends of layers'"),
        (["--chat_template_path", "nowhere"], "sft.chat_template_path: expected a Jinja file"),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(fullshard, files, monkeypatch, words, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    done = fullshard(*command(files), files / "wrong", *words, "--dry-run")
    assert (done.exit_code, said in done.err) == (2, True), done.err
