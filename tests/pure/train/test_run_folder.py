"""A run's folder: never overwritten, never shared, always with a reason for its end."""

from __future__ import annotations

import json
import os

import pytest

from fullshard.errors import ConfigError
from fullshard.train.run_folder import RunFolder, RunStatus, begin, check_output_dir


def finish(folder: RunFolder) -> None:
    folder.update_record(status=RunStatus.FINISHED, exit_code=0)


def test_new_run_is_recorded_as_preparing(tmp_path):
    folder, moved = begin(tmp_path / "runs" / "train", "train")
    record = folder.read_record()
    assert moved is None
    assert folder.logs.is_dir()
    assert (record["schema_version"], record["status"], record["command"]) == (
        1,
        "preparing",
        "train",
    )
    assert record["process"]["pid"] == os.getpid()
    assert record["exit_code"] is record["error"] is record["ended"] is None


def test_older_runs_are_moved_to_the_first_free_number(tmp_path):
    place = tmp_path / "train"
    for number in range(3):
        folder, moved = begin(place, "train")
        folder.update_record(number=number)
        finish(folder)
        assert moved == (tmp_path / f"train.{number}" if number else None)
    assert [RunFolder(tmp_path / f"train.{n}").read_record()["number"] for n in (1, 2)] == [0, 1]
    assert RunFolder(place).read_record()["number"] == 2


def test_run_that_is_still_going_on_is_left_alone(tmp_path):
    begin(tmp_path / "train", "train")
    with pytest.raises(ConfigError, match="whose run is still going on"):
        begin(tmp_path / "train", "train")


def test_run_whose_process_is_gone_is_moved(tmp_path):
    folder, _ = begin(tmp_path / "train", "train")
    process = folder.read_record()["process"]
    folder.update_record(process={**process, "created": process["created"] - 1})
    _, moved = begin(tmp_path / "train", "train")
    assert moved == tmp_path / "train.1"


def test_folder_with_other_files_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("work")
    with pytest.raises(ConfigError, match=r"an empty folder or an older run, got .* other files"):
        begin(tmp_path, "train")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "train").write_text("x")
    with pytest.raises(ConfigError, match="expected a folder, got the file"):
        check_output_dir(tmp_path / "train")


def test_empty_folder_is_used(tmp_path):
    folder, moved = begin(tmp_path, "train")
    assert moved is None
    assert folder.record.is_file()


@pytest.mark.parametrize(
    ("code", "status"), [(9, "failed"), (130, "interrupted"), (75, "interrupted")]
)
def test_first_reason_for_a_failure_stays(tmp_path, code, status):
    folder, _ = begin(tmp_path / "train", "train")
    folder.fail("DivergedError", "loss of step 3", code, rank=1)
    folder.fail("HangError", "rank 0 is gone", 5, rank=0)
    record = folder.read_record()
    assert (record["status"], record["exit_code"]) == (status, code)
    assert record["error"] == {"type": "DivergedError", "message": "loss of step 3", "rank": 1}


def test_record_is_replaced_whole_and_leaves_no_other_file(tmp_path):
    folder, _ = begin(tmp_path / "train", "train")
    before = sorted(entry.name for entry in folder.path.iterdir())
    folder.update_record(measured={"eval_loss": 3.0})
    assert sorted(entry.name for entry in folder.path.iterdir()) == before
    assert json.loads(folder.record.read_text())["measured"] == {"eval_loss": 3.0}


def test_folder_without_a_record_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a run's folder with run\.json"):
        RunFolder(tmp_path).read_record()
