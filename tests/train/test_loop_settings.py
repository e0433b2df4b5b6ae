"""`fullshard train` with an average of the weights, an early end, and trackers."""

import csv
import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from fullshard.observe.metrics import read_rows
from support.text import seeded_text

CONFIG = """\
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
            num_attention_heads: 2, max_position_embeddings: 64}}
data: {{path: {folder}/text.txt, vocab_size: 300, validation_fraction: 0.1}}
training: {{output_dir: {folder}/run, max_steps: 12, per_device_train_batch_size: 4,
            max_seq_length: 32, learning_rate: 2e-2, eval_steps: 3, seed: 7, ema_decay: 0.5,
            early_stopping_patience: 1, early_stopping_threshold: 100,
            report_to: [tensorboard, wandb], tf32: true}}
launch: {{num_processes: 2}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, fullshard):
    """Returns output and files of a run whose second held-out loss must improve by 100 nats."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "text.txt").write_text(seeded_text(300))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    (folder / "run" / "report.html").mkdir(parents=True)  # makes the page unwritable
    (folder / "run" / "run.json").write_text('{"status": "failed"}')  # an earlier run
    done = fullshard("train", folder / "config.yaml", code=0)
    return done, folder / "run"


def test_a_run_that_stops_early_is_finished_and_reports_it(run, fullshard):
    done, folder = run
    record = json.loads((folder / "run.json").read_text())
    measured = record["measured"]
    assert (record["status"], measured["num_steps"], measured["stopped_early"]) == (
        "finished",
        6,
        True,
    )
    assert "after step 6" in done.out
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
    fullshard("train", folder.parent / "config.yaml", "--dry-run", code=0)


def test_a_finished_run_reports_a_page_that_cannot_be_written(run):
    done, folder = run
    assert "no page of the run" in done.out
    assert json.loads((folder / "run.json").read_text())["exit_code"] == 0


def test_tf32_sets_the_precision_of_float32_matrix_products(run):
    done, _ = run
    assert "float32 matrix products in high precision" in done.out


def test_the_average_is_evaluated_and_opens_as_a_model(run):
    _, folder = run
    measured = json.loads((folder / "run.json").read_text())["measured"]
    assert measured["ema_eval_loss"] != pytest.approx(measured["eval_loss"], rel=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(folder / n) for n in ("model", "model_ema")]
    last, average = (model.lm_head.weight for model in models)
    assert 0 < torch.dist(last, average) < 0.5 * torch.linalg.norm(last)


def test_the_table_and_the_tracker_have_the_rows(run):
    _, folder = run
    rows = list(read_rows(folder / "metrics.jsonl"))
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{k: v for k, v in line.items() if v} for line in table] == [
        {k: str(v) for k, v in row.items() if v is not None} for row in rows
    ]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert shown == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
    assert [event.step for event in events.Scalars("eval/loss")] == [3, 6]


def test_a_tracker_that_is_not_installed_is_reported_once(run):
    done, _ = run
    said = done.out + done.err
    assert said.count("training.report_to: wandb is not installed") == 1


@pytest.mark.slow
def test_a_new_run_from_a_checkpoint_starts_its_patience_again(run, fullshard):
    """It inherits neither the lost patience of the first run nor its average."""
    _, folder = run
    other = folder.with_name("other")
    words = ("--resume", folder / "checkpoints", f"output_dir={other}", "max_steps=8")
    done = fullshard("train", folder.parent / "config.yaml", *words, "ema_decay=null", code=0)
    assert [row["step"] for row in read_rows(other / "metrics.jsonl") if "loss" in row] == [7, 8]
    assert (done.out + done.err).count("average of the weights is dropped") == 1
    assert not (other / "model_ema").exists()
