"""Checkpoints in object stores: in the memory of one process, and shared by several."""

import re
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from checkpoint.test_save_and_load import resumes, train
from checkpoint.test_save_failures import model_and_optimizer, weights
from fullshard import saving
from fullshard.checkpoint import commit, storage
from fullshard.checkpoint.retain import checkpoints_in, newest_complete
from fullshard.checkpoint.storage import StorePath, storage_path
from fullshard.errors import CheckpointError
from support.object_store import ON_REQUEST, at_request
from support.scripts import error_of

MANY = 400  # more requests than in any save


@pytest.fixture
def memory(request):
    """Returns the URL of an empty folder in this process's memory."""
    name = f"memory://{request.node.name.replace('/', '-')}"
    yield name
    store = fsspec.filesystem("memory")
    if store.exists(name):
        store.rm(name, recursive=True)


def url_of(folder):
    return f"objects:/{folder}"


def changed(model):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return weights(model)


def equal(model, wanted):
    return all(map(torch.equal, weights(model), wanted))


def names_of(url):
    return sorted(path.name for path in storage_path(url).iterdir())


# ---- one process, in memory ----------------------------------------------------------------------


def test_a_store_without_checkpoints_is_named():
    with pytest.raises(CheckpointError, match="got 'memory://nowhere', which does not exist"):
        newest_complete(storage_path("memory://nowhere"))


def test_the_path_of_a_store_is_its_url_also_after_pathlib_joined_its_slashes():
    for written in ("s3://bucket/a/b", Path("s3://bucket/a/b"), storage_path("s3://bucket/a/b")):
        found = storage_path(written)
        assert isinstance(found, StorePath)
        assert (str(found), str(found.parent / "c")) == ("s3://bucket/a/b", "s3://bucket/a/c")
        assert found.resolve() == found
    assert storage_path("file:///tmp/x") == Path("/tmp/x")
    assert type(storage_path("runs/a")) is type(Path())


def test_names_with_brackets_remove_nothing_else(memory):
    model, optimizer = model_and_optimizer()
    for sweep in ("run1", "run[12]"):
        fs.save(f"{memory}/{sweep}", model, optimizer, step=1)
    storage.remove_tree(storage_path(f"{memory}/run[12]/step-00000001"))
    assert [found.step for found in checkpoints_in(storage_path(f"{memory}/run1"))] == [1]
    assert checkpoints_in(storage_path(f"{memory}/run[12]")) == []


def test_an_export_into_a_store_is_refused(fullshard, memory, tmp_path):
    model, optimizer = model_and_optimizer()
    fs.save(tmp_path, model, optimizer, step=1)
    done = fullshard("ckpt", "export", str(tmp_path), memory, code=7)
    assert "FOLDER: expected a local folder, got 'memory://" in done.err


def test_save_load_retain_and_the_commands_work_in_memory(fullshard, memory, tmp_path):
    model, optimizer = model_and_optimizer()
    for step in (1, 2, 3):
        wanted = changed(model)
        settings = saving.SaveSettings(step=step, keep=2)
        path = saving.save(storage_path(memory), model, optimizer, {"seed": 5}, settings)
    assert str(path) == f"{memory}/step-00000003"
    assert names_of(memory) == ["step-00000002", "step-00000003"]
    assert [name.partition("-")[0] for name in names_of(path)] == ["COMPLETE.json", "files"]
    changed(model)
    assert fs.load(memory, model, optimizer) == {"seed": 5, "step": 3}
    assert equal(model, wanted)

    listed = fullshard("ckpt", "ls", memory, "--json").json
    assert listed["newest"] == str(path)
    assert [entry["complete"] for entry in listed["checkpoints"]] == [True, True]
    assert fullshard("ckpt", "inspect", memory, "--json").json["step"] == 3
    assert "WHOLE" in fullshard("ckpt", "verify", memory).out
    assert fullshard("ckpt", "export", path, tmp_path / "dcp", "--format", "dcp").exit_code == 0
    assert fullshard("ckpt", "diff", memory, path).exit_code == 0
    assert fullshard("ckpt", "prune", memory, "--keep", "1").exit_code == 0
    assert names_of(memory) == ["step-00000003"]


def test_damage_is_found_and_an_older_checkpoint_is_loaded(fullshard, memory):
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        path = fs.save(memory, model, optimizer, step=step)
    store = fsspec.filesystem("memory")
    [file] = [name for name in store.find(str(path)) if "/model-" in name]
    data = bytearray(store.cat_file(file))
    data[-1] ^= 1
    store.pipe_file(file, bytes(data))
    done = fullshard("ckpt", "verify", path, "--json", code=7)
    assert [row["file"] for row in done.json["damaged"]] == ["model-00000.safetensors"]
    assert fs.load(memory, model, optimizer)["step"] == 1
    store.rm_file(file)
    assert newest_complete(storage_path(memory)).step == 1


def test_a_copy_of_a_stores_checkpoint_is_read_from_a_folder(memory, tmp_path):
    model, optimizer = model_and_optimizer()
    fs.save(memory, model, optimizer, step=4)
    wanted = weights(model)
    fsspec.filesystem("memory").get(memory, str(tmp_path / "copy"), recursive=True)
    changed(model)
    assert fs.load(tmp_path / "copy", model, optimizer)["step"] == 4
    assert equal(model, wanted)
    fs.save(tmp_path / "copy", model, optimizer, step=4)
    assert not any(path.is_dir() for path in (tmp_path / "copy" / "step-00000004").iterdir())


def test_a_store_folder_with_other_contents_is_not_replaced(memory):
    model, _ = model_and_optimizer()
    fsspec.filesystem("memory").pipe_file(f"{memory}/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"it contains notes\.txt"):
        fs.save(memory, model)
    assert names_of(memory) == ["notes.txt"]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://bucket/x", "Install s3fs to access S3"),
        ("gss://x", "a protocol that fsspec knows, got 'gss'. Did you mean gs?"),
    ],
)
def test_a_missing_package_or_protocol_is_named(url, what, monkeypatch):
    model, _ = model_and_optimizer()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=re.escape(what)):
        fs.save(url, model)
    with pytest.raises(CheckpointError, match=re.escape(what)):
        fs.load(url, model)


# ---- several processes ---------------------------------------------------------------------------


def resumes_from(url, wait):
    resumes(url, None, wait)


@pytest.mark.short(1)
@pytest.mark.parametrize("wait", [False, True])
def test_a_run_resumed_from_a_store_is_bit_identical(ranks, tmp_path, wait):
    ranks(2)(resumes_from, url_of(tmp_path / "run"), wait)
    assert names_of(url_of(tmp_path / "run")) == ["step-00000003"]


def write(url):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(2), dist.get_world_size())
    fs.save(url, model, optimizer, step=2)
    return fs.full_state_dict(model, rank0_only=False)


def read(url):
    model, optimizer = model_and_optimizer()
    changed(model)
    assert fs.load(url, model, optimizer)["step"] == 2
    return fs.full_state_dict(model, rank0_only=False)


def test_another_number_of_ranks_reads_the_same_weights(ranks, tmp_path):
    url = url_of(tmp_path)
    wanted = ranks(3)(write, url)[0]
    for found in ranks(2)(read, url):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def save_in_memory(url):
    model, _ = model_and_optimizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "FAREWELL_S", 0.05)
        return error_of(lambda: fs.save(url, model, step=1))


def test_a_memory_store_is_refused_with_two_processes(ranks):
    for said in ranks(2)(save_in_memory, "memory://apart"):
        assert "expected a folder that all ranks share; rank 1 does not see" in said


def refuse(_request, _name):
    raise OSError(5, "the store refused")


def one_request_fails(url):
    """Fails each request of each rank once; the engine repeats it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "PAUSES_S", (0.0,))
        return _each_request_once(url)


def _each_request_once(url):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = model_and_optimizer()
    fs.save(url, model, optimizer, step=1)
    good, failed, number = weights(model), 0, 0
    for whose in range(size):
        for number in range(1, MANY):
            wanted = changed(model)
            with at_request(number if rank == whose else 0, refuse) as made:
                said = error_of(lambda: fs.save(url, model, optimizer, step=1))
            told: list[Any] = [None] * size
            dist.all_gather_object(told, (said, len(made)))
            assert len({text for text, _ in told}) == 1, (told, made)
            assert said.startswith(("NO ERROR", "CheckpointError")), said
            if said.startswith("NO ERROR"):
                good = wanted
            else:  # an upload is not repeated
                assert ".safetensors" in said, said
                failed += 1
            changed(model)
            assert fs.load(url, model, optimizer)["step"] == 1, made[-1]
            assert equal(model, good), (whose, number, said)
            dist.barrier()
            if told[whose][1] < number:
                break
    return failed, number


@pytest.mark.long
def test_a_lost_request_of_any_rank_loses_no_checkpoint(ranks, tmp_path):
    url = url_of(tmp_path)
    found = ranks(2)(one_request_fails, url)
    assert found[0] == found[1]
    assert found[0][1] > 10
    assert names_of(url) == ["step-00000001"]
    assert [n.partition("-")[0] for n in names_of(f"{url}/step-00000001")] == LAID_OUT


LAID_OUT = ["COMPLETE.json", "files"]
OBJECTS = ("model-", "optimizer-", "rank-00000.json", "rank-00001.json", "index.json", "COMPLETE")


def store_refuses(url):
    """The store rejects objects of one kind, then accepts them again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "PAUSES_S", (0.0,))
        return _each_kind_refused(url)


def _each_kind_refused(url):
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(1), dist.get_world_size())
    fs.save(url, model, optimizer, step=1)
    good, found = weights(model), []
    for kind in OBJECTS:
        changed(model)

        def refuse_kind(request, name, kind=kind):
            if request == "put" and Path(name).name.startswith(kind):
                raise OSError(5, "the store refused")

        ON_REQUEST.append(refuse_kind)
        found.append(error_of(lambda: fs.save(url, model, optimizer, step=2)))
        dist.barrier()
        assert fs.load(url, model, optimizer)["step"] == 1, kind
        assert equal(model, good), kind
        ON_REQUEST.remove(refuse_kind)
        dist.barrier()
    fs.save(url, model, optimizer, step=2)
    assert fs.load(url, model, optimizer)["step"] == 2
    dist.barrier()
    return found


def test_a_store_that_refuses_objects_is_one_error_on_all_ranks(ranks, tmp_path):
    url = url_of(tmp_path)
    first, second = ranks(2)(store_refuses, url)
    assert first == second
    for said in first:
        assert said.startswith("CheckpointError: "), said
        assert "could not: the store refused" in said, said
    assert names_of(url) == ["step-00000001", "step-00000002"]
    assert [n.partition("-")[0] for n in names_of(f"{url}/step-00000002")] == LAID_OUT


def test_a_commit_that_only_seemed_to_fail_is_kept(tmp_path):
    """The request succeeded but its answer was lost, so its files must stay."""
    model, optimizer = model_and_optimizer()
    url = url_of(tmp_path / "latest")
    fs.save(url, model, optimizer)
    wanted = changed(model)

    real = saving.commit.write_text

    def put_and_lose(path, text):
        facts = real(path, text)
        if path.name == "COMPLETE.json":
            raise TimeoutError("no answer")
        return facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_text", put_and_lose)
        with pytest.raises(CheckpointError, match="no answer"):
            fs.save(url, model, optimizer)
    changed(model)
    fs.load(url, model, optimizer)
    assert equal(model, wanted)


def test_an_unfinished_save_is_skipped_named_and_removed(fullshard, tmp_path):
    model, optimizer = model_and_optimizer()
    url = url_of(tmp_path)
    fs.save(url, model, optimizer, step=1)
    left = tmp_path / "step-00000002" / "files-3f2a3f2a3f2a"
    left.mkdir(parents=True)
    (left / "model-00000.safetensors").write_bytes(b"half")
    assert fs.load(url, model, optimizer)["step"] == 1
    assert "NOT COMPLETE: it has no COMPLETE.json" in fullshard("ckpt", "ls", url).out
    assert checkpoints_in(storage_path(url))[0].is_leftover
    fs.save(url, model, optimizer, step=3)
    assert names_of(url) == ["step-00000001", "step-00000003"]
