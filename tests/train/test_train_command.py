"""`fullshard train` on real ranks: its files, and equal learning on any number of ranks."""

import dataclasses
import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.config.load import load_config
from fullshard.data.records import files_at
from fullshard.errors import DataError
from fullshard.launch.run_lock import LOCK
from fullshard.observe.metrics import StepRow, read_rows
from fullshard.outlook.memory import RANK_PROCESS
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.recipes.base import causal_lm_loss, load_data
from support.processes import python
from support.text import seeded_text

pytestmark = pytest.mark.timeout(300)


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    exit_code: int
    out: str
    err: str

    @property
    def record(self):
        return json.loads((self.folder / "run.json").read_text())

    @property
    def steps(self):
        return [row for row in read_rows(self.folder / "metrics.jsonl") if "loss" in row]

    @property
    def evaluations(self):
        return [row for row in read_rows(self.folder / "metrics.jsonl") if "eval_loss" in row]


def start(fullshard, folder, *words):
    """Runs `fullshard train`: checks in this process, ranks in processes of their own."""
    done = fullshard("train", *words)
    return Run(folder / "run", done.exit_code, done.out, done.err)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, fullshard, write_config):
    folder = tmp_path_factory.mktemp("two_ranks")
    return start(fullshard, folder, write_config(folder))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, fullshard, write_config):
    folder = tmp_path_factory.mktemp("one_rank")
    words = ("launch.num_processes=1", "gradient_accumulation_steps=2", "--json")
    return start(fullshard, folder, write_config(folder), *words)


def test_run_leaves_every_file_of_the_contract(two_ranks):
    assert two_ranks.exit_code == 0, two_ranks.err
    folder = two_ranks.folder
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names >= {
        "config.yaml",
        "run.json",
        "plan.json",
        "metrics.jsonl",
        "report.html",
        "sample.txt",
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "logs/rank_0.log",
        "logs/rank_1.log",
    }
    assert not [x for x in files_at(folder.parent).files if x.is_relative_to(folder)]
    with pytest.raises(DataError, match="got none"):
        files_at(folder / "checkpoints")
    # The lock stays: removing it would race with a run that just opened it.
    assert {name for name in names if Path(name).name.startswith(".")} == {LOCK}


def test_written_configuration_is_the_one_that_ran(two_ranks):
    given = load_config(two_ranks.folder.with_name("config.yaml"))
    written = load_config(two_ranks.folder / "config.yaml")
    assert written.config == given.config
    assert "# " in (two_ranks.folder / "config.yaml").read_text()


def test_record_tells_what_was_planned_and_measured(two_ranks):
    record = two_ranks.record
    assert (record["schema_version"], record["status"], record["exit_code"]) == (1, "finished", 0)
    assert record["error"] is None
    assert record["planned"]["world_size"] == 2
    assert record["planned"]["num_steps"] == record["measured"]["num_steps"] == 6
    plan = Plan.from_json((two_ranks.folder / "plan.json").read_text())
    assert record["planned"]["num_parameters"] == plan.num_parameters
    assert record["planned"]["peak_bytes"] == plan.peak_bytes
    assert record["measured"]["eval_loss"] == two_ranks.evaluations[-1]["eval_loss"]
    assert record["measured"]["train_loss"] == two_ranks.steps[-1]["loss"]
    assert record["measured"]["memory_peak_bytes"] > plan.peak_bytes["device"]
    assert torch.__version__.startswith(record["environment"]["torch"])  # 2.13.0+cpu


def test_planned_and_measured_memory_are_both_of_the_whole_process(two_ranks):
    planned = two_ranks.record["planned"]
    expected, before = planned["expected_peak_bytes"], planned["process_bytes"]
    measured = two_ranks.record["measured"]["memory_peak_bytes"]
    line = next(row for row in two_ranks.out.splitlines() if row.startswith("memory "))
    assert line.split(maxsplit=1)[1] == (
        f"planned {human_bytes(expected)} of tensors + {human_bytes(before)} of the process = "
        f"{human_bytes(expected + before)}; "
        f"measured {human_bytes(measured)} per rank (without pages of files, which the kernel "
        "drops when memory is short)"
    )
    assert before >= RANK_PROCESS
    assert 0.9 * (expected + before) < measured < 1.1 * (expected + before)


def test_metrics_have_a_row_a_step_with_exactly_the_fields_of_the_contract(two_ranks):
    fields = {field.name for field in dataclasses.fields(StepRow)}
    rows = two_ranks.steps
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in two_ranks.evaluations] == [3, 6]
    assert all(set(row) == {"step", "eval_loss"} for row in two_ranks.evaluations)
    for row in rows:
        assert set(row) == fields
        assert row["memory_peak_bytes"] >= row["memory_bytes"] > 2**20
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["step_time_s"])
        assert row["samples_per_s"] == pytest.approx(8 / row["step_time_s"])
        parts = row["data_s"] + row["compute_s"] + row["comm_s"]
        assert parts == pytest.approx(row["step_time_s"])
        assert row["comm_s"] > 0
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [2e-2 * (6 - step) / 6 for step in range(6)]
    )


def test_the_loss_falls_and_the_baseline_is_named(two_ranks):
    assert two_ranks.steps[-1]["loss"] < two_ranks.steps[0]["loss"] - 0.3
    baseline = two_ranks.record["measured"]["baseline_loss"]
    assert f"bigram baseline   {baseline:.4f}" in two_ranks.out
    assert f"held-out loss     {two_ranks.evaluations[-1]['eval_loss']:.4f}" in two_ranks.out


def test_saved_model_reloads_in_transformers_with_the_loss_of_the_last_evaluation(two_ranks):
    folder = two_ranks.folder
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    rows = load_data(folder / "data", load_config(folder / "config.yaml").config.model).held_out
    held_out = torch.from_numpy(rows.take(np.arange(len(rows))))
    with torch.no_grad():
        total, count = causal_lm_loss(model(held_out).logits, held_out)
    assert total.item() / count == pytest.approx(two_ranks.evaluations[-1]["eval_loss"], rel=1e-5)
    assert count == two_ranks.record["measured"]["num_held_out_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.decode(tokenizer("Ada has 3 boats")["input_ids"]) == "Ada has 3 boats"


def test_output_without_a_terminal_is_plain_and_only_of_rank_0(two_ranks):
    assert "\x1b" not in two_ranks.out
    assert "\r" not in two_ranks.out
    for label in ("model", "data", "mesh", "plan", "state", "dtypes", "batch", "steps"):
        assert re.search(rf"^  {label} ", two_ranks.out, re.MULTILINE), label
    assert "4 per rank x 1 micro-batch(es) x 2 rank(s) = 8 sequences, 256 tokens" in two_ranks.out
    steps = re.findall(r"^step (\d)/6  loss", two_ranks.out, re.MULTILINE)
    assert steps == ["1", "2", "4", "6"]
    assert (two_ranks.folder / "logs" / "rank_1.log").read_text() == ""
    assert two_ranks.err == ""
    sample = (two_ranks.folder / "sample.txt").read_text().strip()
    assert sample in two_ranks.out


def test_report_is_one_file_that_loads_nothing(two_ranks):
    page = (two_ranks.folder / "report.html").read_text()
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["charts"]
    assert sum(chart["x"] == "step" for chart in charts) == 8
    html = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=(?!\"data:,\")|url\(|@import", html)
    assert two_ranks.record["started_by"]["command_line"] in unescape(page)
    assert "LlamaDecoderLayer" in page
    assert "interpolated bigram" in page


def test_generate_continues_a_prompt_and_depends_only_on_the_seed(two_ranks, fullshard):
    words = ("--prompt", "Ada has", "--max-new-tokens", "12", "--json", "--seed")
    first, again = (
        json.loads(fullshard("generate", two_ranks.folder, *words, "1").out) for _ in range(2)
    )
    other = json.loads(fullshard("generate", two_ranks.folder / "model", *words, "2").out)
    assert first == again
    assert first["prompt"] == "Ada has"
    assert 1 <= first["num_new_tokens"] <= 12
    assert other["continuation"] != first["continuation"]
    assert first["model"] == other["model"] == str(two_ranks.folder / "model")


def test_generate_at_temperature_zero_takes_the_likeliest_token_from_any_prompt(
    two_ranks, fullshard
):
    words = ("--temperature", "0", "--json", "--seed")
    results = [json.loads(fullshard("generate", two_ranks.folder, *words, n).out) for n in "12"]
    assert results[0]["continuation"] == results[1]["continuation"]
    assert results[0]["num_new_tokens"] <= 63  # 64 positions, one of them for the start token
    assert results[0]["prompt"] == ""


def test_generate_continues_every_prompt_of_a_file_as_if_it_were_alone(
    two_ranks, fullshard, tmp_path
):
    prompts = ["Ada has", "The", "the", "Once upon a time"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(rows)
    words = ("--temperature", 0, "--max-new-tokens", 9, "--json")

    def samples(*more):
        return json.loads(fullshard("generate", two_ranks.folder, *words, *more).out)["samples"]

    together = samples("--prompts", tmp_path / "prompts.txt")
    assert [row["prompt"] for row in together] == prompts
    assert together == [samples("--prompt", prompt)[0] for prompt in prompts]
    assert together == samples("--prompts", tmp_path / "prompts.jsonl", "--top-k", 1)


def test_checkpoint_in_place_of_a_model_folder_is_named(two_ranks, fullshard):
    checkpoint = sorted((two_ranks.folder / "checkpoints").iterdir())[-1]
    said = f"expected a Hugging Face model folder, got the checkpoint '{checkpoint}'"
    assert f"FOLDER: {said}" in fullshard("generate", checkpoint, code=2).err
    done = fullshard("train", f"model={checkpoint}", "--dry-run", code=2)
    assert f"model.name_or_path: {said}" in done.err


def test_generate_on_ranks_that_share_the_model_writes_the_same(two_ranks, fullshard):
    words = ("--prompt", "Ada has", "--max-new-tokens", 9, "--top-k", 5, "--seed", 3)
    alone = fullshard("generate", two_ranks.folder, *words)
    shared = fullshard("generate", two_ranks.folder, *words, "--num-processes", 2, code=0)
    assert shared.out == alone.out
    assert alone.out.startswith("Ada has")
    assert alone.err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "FOLDER: expected a local model folder, got 'nowhere'"),
        (["."], "got '.' without config.json"),
        ([".", "--max-new-tokens", "0"], "--max-new-tokens: expected an integer >= 1, got 0"),
        ([".", "--temperature", "-1"], "--temperature: expected a number >= 0, got -1"),
        ([".", "--temperature", "nan"], "--temperature: expected a number >= 0, got nan"),
        ([".", "--top-p", "0"], "--top-p: expected a number > 0 and <= 1, got 0.0"),
        ([".", "--top-k", "-1"], "--top-k: expected an integer >= 0, got -1"),
        ([".", "--repetition-penalty", "0"], "--repetition-penalty: expected a number > 0, got 0"),
        ([".", "--num-processes", "0"], "--num-processes: expected an integer >= 1, got 0"),
        (
            [".", "--prompts", "nowhere.txt"],
            "--prompts: 'nowhere.txt': expected a file with one prompt per line",
        ),
    ],
)
def test_generate_names_what_it_cannot_use(tmp_path, monkeypatch, fullshard, words, expected):
    monkeypatch.chdir(tmp_path)
    done = fullshard("generate", *words, code=2)
    assert expected in done.err
    assert done.out == ""


def test_one_rank_with_the_same_global_batch_learns_the_same(two_ranks, one_rank):
    assert one_rank.exit_code == 0, one_rank.err
    for ours, theirs in zip(one_rank.steps, two_ranks.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["learning_rate"] == theirs["learning_rate"]
    for ours, theirs in zip(one_rank.evaluations, two_ranks.evaluations, strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


def test_json_prints_only_the_record_and_the_rest_to_standard_error(one_rank):
    result = json.loads(one_rank.out)
    assert Path(result.pop("run_dir")) == one_rank.folder
    assert result == one_rank.record
    assert "held-out loss" in one_rank.err


def test_a_finished_run_is_moved_and_its_model_can_be_trained_further(one_rank, fullshard, caplog):
    place = one_rank.folder.parent
    lines = seeded_text(200, seed=1).splitlines()
    records = "".join(json.dumps({"story": line}) + "\n" for line in lines)
    (place / "more.jsonl").write_text(records)
    shutil.copytree(one_rank.folder, place / "run.1")  # the older run will not be moved there
    again = start(
        fullshard,
        place,
        place / "config.yaml",
        f"model={place}/run.1/model",
        f"data={{path: {place}/more.jsonl, text_column: story}}",
        "freeze=[model.embed_tokens.*]",
        "launch.num_processes=1",
        "max_steps=2",
        "eval_strategy=no",
        "strategy=shard_grad_op",
        "bf16=true",
    )
    assert again.exit_code == 0, again.err
    assert f"moved the older run in {place / 'run'} to {place / 'run'}.2" in caplog.text
    assert "(1 tensors frozen), weights of" in again.out
    assert "master float32, compute bfloat16, reduce float32" in again.out
    assert again.steps[0]["loss"] < 4.5  # a random model of 300 entries begins at ln 300 = 5.7
    models = [
        AutoModelForCausalLM.from_pretrained(place / run / "model") for run in ("run.2", "run")
    ]
    assert torch.equal(*(m.get_parameter("model.embed_tokens.weight") for m in models))
    assert not torch.equal(*(m.get_parameter("model.norm.weight") for m in models))


def test_a_diverged_run_ends_with_code_9_and_names_the_step(tmp_path, fullshard, write_config):
    words = ("optim=sgd", "learning_rate=1e18", "max_grad_norm=0", "eval_strategy=no")
    run = start(fullshard, tmp_path, write_config(tmp_path), *words)
    assert run.exit_code == 9, run.err
    assert run.record["exit_code"] == 9
    assert run.record["status"] == "failed"
    assert run.record["error"]["type"] == "DivergedError"
    assert re.search(r"of step [23]: expected a finite number", run.record["error"]["message"])
    assert run.record["error"]["message"] in run.err
    assert "DivergedError" in (run.folder / "report.html").read_text()
    assert not (run.folder / "model").exists()


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path, write_config, fullshard):
    """Rank 0's checks complete the configuration, here with the model's length."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("  max_seq_length: 32\n", ""))
    dry = fullshard("train", config, "max_steps=1", "--dry-run", "--json")
    words = ("-m", "fullshard", "train", config, "max_steps=1", "eval_strategy=no")
    done = python(*torchrun, *words, cwd=tmp_path, timeout=300)
    run = Run(tmp_path / "run", done.returncode, done.stdout, done.stderr)
    assert run.record["status"] == "finished"
    assert run.record["planned"]["world_size"] == 2
    expected = json.loads(dry.out)["planned"]["expected_peak_bytes"]
    assert run.record["planned"]["expected_peak_bytes"] == expected
    assert len(run.steps) == 1
    assert run.out.count("step 1/1  loss") == 1
