"""Folders that this version did not write are reported, and never read, replaced or removed."""

import json

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.checkpoint import commit
from fullshard.checkpoint.read import remove, superfluous
from fullshard.checkpoint.retain import checkpoints_in, newest_complete, tidy
from fullshard.errors import CheckpointError
from fullshard.formats.source import whole_or_nothing


@pytest.fixture
def model():
    torch.manual_seed(0)
    return fs.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def of_later_version(folder):
    last = folder / "COMPLETE.json"
    last.write_text(json.dumps({**json.loads(last.read_text()), "version": 7}))


def of_another_program(folder):
    (folder / "COMPLETE.json").write_text('{"format": "other", "version": 1}')


def with_files_of_others(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.safetensors").write_text("weights of somebody")


FOREIGN = (of_later_version, of_another_program, with_files_of_others)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("become", FOREIGN)
def test_a_newer_foreign_folder_is_reported_and_nothing_is_written_over_it(
    fullshard, tmp_path, model, become
):
    for step in (1, 2):
        fs.save(tmp_path, model, step=step)
    newest = tmp_path / "step-00000002"
    become(newest)
    before = content(newest)
    assert "NOT OURS" in fullshard("ckpt", "ls", tmp_path).out
    for refused in (
        lambda: newest_complete(tmp_path),
        lambda: fs.load(tmp_path, model),
    ):
        with pytest.raises(CheckpointError, match=r"step-00000002.*that this version of fullshard"):
            refused()
    with pytest.raises(CheckpointError, match=r"step-00000002.*contains other files"):
        fs.save(tmp_path, model, step=2)
    fs.save(tmp_path, model, step=3)  # a newer one of ours is resumed again
    assert newest_complete(tmp_path).step == 3
    assert fs.load(tmp_path, model)["step"] == 3
    if become is with_files_of_others:
        assert "it contains model.safetensors, but no index.json" in checkpoints_in(tmp_path)[1].why
    done = fullshard("ckpt", "prune", tmp_path, "--keep", "1", code=0)
    assert f"NOT OURS  {newest}" in done.out.replace("\n", "")
    assert not (tmp_path / "step-00000001").exists()
    assert content(newest) == before


@pytest.mark.parametrize("step", [2, 3])
def test_a_complete_save_of_a_later_version_is_kept(tmp_path, model, step):
    for one in (1, 2):
        fs.save(tmp_path, model, step=one)
    of_later_version(tmp_path / "step-00000002")
    saving = tmp_path / f".step-{step:08d}.saving-3f2a"
    (tmp_path / "step-00000002").rename(saving)
    before = content(saving)
    with pytest.raises(CheckpointError, match="expected version 2 or older; got 7"):
        newest_complete(tmp_path)
    fs.save(tmp_path, model, step=4)
    tidy(tmp_path / "step-00000005")
    remove(superfluous(tmp_path, 1))
    assert content(saving) == before
    assert [found.path.name for found in checkpoints_in(tmp_path)] == ["step-00000004", saving.name]


@pytest.mark.parametrize("left", ["empty", "without its end", "with half its end"])
def test_leftovers_of_our_own_saves_are_replaced(tmp_path, model, left):
    fs.save(tmp_path, model, step=1)
    folder = tmp_path / "step-00000001"
    (folder / "COMPLETE.json").write_text('{"format": ')
    if left != "with half its end":
        (folder / "COMPLETE.json").unlink()
    if left == "empty":
        for path in folder.iterdir():
            path.unlink()
    assert not checkpoints_in(tmp_path)[0].is_foreign
    fs.save(tmp_path, model, step=1)
    assert newest_complete(tmp_path).step == 1


def test_a_folder_of_another_tool_is_answered_with_the_command_that_imports_it(tmp_path):
    folder = tmp_path / "my runs" / "checkpoint-500"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError) as caught:
        newest_complete(folder)
    assert f"fullshard ckpt import '{folder}' '{folder}-imported'" in str(caught.value)


def test_files_added_to_a_users_folder_during_an_export_stay(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()

    def export():
        with whole_or_nothing(folder) as aside:
            (aside / "model.safetensors").write_text("ours")
            (folder / "notes.txt").write_text("theirs")

    with pytest.raises(CheckpointError, match="not empty"):
        export()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "notes.txt").read_text() == "theirs"
    (folder / "notes.txt").unlink()
    with whole_or_nothing(folder) as aside:
        (aside / "model.safetensors").write_text("ours")
    assert (folder / "model.safetensors").read_text() == "ours"


def test_files_added_at_a_checkpoints_path_during_its_save_stay(tmp_path, model):
    place = commit.claim(tmp_path / "last")
    commit.join(place, 0)
    commit.report(place, 0, [])
    place.target.mkdir()
    (place.target / "notes.txt").write_text("theirs")
    with pytest.raises(CheckpointError, match=r"it contains notes\.txt, but no index\.json"):
        commit.conclude(place, 1, commit.Documents(None, {}, {}))
    assert content(tmp_path) == {"last/notes.txt": b"theirs"}
