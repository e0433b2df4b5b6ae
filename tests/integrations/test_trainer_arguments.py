"""TrainingArguments of a sharded Trainer: the table in the documentation, and some of its rows."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tests.integrations import arguments_job
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.training_args import OptimizerNames

from fullshard.errors import ConfigError
from fullshard.integrations.accelerator import sharding_of
from support.trainers import launched

SCRIPT = Path(arguments_job.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "trainer_arguments.md"
RESULTS = ("equal", "within rounding", "refused", "no effect", "not tried", "the same error")
RUN = ["common", "optim=adafactor", "torch_compile_backend", "auto_find_batch_size",
       "load_best_model_at_end", "hub_revision", "resume_from_checkpoint, adafactor",
       "neftune_noise_alpha", "predict_with_generate"]  # fmt: skip
IN_16_BITS = ("bf16", "fp16")


def table():
    """Results by argument; each value of `optim` has a separate row."""
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: result for names, result in rows for name in re.findall(r"`([^`]+)`", names)}


def test_every_argument_is_in_the_table():
    found = table()
    fields = [f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)]
    fields.remove("optim")
    wanted = {*fields, *(f"optim={one.value}" for one in OptimizerNames)}
    assert found.keys() >= wanted, sorted(wanted - found.keys())
    assert all(result.startswith(RESULTS) for result in found.values())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 3}}),
        ("bf16_full_eval", True),
        ("fp16_full_eval", True),
    ],
)
def test_a_refused_argument_is_named(name, given, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    setattr(args, name, given)
    with pytest.raises(ConfigError, match=rf"TrainingArguments\.{name}: expected none"):
        sharding_of(args)
    assert table()[name].startswith("refused")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    for mode in ("ddp", "sharded"):
        launched(folder, SCRIPT, mode, folder, *RUN, *IN_16_BITS)
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUN)
def test_a_case_of_the_table_is_equal(runs, name):
    verdict, logs, weights = arguments_job.compare(runs, name)
    assert verdict == "ran"
    assert logs is not None
    assert logs < 1e-6
    assert weights is not None
    assert weights < 1e-6


def run_of(folder, mode, name):
    return json.loads((folder / mode / f"{arguments_job.slug(name)}.json").read_text())["run"]


@pytest.mark.long
def test_answers_of_the_generating_case_end_at_different_lengths(runs):
    metrics = run_of(runs, "sharded", "predict_with_generate")["metrics"]
    assert len(set(metrics["eval_lengths"])) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", IN_16_BITS)
def test_losses_in_16_bits_are_equal_within_their_rounding(runs, name):
    found, wanted, other = (
        [row["loss"] for row in run_of(runs, mode, case)["history"] if "loss" in row]
        for mode, case in (("sharded", name), ("ddp", name), ("sharded", "common"))
    )
    assert len(wanted) == 4
    assert found == pytest.approx(wanted, rel=2e-3)
    assert found != pytest.approx(other, rel=1e-6)
