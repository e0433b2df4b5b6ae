"""`fullshard config explain | lint | schema`: output and exit codes."""

import json
from pathlib import Path

import pytest

from fullshard.cli.app import invoke
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.config.supported import FINDINGS, findings

FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_use_orig_params: true
mixed_precision: bf16
use_cpu: true
"""
LLAMA = {"config": {"model_type": "llama"}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    return tmp_path


def test_explain_lists_every_value_with_its_origin_and_one_note_per_key(folder):
    outcome = invoke(["config", "explain", "fsdp.yaml", "max_steps=5", "--json"])
    assert outcome.exit_code == 0
    result = json.loads(json.dumps(outcome.result))
    assert result["dialects"] == ["Accelerate"]
    assert result["sharding"]["strategy"] == {
        "value": "hybrid_shard",
        "origin": "from fsdp_config.fsdp_sharding_strategy (fsdp.yaml:3)",
    }
    assert result["training"]["max_steps"] == {"value": 5, "origin": "command line"}
    assert result["training"]["seed"] == {"value": 42, "origin": "default"}
    assert result["model"]["name_or_path"] == {
        "value": None,
        "origin": "missing: give model=FOLDER",
    }
    assert set(result["sharding"]) == set(RunConfig.model_fields["sharding"].default.to_dict())
    assert result["launch"].keys() >= {"num_processes", "timeout"}
    notes = {note["key"]: note for note in result["notes"]}
    assert {key: note["status"] for key, note in notes.items()} == {
        "distributed_type": "translated",
        "fsdp_config.fsdp_sharding_strategy": "translated",
        "fsdp_config.fsdp_use_orig_params": "no_effect",
        "mixed_precision": "translated",
        "use_cpu": "lost",
    }
    assert all(note["why"] and note["place"] for note in notes.values())


def test_explain_prints_the_contents_of_its_json(folder, capsys):
    assert invoke(["config", "explain", "fsdp.yaml", "model=FOLDER"]).exit_code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "name_or_path: FOLDER # command line" in lines
    assert "param_dtype: bfloat16 # from mixed_precision (fsdp.yaml:5)" in lines
    assert any(line.startswith("fsdp.yaml:6: use_cpu: lost: ") for line in lines)


def test_explain_shows_set_values_and_with_all_every_default(folder, capsys):
    words = ["config", "explain", "fsdp.yaml", "max_steps=5"]
    invoke(words)
    assert "# missing: give model=FOLDER" in capsys.readouterr().out
    words.append("model=FOLDER")
    invoke(words)
    shown = capsys.readouterr().out
    assert "  max_steps: 5" in shown
    assert "# default" not in shown
    invoke([*words, "--all"])
    every = capsys.readouterr().out
    num_defaults = sum(line.endswith("# default") for line in every.splitlines())
    assert f"--all adds {num_defaults} defaults" in shown
    assert set(shown.splitlines()[1:]) < set(every.splitlines())


def test_explain_takes_two_files(folder):
    (folder / "recipe.yaml").write_text("model_name_or_path: x\nmax_steps: 7\n")
    words = ["--config_file", "fsdp.yaml", "--config", "recipe.yaml", "--output_dir", "DIR"]
    result = invoke(["config", "explain", *words, "--max_steps", "100"]).result
    assert result["dialects"] == ["Accelerate", "TrainingArguments"]
    assert result["model"]["name_or_path"] == {
        "value": "x",
        "origin": "from model_name_or_path (recipe.yaml:1)",
    }
    assert result["training"]["output_dir"]["value"] == "DIR"
    assert result["training"]["max_steps"] == {"value": 100, "origin": "command line"}


@pytest.mark.parametrize("command", ["explain", "lint"])
def test_a_wrong_file_ends_with_exit_code_2(folder, command, capsys):
    (folder / "fsdp.yaml").write_text(FSDP.replace("use_orig", "use_origin"))
    assert invoke(["config", command, "fsdp.yaml"]).exit_code == 2
    assert "Did you mean 'fsdp_use_orig_params'?" in capsys.readouterr().err


def test_deepspeed_beside_fsdp_is_refused_by_every_command(folder, capsys):
    (folder / "fsdp.yaml").write_text(FSDP.replace("use_orig", "use_origin"))  # not read on
    for words in (["config", "explain"], ["train", "--dry-run"], ["sft"], ["plan"]):
        outcome = invoke([*words, "--config_file", "fsdp.yaml", "--deepspeed", "zero3.yaml"])
        assert outcome.exit_code == 2
        assert (
            "deepspeed: expected one of FSDP and DeepSpeed, got DeepSpeed and FSDP, which "
            "distributed_type (fsdp.yaml:1) asks for."
        ) in capsys.readouterr().err


def test_lint_names_missing_features_bad_values_and_lost_keys(folder, capsys):
    path = folder / "a.yaml"
    path.write_text(
        "sharding: {wrap: none, activation_checkpointing: offload}\n"
        "training: {use_liger_kernel: true}\n"
    )
    outcome = invoke(["config", "lint", "a.yaml"])
    assert outcome.exit_code == 2
    said = "a.yaml:1: sharding.activation_checkpointing: 'offload' is not yet supported. Use block"
    assert outcome.result["refused"] == [said]
    assert [(one["key"], one["place"]) for one in outcome.result["findings"]] == [
        ("sharding.wrap", "a.yaml:1"),
    ]
    out = capsys.readouterr().out
    assert f"refused: {said}" in out
    assert "a.yaml:2: training.use_liger_kernel: lost: " in out


@pytest.mark.parametrize(
    ("files", "text", "said"),
    [
        ({"model/config.json": "{"}, "model: {path: model}\n", "a.yaml:1: model.name_or_path: "),
        ({}, "model: {path: nowhere}\n", "a.yaml:1: model.name_or_path: "),
        ({}, "data: {path: nowhere}\n", "a.yaml:1: data.path: "),
        ({}, "sharding: {activation_checkpointing: offload}\n", "a.yaml:1: sharding.activation"),
        ({}, "distill: {top_k: 4}\n", "a.yaml: teacher: "),
        (
            {"model/config.json": json.dumps({**LLAMA["config"], "max_position_embeddings": 8})},
            "model: {path: model}\ntraining: {max_seq_length: 64}\n",
            "a.yaml:2: training.max_seq_length: ",
        ),
    ],
)
def test_explain_and_lint_report_the_refusals_of_a_run(folder, capsys, files, text, said):
    for name, held in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(held)
    (folder / "a.yaml").write_text(text)
    explained = invoke(["config", "explain", "a.yaml"])
    assert any(one.startswith(said) for one in explained.result["refused"])
    assert f"refused: {said}" in capsys.readouterr().out
    assert explained.exit_code == 0
    linted = invoke(["config", "lint", "a.yaml"])
    assert linted.result["refused"] == explained.result["refused"]
    assert linted.exit_code == 2


def test_lint_of_a_good_file_ends_with_exit_code_0(folder, capsys):
    (folder / "a.yaml").write_text("training: {bf16: true}\n")
    assert invoke(["config", "lint", "a.yaml"]).exit_code == 0
    assert capsys.readouterr().out == "nothing found\n"


BAD = {
    "sharding.wrap": {"sharding": {"wrap": "none"}},
    "sharding.offload": {"sharding": {"offload": "cpu", "strategy": "no_shard"}},
    "sharding.master_dtype": {"sharding": {"master_dtype": "bf16"}},
    "sharding.reduce_dtype": {"sharding": {"reduce_dtype": "fp16"}},
    "sharding.grad_sync": {"sharding": {"grad_sync": "last_micro_batch"}},
    "sharding.forward_prefetch": {"sharding": {"forward_prefetch": 8}},
    "sharding.poison": {"sharding": {"poison": True}},
    "launch.num_processes": {"launch": {"num_processes": 1}},
    "training.warmup_steps": {"training": {"max_steps": 5, "warmup_steps": 5}},
    "training.learning_rate": {"training": {"learning_rate": 0}},
}


@pytest.mark.parametrize(("key", "fields"), list(BAD.items()))
def test_every_bad_combination_is_found_and_no_other(key, fields):
    config = RunConfig(model={"config": LLAMA["config"]}, **fields)
    assert [found for found, _ in findings(config)] == [key]


def test_every_finding_has_a_case_above():
    assert list(FINDINGS) == list(BAD)


def test_the_main_job_and_all_defaults_have_no_finding():
    assert list(findings(RunConfig(model=LLAMA))) == []
    assert list(findings(load_config(None).config)) == []


def test_the_schema_has_every_key_and_every_other_name(folder, capsys):
    assert invoke(["config", "schema"]).exit_code == 0
    schema = json.loads(capsys.readouterr().out)
    assert (schema["required"], schema["title"]) == (["model"], "A configuration of fullshard")
    assert schema["additionalProperties"] is False
    assert all("description" in str(schema["properties"][name]) for name in RunConfig.model_fields)
    training = schema["$defs"]["TrainingConfig"]
    assert training["additionalProperties"] is False
    names = {"max_steps", "max_length", "evaluation_strategy", "fsdp_config", "report_to"}
    assert names <= set(training["properties"])
    assert {"type": "string"} in schema["properties"]["model"]["anyOf"]
    strategy = schema["$defs"]["ShardConfig"]["properties"]["strategy"]
    assert "full_shard" in json.dumps([strategy, schema["$defs"].get("Strategy")])


def test_the_schema_of_another_tools_file_has_its_keys(folder):
    result = invoke(["config", "schema", "fsdp.yaml", "--out", "schema.json"]).result
    assert json.loads(Path("schema.json").read_text()) == result
    assert result["title"] == "A file of Accelerate"
    fsdp = result["properties"]["fsdp_config"]
    assert "sharding_strategy" in fsdp["properties"]
    assert "training" in result["properties"]
    assert "sharding_strategy" in next(iter(fsdp["patternProperties"]))
