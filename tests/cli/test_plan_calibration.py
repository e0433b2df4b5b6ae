"""`fullshard plan` predicts the time of a step on a calibrated machine."""

import json
from pathlib import Path

import pytest
from benchmarks.times import CASES

from fullshard.cli.app import invoke
from fullshard.config.environment import cache_folder
from fullshard.config.load import load_config
from fullshard.launch.machine import describe_machine
from fullshard.outlook.devices import (
    CALIBRATION_FILE,
    Calibration,
    Ceilings,
    HostOverhead,
    Table,
    to_json,
)
from fullshard.planner.mesh import Topology
from fullshard.run.outlook import model_of, view_of

ROOT = Path(__file__).parents[2]
# Time of every operation of the trace except matrix products, which take none.
SECONDS = 1e-3
# Settings of the main job that make its trace short.
SMALL = ("model.config.num_hidden_layers=2", "per_device_train_batch_size=1")
WHOLE = "model.config.num_hidden_layers=4"  # the layers of the main job


def calibration(*, ranks=(2,), machine=None, scale=1.0):
    flat = Table((((1 << 40,), scale * SECONDS),))
    products = Table((((1 << 20,) * 3, 1e-12),))
    heads = Table((((1 << 40, 1 << 20), 1e-12),))
    operations = {f"matmul {layout} float32": products for layout in ("nn", "nt", "tn")}
    operations |= dict.fromkeys(
        ("attention causal float32", "attention causal backward float32"), heads
    )
    operations["add float32"] = flat
    found = {count: Ceilings(count, operations, {}, HostOverhead()) for count in ranks}
    return to_json(Calibration(machine or describe_machine(), found), {})


@pytest.fixture
def plan(monkeypatch, tmp_path, capfd):
    """`plan(*words)` returns what --json prints, other output and the exit code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)

    def plan(*words):
        outcome = invoke(["plan", *SMALL, *map(str, words)])
        said = capfd.readouterr()
        result = json.loads(json.dumps(outcome.result))
        return result, said.out + said.err, outcome.exit_code

    return plan


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(calibration())
    return path


def test_a_named_calibration_predicts_the_time(plan, file):
    before, *_ = plan()
    found, said, code = plan(WHOLE, "--calibration", file)
    assert (before["step_time_s"], code) == (None, 0)
    assert found["step_time_s"] > 100 * SECONDS  # a few hundred operations
    assert "from the calibration of this machine" in said


def test_the_time_scales_with_the_file(plan, file):
    once, *_ = plan("--calibration", file)
    file.write_text(calibration(scale=3.0))
    thrice, *_ = plan("--calibration", file)
    assert thrice["step_time_s"] == pytest.approx(3 * once["step_time_s"], rel=1e-6)


def test_recompute_and_more_samples_cost_the_traced_operations(plan, file):
    plain, *_ = plan("--calibration", file)
    again, *_ = plan("--calibration", file, "activation_checkpointing=block")
    twice, *_ = plan("--calibration", file, "gradient_accumulation_steps=2")
    assert plain["step_time_s"] < again["step_time_s"] < twice["step_time_s"]


def time_of_a_run():
    """Returns the planned step time that `fullshard train` records."""
    config = load_config(None, [*SMALL]).config
    return view_of(config, model_of(config), Topology(2)).outlook.step_time_s


def test_the_calibration_of_this_machine_is_found_in_the_cache(plan, file):
    path = cache_folder() / CALIBRATION_FILE
    path.parent.mkdir(parents=True)
    path.write_text(file.read_text())
    assert plan()[0]["step_time_s"] == plan("--calibration", file)[0]["step_time_s"]
    assert time_of_a_run() == plan()[0]["step_time_s"]
    path.write_text(calibration(machine={"cores": 1000}))
    assert time_of_a_run() is None
    found, said, _ = plan()
    assert found["step_time_s"] is None
    assert "not used: another machine was measured" in said


def test_plans_for_unmeasured_ranks_report_that_they_have_no_time(plan, file):
    found, said, code = plan("--calibration", file, "launch.num_processes=3")
    assert (found["step_time_s"], code) == (None, 0)
    assert "no step time: 2 ranks were measured, not 3" in said
    assert "bench calibrate --ranks 3" in said


@pytest.mark.parametrize("words", [["--gpus", "8xH100"], ["--nodes", "2"]])
def test_a_calibration_of_another_machine_is_not_used(plan, file, words):
    _, said, code = plan("--calibration", file, *words)
    assert code == 2
    assert "--calibration: expected a plan for only this machine" in said


def test_a_file_of_another_version_is_refused(plan, file):
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    _, said, code = plan("--calibration", file)
    assert code == 2
    assert "schema_version: expected 1, got 9. Measure it again" in said


def test_the_page_draws_the_schedule_of_the_calibrated_step(plan, file, tmp_path):
    page = tmp_path / "plan.html"
    _, _, code = plan("--calibration", file, "--out", page)
    assert code == 0
    assert "Schedule of a micro-batch" in page.read_text()
    assert "calibrated" in page.read_text()


def test_the_ten_runs_are_of_one_two_and_four_ranks_and_of_every_kind():
    assert len(CASES) == 10
    assert {case.num_ranks for case in CASES} == {1, 2, 4}
    assert {case.strategy for case in CASES} == {"full_shard", "shard_grad_op", "no_shard"}
    assert {case.recompute for case in CASES} == {"none", "block"}
    for case in CASES:
        case.config()
