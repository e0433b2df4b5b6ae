"""A run's folder is never overwritten or shared, and always records why the run ended."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from fullshard import saving
from fullshard.checkpoint.files import write_text
from fullshard.cli.app import run
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.errors import CheckpointError, ConfigError, WillNotFitError
from fullshard.launch import run_lock
from fullshard.observe.metrics import EvalRow, MetricsWriter, SaveRow, read_rows
from fullshard.observe.report import write_report
from fullshard.run import start as run_start
from fullshard.run.folder import (
    LAST_SAVED,
    RunFolder,
    RunStatus,
    begin,
    check_output_dir,
)
from fullshard.run.loop import Patience
from fullshard.run.optim import StepPlan
from fullshard.run.resume import RunCheckpoints


def finish(folder):
    folder.update_record(status=RunStatus.FINISHED, exit_code=0)


def make(place, **how):
    """Creates a run whose process has ended."""
    with begin(place, "train", **how) as made:
        return made


def test_a_failed_save_is_not_a_saved_step(tmp_path):
    def fails():
        raise CheckpointError("disk: it is full")

    def save(*_):
        saving.SAVES.start(fails)
        while saving.SAVES.under_way:
            pass

    trainee: Any = SimpleNamespace(texts={}, save=save)
    steps = StepPlan(9, 0, 1, 0, 5, SampleOrder(60, BatchShape(4, 1, 1), seed=1))
    with begin(tmp_path / "run", "train") as (folder, *_):
        (folder.data / "tokenizer").mkdir(parents=True)
        keeper = RunCheckpoints(folder, trainee, steps, None, [], Patience(None))
        with pytest.raises(CheckpointError, match="disk: it is full"):
            keeper.keep(5, stopping=False, last=False)
        assert LAST_SAVED not in folder.read_record()
        folder.checkpoints.mkdir()
        no_files = OSError(errno.EROFS, "it is mounted to be read")
        said = pytest.raises(CheckpointError, match="could not: it is mounted to be read")
        with patch("tempfile.TemporaryFile", side_effect=no_files), said:  # before the first step
            RunCheckpoints(folder, trainee, steps, None, [], Patience(None))


def in_another_process(code, *args):
    """Runs Python that holds or takes a folder, and prints a line when it has."""
    words = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


HOLD = """
import sys
from pathlib import Path
from fullshard.run.folder import begin
from fullshard.errors import CheckpointError, ConfigError, WillNotFitError
sys.stdin.readline()
try:
    with begin(Path(sys.argv[1]), "train", continues=len(sys.argv) > 2):
        print("held", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print(error, flush=True)
"""


def test_new_run_is_recorded_as_preparing(tmp_path):
    folder, moved = make(tmp_path / "runs" / "train")
    record = folder.read_record()
    assert moved is None
    assert folder.logs.is_dir()
    made = record["schema_version"], record["status"], record["command"]
    assert made == (1, "preparing", "train")
    assert record["process"]["pid"] == os.getpid()
    assert record["exit_code"] is record["error"] is record["ended"] is None


def test_older_runs_are_moved_to_the_first_free_number(tmp_path):
    place = tmp_path / "train"
    for number in range(3):
        folder, moved = make(place)
        folder.update_record(number=number)
        finish(folder)
        assert moved == (tmp_path / f"train.{number}" if number else None)
    assert [RunFolder(tmp_path / f"train.{n}").read_record()["number"] for n in (1, 2)] == [0, 1]
    assert RunFolder(place).read_record()["number"] == 2


def test_an_older_run_behind_a_link_is_moved_and_the_link_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "train").symlink_to(tmp_path / "disk")
    for number in range(2):
        folder, moved = make(tmp_path / "train")
        assert moved == (tmp_path / "disk.1" if number else None)
    assert (tmp_path / "train").readlink() == tmp_path / "disk"
    assert (tmp_path / "disk" / "run.json").samefile(folder.record)


@pytest.mark.parametrize("place", [".", ".."])
def test_older_run_around_the_working_directory_is_not_moved(tmp_path, monkeypatch, place):
    make(tmp_path / "train")
    (tmp_path / "train" / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "train" / ("inside" if place == ".." else ""))
    with pytest.raises(ConfigError, match=r"can be moved aside, got .* the working directory"):
        make(Path(place))
    assert [entry.name for entry in tmp_path.iterdir()] == ["train"]


def test_a_run_does_not_write_into_the_record_of_its_successor(tmp_path, caplog):
    folder, _ = make(tmp_path / "train")
    folder.path.rename(tmp_path / "moved")
    with begin(tmp_path / "train", "sft") as (other, _):
        before = other.record.read_bytes()
        folder.fail("HangError", "rank 0 is gone", 5, final=True)
        with pytest.raises(ConfigError, match="the run's folder was moved"):
            finish(folder)
        assert other.record.read_bytes() == before
    assert "another run uses its path" in caplog.text


def test_an_active_run_is_not_changed(tmp_path):
    with begin(tmp_path / "train", "train") as (folder, _):
        before = folder.record.read_bytes()
        for continues in (False, True):
            with pytest.raises(ConfigError, match=f"whose run is still .*process {os.getpid()} on"):
                make(tmp_path / "train", continues=continues)
        with pytest.raises(ConfigError, match="whose run is still active"):
            check_output_dir(tmp_path / "train")
        assert folder.record.read_bytes() == before


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path):
    folder, _ = make(tmp_path / "train")
    finish(folder)
    (folder.path / run_lock.LOCK).unlink()
    (folder.path / run_lock.LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"training\.output_dir: .*Is a directory"):
        make(tmp_path / "train")


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_lock_that_is_no_file_is_refused_and_not_changed(tmp_path, kind):
    folder, _ = make(tmp_path / "train")
    finish(folder)
    lock, notes = folder.path / run_lock.LOCK, tmp_path / "notes"
    notes.write_text("work")
    lock.unlink()
    lock.symlink_to(notes) if kind == "a link" else os.mkfifo(lock)
    assert not run_lock.is_held(folder.path)  # and a pipe without a writer does not block
    with pytest.raises(ConfigError, match=f"output_dir: .*'{lock}'"):
        make(tmp_path / "train")
    assert notes.read_text() == "work"


@pytest.mark.parametrize("after", [EvalRow(2, 2.0), SaveRow(2, 0.1)])
@pytest.mark.parametrize("there", ["nothing", "another run", "a file"])
def test_a_run_whose_folder_disappeared_reports_it(tmp_path, there, after):
    folder, _ = make(tmp_path / "train")
    writer = MetricsWriter(folder.metrics)
    writer.write(EvalRow(1, 2.0))
    folder.path.rename(tmp_path / "moved")
    if there == "another run":
        MetricsWriter(make(tmp_path / "train")[0].metrics).close()
    elif there == "a file":
        folder.path.write_text("")
    with pytest.raises(ConfigError, match="was moved, removed or replaced"):
        writer.write(after)
    writer.close()


@pytest.mark.short(2)
@pytest.mark.parametrize("older", ["none", "unfinished", "finished"])
def test_one_of_two_simultaneous_starts_is_refused(tmp_path, older):
    place = tmp_path / "train"
    if older != "none":
        folder, _ = make(place)
        folder.update_record(status=RunStatus.PREPARING if older == "unfinished" else "finished")
    continues = ["goes on"] if older == "unfinished" else []
    starts = [in_another_process(HOLD, place, *continues) for _ in range(3)]
    for start in starts:
        start.stdin.write("go\n")
        start.stdin.flush()
    said = [start.stdout.readline() for start in starts]
    live = json.loads((place / "run.json").read_text())["process"]["pid"]
    ends = [start.communicate("end\n") and start.returncode for start in starts]
    assert sorted(line == "held\n" for line in said) == [False, False, True], said
    assert starts[said.index("held\n")].pid == live
    assert all("whose run is still active" in line for line in said if line != "held\n")
    assert ends == [0, 0, 0]


def test_a_removed_lock_still_protects_the_run(tmp_path):
    holder = in_another_process(HOLD, tmp_path / "train")
    holder.stdin.write("go\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "held\n"
    (tmp_path / "train" / run_lock.LOCK).unlink()
    for _ in range(2):  # the first leaves its own lock there
        assert run_lock.is_held(tmp_path / "train")
        with pytest.raises(ConfigError, match="whose run is still active"):
            make(tmp_path / "train", continues=True)
    RunFolder(tmp_path / "train").update_record(status="running")  # ranks are still writing
    holder.communicate("end\n")
    assert not run_lock.is_held(tmp_path / "train")
    make(tmp_path / "train", continues=True)


def test_two_readers_of_a_folder_do_not_mistake_each_other_for_its_run(tmp_path):
    place = make(tmp_path / "train")[0].path
    for path in (place, place / run_lock.LOCK):
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # like `is_held` of another process
        assert not run_lock.is_held(place)
        os.close(descriptor)


def test_a_removed_record_is_not_rewritten_in_part(tmp_path):
    folder = make(tmp_path / "train")[0]
    folder.record.unlink()
    with pytest.raises(ConfigError, match=r"a run's folder with run\.json"):
        folder.update_record(**{LAST_SAVED: 3})
    assert not folder.record.exists()


def test_the_folder_of_a_killed_run_is_free_at_once(tmp_path):
    holder = in_another_process(HOLD, tmp_path / "train")
    holder.stdin.write("go\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    record = RunFolder(tmp_path / "train").read_record()
    assert record["status"] == "preparing"
    _, moved = make(tmp_path / "train")
    assert moved == tmp_path / "train.1"
    record = RunFolder(moved).read_record()
    assert (record["status"], record["exit_code"]) == ("failed", 5)
    assert "ended without recording the reason" in record["error"]["message"]


def test_report_of_a_folder_without_a_run_writes_nothing_there(tmp_path):
    assert run(["report", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alive", [True, False])
def test_run_of_another_host_is_alive_while_its_lock_is_touched(tmp_path, monkeypatch, alive):
    """If the file system does not share locks between hosts, heartbeats do."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(run_lock, "WATCH_S", 0.5)
    folder, _ = make(tmp_path / "train")
    lock = folder.path / run_lock.LOCK
    lock.write_text("process 7 on host elsewhere\nanother kernel\n")
    beats = threading.Timer(0.2, lambda: os.utime(lock, (1e9, 1e9)) if alive else None)
    beats.start()
    if alive:
        with pytest.raises(ConfigError, match="process 7 on host elsewhere"):
            make(tmp_path / "train")
    else:
        assert make(tmp_path / "train")[1] == tmp_path / "train.1"
    beats.join()


def test_full_disk_is_recorded_as_the_reason(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "train.npy")

    def start():
        with begin(tmp_path / "train", "train"):
            monkeypatch.setattr(os, "posix_fallocate", full)
            full()

    with pytest.raises(OSError, match="No space left"):
        start()
    folder = RunFolder(tmp_path / "train")
    record = folder.read_record()
    assert (record["status"], record["exit_code"]) == ("failed", 3)
    assert record["error"]["type"] == "WillNotFitError"
    assert "expected room to write train.npy" in record["error"]["message"]
    assert {entry.name for entry in folder.path.iterdir()} == {".lock", "logs", "run.json"}


def test_a_disk_that_is_full_from_the_start_is_the_reported_reason(tmp_path, monkeypatch):
    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        make(tmp_path / "run")


def test_empty_folder_is_used(tmp_path):
    folder, moved = make(tmp_path)
    assert moved is None
    assert folder.record.is_file()


@pytest.mark.parametrize(
    ("code", "status"), [(9, "failed"), (130, "interrupted"), (75, "interrupted")]
)
def test_first_reason_for_a_failure_stays(tmp_path, code, status):
    folder, _ = make(tmp_path / "train")
    folder.fail("DivergedError", "loss of step 3", code, rank=1)
    folder.fail("HangError", "rank 0 is gone", 5, rank=0, final=status == "interrupted")
    record = folder.read_record()
    assert (record["status"], record["exit_code"]) == (status, code)
    assert record["error"] == {"type": "DivergedError", "message": "loss of step 3", "rank": 1}


MADE = "output_dir: expected a folder that can be created"


@pytest.mark.parametrize("start", [make, check_output_dir])  # the run, and --dry-run
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("a\0b", MADE),
        ("x" * 5000, MADE),
        ("link", MADE),
        ("/proc/x", MADE),
        ("/proc/self/task", MADE),
        ("file", "expected a folder, got the file"),
        (".", "an empty folder or an older run, got .* other files"),
    ],
    ids=range(7),
)
def test_an_unusable_folder_is_refused_and_not_changed(tmp_path, place, said, start):
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    (tmp_path / "file").write_text("work")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=said):
        start(tmp_path / place)
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_begins_where_a_refused_start_left_the_report_of_a_hang(tmp_path):
    (report := tmp_path / "run/logs/hang.txt").parent.mkdir(parents=True)
    report.write_text("rank 0 is gone\n")
    (others := report.with_name("notes.txt")).write_text("work")
    with pytest.raises(ConfigError, match="with other files and no run"):
        make(tmp_path / "run")
    others.unlink()
    assert make(tmp_path / "run")[0].record.is_file()


@pytest.mark.parametrize("start", [make, check_output_dir])
def test_a_full_disk_is_not_called_a_wrong_folder(tmp_path, monkeypatch, start):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(WillNotFitError, match="disk: expected room to write"):
        start(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_page_error_names_a_full_disk_or_a_wrong_folder(tmp_path, capsys):
    folder, _ = make(tmp_path / "train")
    finish(folder)
    assert run(["report", str(folder.path), "--out", "/dev/full"]) == 3
    assert "WillNotFitError: disk: expected room to write" in capsys.readouterr().err
    folder.report.mkdir()
    with pytest.raises(ConfigError, match=r"^expected a file .* got .*/report.html.*directory"):
        write_report(folder.path)


def test_report_that_fails_hides_no_other_failure(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr(run_start, "write_report", full)
    run_start.write_report_of_failure(RunFolder(tmp_path))
    assert "report.html could not be written: [Errno 28] No space left" in caplog.text


def test_a_report_of_odd_files_skips_them_or_raises_a_typed_error(tmp_path):
    record = {"command": "train", "status": "failed", "began": "now", "error": None}
    with pytest.raises(ConfigError, match=r"expected a run's folder with run\.json"):
        RunFolder(tmp_path).read_record()
    wrong = {**record, "measured": {}, "planned": 3}
    for odd in ([], {**record, "measured": 3}, wrong, {"measured": {}}):
        (tmp_path / "run.json").write_text(json.dumps(odd))
        with pytest.raises(ConfigError, match=r"RUN_DIR: .*a run's folder with run\.json"):
            write_report(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**record, "measured": {}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": "low"}\n')
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []
    for content in (b"\x80\xff", b"[]", b'{"arrays": 3}'):
        (tmp_path / "plan.json").write_bytes(content)
        assert write_report(tmp_path).is_file()
    for odd in ({"error": [1]}, {"planned": {"num_parameters": "many"}}):
        (tmp_path / "run.json").write_text(json.dumps({**record, "measured": {}, **odd}))
        with pytest.raises(ConfigError, match=r"RUN_DIR: .* expected files as a run writes them"):
            write_report(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="run folder: expected"):
        RunFolder(tmp_path).read_record()
    (tmp_path / "run.json").write_text(json.dumps({**record, "measured": {}, "schema_version": 2}))
    for read in (write_report, lambda path: RunFolder(path).read_record()):
        with pytest.raises(ConfigError, match="expected schema_version 1 or older, got 2"):
            read(tmp_path)


def test_a_file_that_cannot_be_written_completely_stays_unchanged(tmp_path):
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_text(path, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "old"


def test_a_start_leaves_hidden_files_of_others(tmp_path):
    make(tmp_path / "run")
    (tmp_path / "run" / ".notes.2026").write_text("mine")
    (tmp_path / "run" / ".cache.1").mkdir()
    left = [tmp_path / "run" / name for name in (".config.yaml.1", ".checkpoints.txt.1")]
    for file in left:
        file.write_text("left by a kill")
    folder, _ = make(tmp_path / "run", continues=True)
    assert (folder.path / ".notes.2026").read_text() == "mine"
    assert (folder.path / ".cache.1").is_dir()
    assert not any(file.exists() for file in left)


class Killed(BaseException):
    """Stands for SIGKILL: none of our code runs after it."""


@pytest.mark.parametrize("continues", [False, True])
def test_a_start_killed_at_any_call_keeps_the_initial_checkpoint(tmp_path, monkeypatch, continues):
    kept = {name: getattr(Path, name) for name in ("mkdir", "write_text", "replace", "unlink")}
    fields = {"resume": {"path": "/other", "required": True}, "planned": {"samples_per_step": 8}}
    if continues:
        make(tmp_path / "old", fields=lambda _: fields)
    for number in range(1, 20):
        place, made = tmp_path / str(number), list[str]()
        if continues:
            shutil.copytree(tmp_path / "old", place)

        def kill(path, *args, name, number=number, made=made, **more):
            made.append(name)
            if len(made) >= number:
                raise Killed
            return kept[name](path, *args, **more)

        with monkeypatch.context() as patched:
            for name in kept:
                patched.setattr(Path, name, partialmethod(kill, name=name))
            with contextlib.suppress(Killed):
                make(place, continues=continues, fields=lambda _: fields)
        for left in place.glob(".run.json.*"):
            left.rename(place / ".run.json.1")  # the next start is another process
        check_output_dir(place)  # it can be started again
        folder = RunFolder(place)
        if folder.record.is_file():
            record = folder.read_record()
            assert {name: record[name] for name in fields} == fields
        folder, _ = make(place, continues=folder.record.is_file())
        assert {path.name for path in folder.path.iterdir()} == {".lock", "logs", "run.json"}
        if len(made) < number:
            assert number > 3
            return
    raise AssertionError("more calls than were expected")
