"""Runs with checkpoints in an object store; commands and ranks are separate processes."""

import json
import os
import shutil

import pytest

from fullshard.checkpoint.storage import storage_path
from fullshard.errors import CheckpointError, ConfigError
from fullshard.launch import run_lock
from fullshard.launch.run_lock import StoreLock, is_holder
from fullshard.observe.metrics import read_rows
from fullshard.run.folder import RunFolder, check_output_dir
from fullshard.run.resume import check_lock
from fullshard.saving import Saves
from support import forked
from support.object_store import PLUGINS
from support.processes import close_folders, python
from train.test_resume import write

pytestmark = pytest.mark.timeout(300)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def fullshard(*words, code=0, launcher=()):
    paths = os.pathsep.join([str(PLUGINS), os.environ["PYTHONPATH"]])
    env = {**os.environ, "PYTHONPATH": paths}
    done = python(*launcher, "-m", "fullshard", *words, run=forked.run, env=env, code=code)
    return done.stdout if code == 0 else done.stdout + done.stderr


def losses(folder):
    rows = read_rows(folder / "run" / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.long
def test_a_run_whose_folder_is_lost_resumes_from_the_store(tmp_path):
    store = f"objects:/{tmp_path}/bucket/run"
    config = write(tmp_path)
    words = ("train", config, "save_steps=2", "save_total_limit=2")
    words += ("eval_strategy=no", "lr_scheduler_type=constant")
    fullshard(*words, "max_steps=6", f"training.output_dir={tmp_path}/whole/run")
    elsewhere = f"training.checkpoint_dir={store}"
    fullshard(*words, "max_steps=4", elsewhere)
    run = tmp_path / "run"
    assert not (run / "checkpoints").exists()
    assert str(RunFolder(run).checkpoints) == store
    listed = json.loads(fullshard("ckpt", "ls", run, "--json"))
    assert [one["step"] for one in listed["checkpoints"]] == [4, 2]

    said = fullshard(*words, "max_steps=6", elsewhere, "--resume", "never", code=2)
    assert "training.checkpoint_dir: expected a folder without checkpoints" in said
    with StoreLock(storage_path(store), "another run"):
        said = fullshard(*words, "max_steps=6", elsewhere, code=2)
    assert f"whose run is still active (process {os.getpid()} on host" in said
    shutil.rmtree(run)  # the disk of a pod
    fullshard(*words, "max_steps=6", elsewhere)
    wanted = losses(tmp_path / "whole")
    assert losses(tmp_path) == {step: wanted[step] for step in (5, 6)}
    fullshard(*words, "max_steps=7", elsewhere)
    assert sorted(losses(tmp_path)) == [5, 6, 7]
    assert "WHOLE" in fullshard("ckpt", "verify", run)
    assert fullshard("generate", run, "--prompt", "1 and", "--max-new-tokens", "2")


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "code"), [((), 7), (TORCHRUN, 1)], ids=["alone", "torchrun"])
def test_a_folder_where_another_process_saves_is_refused_before_the_first_step(
    tmp_path, launcher, code
):
    Saves().claim_folder(place := tmp_path / "elsewhere")
    words = ("train", write(tmp_path), "max_steps=2", f"training.checkpoint_dir={place}")
    said = fullshard(*words, code=code, launcher=launcher)
    assert "expected a folder that no other run uses; another process saves its steps" in said
    assert losses(tmp_path) == {}
    # Under torchrun, rank 0 finds it while the other ranks wait, and starts no run.
    assert (tmp_path / "run/run.json").exists() is (launcher == ())
    close_folders(place)
    fullshard(*words, launcher=launcher)
    assert sorted(losses(tmp_path)) == [1, 2]


def test_one_run_locks_a_store_until_it_no_longer_answers(tmp_path, monkeypatch):
    for name, seconds in {"BEAT_S": 0.05, "TOGETHER_S": 0.0}.items():
        monkeypatch.setattr(run_lock, name, seconds)
    beats, repeated = [], run_lock.repeated
    monkeypatch.setattr(
        run_lock, "repeated", lambda beat, seconds: beats.append(beat) or repeated(beat, seconds)
    )
    place = storage_path(f"objects:/{tmp_path}/bucket/run")
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.record.write_text('{"id": "x", "holds": "first"}')
    (folder.path / "checkpoints.txt").write_text(f"{place}\n")
    with StoreLock(place, "first") as first:
        with pytest.raises(
            ConfigError, match="a folder to which no other run saves, got 'objects://"
        ):
            StoreLock(place, "second")
        check_lock(folder)
        first.end_beats()  # as if the machine were suspended
        (place / run_lock.LOCK).unlink()  # as a cleaner of old objects does
        check_lock(folder)
        beats[0]()
        assert (place / run_lock.LOCK).exists()
        monkeypatch.setattr(run_lock, "WATCH_S", 0.1)
        with StoreLock(place, "second"):
            with pytest.raises(CheckpointError, match="another run started there"):
                check_lock(folder)
            first.close()
            assert is_holder(place, "second")
    assert not is_holder(place, "first")  # wakes after the second has ended
    (folder.path / "checkpoints.txt").write_text("memory://run\n")
    check_lock(folder)  # of the process of the launcher


def test_an_output_dir_in_a_store_is_refused_with_the_key_for_checkpoints(tmp_path):
    with pytest.raises(ConfigError, match=r"s3://b/run'. Set it as training\.checkpoint_dir"):
        check_output_dir(tmp_path.__class__("s3://b/run"))
