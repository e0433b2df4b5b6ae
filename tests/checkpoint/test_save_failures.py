"""A save that fails at any call raises one error on all ranks and keeps the last checkpoint."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import saving
from fullshard.checkpoint import commit, read, retain
from fullshard.checkpoint.files import sync_folder
from fullshard.checkpoint.read import Checkpoint, choose, find_damage, remove, superfluous
from fullshard.checkpoint.retain import Found, checkpoints_in, newest_complete
from fullshard.errors import CheckpointError, EngineError, OutOfMemoryError
from fullshard.formats.dcp import write_dcp
from fullshard.formats.detect import open_source
from fullshard.formats.ours import write_checkpoint
from fullshard.saving import Saves
from support import forked
from support.models import perturbed
from support.processes import close_folders, python
from support.scripts import Tiny, error_of

CALLS = ("open", "posix_fallocate", "write", "fsync", "mkdir", "rename", "replace")
MANY = 200  # more calls than in any save


@contextmanager
def at_call(number, do):
    """Runs `meet` at the `number`-th system call of the writer; lists the calls."""
    made: list[str] = []
    kept = {name: getattr(os, name) for name in CALLS}

    def wrap(name):
        def call(*args, **kwargs):
            made.append(name)
            if len(made) == number:
                do(name)
            # Power does not fail here, so data written by a killed process is readable.
            return None if name == "fsync" else kept[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield made
    finally:
        for name, function in kept.items():
            setattr(os, name, function)


def disk_full(_name):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def model_and_optimizer():
    torch.manual_seed(0)
    model = fs.shard(perturbed(Tiny().double()))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model):
    return [p.to_local().clone() for p in model.parameters()]


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def fails_at_every_call(root, wait):
    """Each call of each rank fails once with a full disk; without `wait` every third."""
    rank, folder = dist.get_rank(), Path(root) / "steps"
    model, optimizer = model_and_optimizer()
    fs.save(folder, model, optimizer, step=1)
    good = weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    failures = 0
    for whose in range(dist.get_world_size()):
        for number in range(1, MANY) if wait else range(1 + whose, MANY, 3):
            with at_call(number if rank == whose else 0, disk_full) as made:
                try:
                    fs.save(folder, model, optimizer, step=2, wait=wait)
                    fs.wait()
                    said = ""
                except CheckpointError as error:
                    said = str(error)
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, (said, len(made) >= number))
            reached = told[whose][1]
            if not reached:
                assert told == [("", told[0][1]), ("", told[1][1])], told
                break
            assert len({text for text, _ in told}) == 1, told
            if said:
                assert "No space left on device" in said
                assert f"rank {whose} could not" in said
                assert left_in(folder)[-1] in ("step-00000001", "step-00000002"), left_in(folder)
            failures += bool(said)
            if rank == 0 and (folder / "step-00000002").exists():
                shutil.rmtree(folder / "step-00000002")
            dist.barrier()
            assert fs.load(folder, model, optimizer)["step"] == 1
            assert all(map(torch.equal, weights(model), good))
            dist.barrier()
    fs.save(folder, model, optimizer, step=2)
    dist.barrier()  # the first rank cleans up last
    assert left_in(folder) == ["step-00000001", "step-00000002"]
    return failures


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_full_disk_at_any_call_is_one_error_on_all_ranks(ranks, tmp_path, wait):
    found = ranks(2)(fails_at_every_call, str(tmp_path), wait)
    assert found[0] == found[1]
    assert found[0] > (25 if wait else 8)


def meet_everywhere(act, root, seed=None):
    """Runs `act` in one folder after another; each time the next call finds a full disk."""
    found: list[tuple[Path, str]] = []
    for number in range(1, MANY):
        folder, said = root / str(number), ""
        if seed is not None:
            shutil.copytree(seed, folder)
        with at_call(number, disk_full) as made:
            try:
                act(folder)
            except CheckpointError as error:
                said = str(error)
        found.append((folder, said))
        if len(made) < number:
            assert not said
            return found
        if said:
            assert "No space left on device" in said
    raise AssertionError("more calls than were expected")


def test_a_full_disk_during_removal_of_older_steps_fails_no_complete_save(tmp_path):
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        fs.save(tmp_path / "seed", model, optimizer, step=step)

    def save(folder):
        saving.save(folder, model, optimizer, {}, saving.SaveSettings(step=3, keep=1))

    found = meet_everywhere(save, tmp_path / "all", tmp_path / "seed")
    kept = 0
    for folder, said in found:
        if (folder / "step-00000002").exists():
            assert fs.load(folder, model, optimizer)["step"] in ((2, 3) if said else (3,))
            kept += not said
    assert kept > 0  # the save is complete, but an older step could not be removed
    assert left_in(found[-1][0]) == ["step-00000003"]


@pytest.mark.parametrize("door", ["import", "dcp"])
def test_a_full_disk_during_import_or_export_is_typed_and_leaves_no_file(tmp_path, door):
    model, optimizer = model_and_optimizer()
    fs.save(tmp_path / "ours", model, optimizer, step=1)

    def convert(folder):
        with open_source(tmp_path / "ours") as source:
            if door == "import":
                write_checkpoint(source, folder, lambda _count: None)
            else:
                write_dcp(source, folder, None, lambda _count: None)

    found = meet_everywhere(convert, tmp_path / "out")
    assert len(found) > 8
    for folder, said in found:
        assert said or folder.exists()
        if folder.exists():  # the disk was full after the last rename, or never
            with open_source(folder if door == "import" else tmp_path / "ours") as source:
                assert all(entry.read().numel() for entry in source.tensors.values())
    assert sum(folder.exists() for folder, _ in found) < len(found) / 2
    assert all(name.isdecimal() for name in left_in(tmp_path / "out"))


def test_torchs_writer_errors_are_reported_with_the_systems_reason(tmp_path):
    fs.save(tmp_path / "ours", fs.shard(nn.Linear(128, 128)), step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with open_source(tmp_path / "ours") as source:
            with pytest.raises(CheckpointError, match="File too large"):
                write_dcp(source, tmp_path / "out", None, lambda _count: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interrupted(root, whose, call):
    """Sends a rank a keyboard interrupt at its first call of a system function."""
    model, optimizer = model_and_optimizer()
    began = time.monotonic()

    def interrupt(*_args):
        raise KeyboardInterrupt

    here = patch.object(os, call, interrupt) if dist.get_rank() == whose else nullcontext()
    with here:
        try:
            fs.save(Path(root) / "c", model, optimizer)
        except (CheckpointError, KeyboardInterrupt) as error:
            return type(error).__name__, time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EIO])
def test_a_file_system_need_not_sync_folders(tmp_path, monkeypatch, number):
    def fail(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="output") if number == errno.EIO else nullcontext():
        sync_folder(tmp_path)


@pytest.mark.parametrize(("whose", "call"), [(1, "write"), (0, "rename")])
def test_an_interrupted_rank_ends_the_save_of_all(ranks, tmp_path, whose, call):
    found = ranks(2)(interrupted, str(tmp_path), whose, call)
    assert found[whose][0] == "KeyboardInterrupt"
    other, waited = found[1 - whose]
    assert other == "CheckpointError"
    assert waited < 60
    assert left_in(tmp_path) == []


KILLED = """
import os, signal
import torch
torch.set_num_threads(1)
import fullshard as fs
from checkpoint.test_save_failures import at_call, left_in, model_and_optimizer, weights
from fullshard.checkpoint.storage import storage_path
from support.object_store import at_request

model, optimizer = model_and_optimizer()
fs.save({root!r} + "0", model, optimizer, step=1)
first = weights(model)
number, ends = 0, set()
while True:
    number += 1
    place = storage_path({root!r} + str(number))
    child = os.fork()
    if child == 0:
        fs.save(place, model, optimizer, step=1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        with {at}(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL)) as made:
            fs.save(place, model, optimizer, step={step})
        os._exit(0 if len(made) < number else 9)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    fs.load(place, model, optimizer)
    same = all(map(torch.equal, weights(model), first))
    ends.add(same)
    if not same and not any("saving" in name for name in left_in(place)):
        assert not any("notes" in name for name in left_in(place))  # after an import, none comes
    with torch.no_grad():
        for p, value in zip(model.parameters(), first):
            p.copy_(value)
    fs.save(place, model, optimizer, step=2)
    assert left_in(place) == ["step-00000001", "step-00000002"], left_in(place)
    if {at} is at_request:
        assert len(left_in(place / "step-00000002")) == 2
print(number, sorted(ends))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "step"),
    [
        pytest.param("at_call", 1, marks=pytest.mark.slow),
        ("at_call", 2),
        ("at_request", 1),
        ("at_request", 2),
    ],
)
def test_a_process_killed_at_any_call_leaves_a_checkpoint_that_loads(tmp_path, at, step):
    """Saves an existing step again and a new step, on a disk and in a store."""
    root = f"{'objects:/' if at == 'at_request' else ''}{tmp_path}/"
    number, ends = python("-c", KILLED.format(root=root, at=at, step=step)).stdout.split(maxsplit=1)
    assert int(number) > {"at_call": 20, "at_request": 10}[at]
    assert ends.strip() == "[False, True]"  # some processes died before the end, some after it


def full(folder):
    model, optimizer = model_and_optimizer()
    fs.save(folder, model, optimizer, step=1)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "ballast").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096 - 30_000))
    dist.barrier()
    said = error_of(lambda: fs.save(folder, model, optimizer, step=2))
    before = weights(model)
    assert fs.load(folder, model, optimizer)["step"] == 1
    assert all(map(torch.equal, weights(model), before))
    return said, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount a small file system")
def test_a_really_full_disk_is_reported_and_the_last_checkpoint_stays(ranks, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path], check=True)
    try:
        for said, left in ranks(2)(full, str(tmp_path)):
            assert said.startswith("CheckpointError: ")
            assert "No space left on device" in said
            assert left == ["ballast", "step-00000001"]
    finally:
        ranks(2)(close_folders, tmp_path)  # the first rank's process keeps it mounted
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_copy_without_its_last_file_is_saved_over(tmp_path):
    """Otherwise a resumed run would fail each time when it reaches that step."""
    model, optimizer = model_and_optimizer()
    path = Path(fs.save(tmp_path, model, optimizer, step=1))
    (path / "COMPLETE.json").unlink()
    fs.save(tmp_path, model, optimizer, step=1)
    assert fs.load(tmp_path, model, optimizer)["step"] == 1
    assert left_in(tmp_path) == [path.name]


def read_only(folder):
    model, _ = model_and_optimizer()
    return error_of(lambda: fs.save(folder, model))


def test_an_unwritable_folder_is_an_error_on_all_ranks(ranks, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    for said in ranks(2)(read_only, str(place / "below")):
        assert said.startswith("CheckpointError: ")
        assert "rank 0 could not: " in said
        assert str(place) in said


NODE_LOCAL = """
import ctypes, os, subprocess, sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
import fullshard as fs
from checkpoint.test_save_failures import model_and_optimizer
from support.scripts import error_of

rank, root = int(sys.argv[1]), {root!r}
dist.init_process_group("gloo", store=dist.FileStore(root + "/store", 2), rank=rank, world_size=2)
if rank == 1:  # another machine's disk under the same name
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS: a view of mounts of its own
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root + "/local"], check=True)
model, _ = model_and_optimizer()
print(error_of(lambda: fs.save(root + "/local/checkpoint", model)))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_a_folder_that_not_all_ranks_share_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "local").mkdir()
    script = NODE_LOCAL.format(tests=str(Path(__file__).parents[1]), root=str(tmp_path))
    command = [sys.executable, "-c", script]
    with (
        subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1"], stdout=subprocess.PIPE, text=True) as second,
    ):
        said = [process.communicate(timeout=100)[0] for process in (first, second)]
    for text in said:
        assert "expected a folder that all ranks share; rank 1 does not see" in text
    assert list((tmp_path / "local").iterdir()) == []


def test_two_runs_cannot_save_steps_into_one_folder(ranks, tmp_path):
    ranks(1)(save_step, str(tmp_path), 1)
    for said in ranks(2)(save_step, str(tmp_path), 2):
        assert (
            "expected a folder that no other run uses; another process saves its steps there"
            in said
        )
    assert left_in(tmp_path) == ["step-00000001"]


def save_step(folder, step):
    model, _ = model_and_optimizer()
    return error_of(lambda: fs.save(folder, model, step=step))


class Odd:
    pass


def unsavable():
    model, optimizer = model_and_optimizer()
    return [
        error_of(lambda: fs.save("x", model, optimizer, thing={"a": [Odd()]})),
        error_of(lambda: fs.save("x", model, optimizer, thing={(1, 2): 3})),
        error_of(lambda: fs.save("x", model, weights=list(model.parameters()))),
        error_of(lambda: fs.save("x", model, torch.optim.SGD([nn.Parameter(torch.ones(2))]))),
        error_of(lambda: fs.save("x", model, mask=torch.eye(2).to_sparse())),
    ]


def test_what_only_a_pickle_could_hold_is_refused_by_its_path(ranks, tmp_path, snapshot):
    first, second = ranks(2)(unsavable)
    assert first == second
    assert first == snapshot
    assert not Path("x").exists()


def test_arguments_in_another_order_are_named(tmp_path):
    model = fs.shard(nn.Linear(2, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    order = "order is fs.save(folder, model, optimizer)"
    for call, said in [
        (lambda: fs.save(model, tmp_path), f"a folder or a store, got Linear. The {order}"),  # type: ignore[arg-type]
        (lambda: fs.load(model, tmp_path), f"a folder or a store, got Linear. The {order}"),  # type: ignore[arg-type]
        (lambda: fs.save(tmp_path, optimizer, model), "was sharded by fs.shard; got SGD"),  # type: ignore[arg-type]
        (lambda: fs.save(tmp_path, model, 7), "an optimizer of torch, got int. Pass "),  # type: ignore[arg-type]
    ]:
        with pytest.raises((CheckpointError, EngineError), match=re.escape(said)):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_background_save_reports_lack_of_memory():
    saves = Saves()

    def work():
        raise MemoryError("cannot allocate memory")

    saves.start(work)
    with pytest.raises(OutOfMemoryError, match="cannot allocate memory") as caught:
        saves.wait()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("why", ["", "rank 0 could not"])
def test_a_rank_that_was_stopped_for_long_still_reads_the_verdict(tmp_path, monkeypatch, why):
    monkeypatch.setattr(commit, "FAREWELL_S", 0.05)
    place = commit.claim(tmp_path / "step-00000003")
    for rank in (0, 1):
        commit.join(place, rank)
        commit.report(place, rank, CheckpointError(why) if why else [])
    state = {"step": 3, "world_size": 2, "extra": {}, "state": {}}
    with pytest.raises(CheckpointError, match=why) if why else nullcontext():
        commit.conclude(place, 2, commit.Documents(3, {"state.json": json.dumps(state)}, {}))
    with pytest.raises(CheckpointError, match=why) if why else nullcontext():
        commit.await_verdict(place, 1)  # the first rank has continued
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([] if why else ["step-00000003"])


def test_a_reader_reports_that_the_run_removed_its_checkpoint(tmp_path):
    """A live run's retention removes a checkpoint during its export or import."""
    model, optimizer = model_and_optimizer()
    fs.save(tmp_path, model, optimizer, step=1)

    def read_while_it_goes():
        with open_source(tmp_path) as source:
            remove(checkpoints_in(tmp_path))
            next(iter(source.tensors.values())).read()

    with pytest.raises(CheckpointError, match="to exist while it is read; it was removed"):
        read_while_it_goes()
    fs.save(tmp_path, model, optimizer, step=2)
    found = newest_complete(tmp_path)
    with pytest.raises(CheckpointError, match="to exist while it is read; it was removed"):
        find_damage(found, lambda _: remove(checkpoints_in(tmp_path)))


def test_a_reader_reports_that_its_checkpoint_was_replaced(tmp_path, monkeypatch):
    """It would otherwise read weights of one save and states of the next."""
    model, optimizer = model_and_optimizer()
    fs.save(tmp_path / "last", model, optimizer)
    before, replaced = Checkpoint.read, list[str]()

    def read_and_replace(self, key, *span):
        before(self, key, *span)
        if not replaced:
            replaced.append(key)
            other, states = model_and_optimizer()
            with torch.no_grad():
                next(other.parameters()).add_(1.0)
            fs.save(tmp_path / "last", other, states)
            with monkeypatch.context() as patched:
                patched.setattr(Checkpoint, "read", before)
                assert fs.load(tmp_path / "last", other, states)["step"] is None

    monkeypatch.setattr(Checkpoint, "read", read_and_replace)
    with pytest.raises(
        CheckpointError, match="to stay unchanged while it is read; another save replaced it"
    ):
        fs.load(tmp_path / "last", model, optimizer)
    assert replaced


@pytest.mark.parametrize("ask", [newest_complete, lambda folder: superfluous(folder, 1)])
def test_a_checkpoint_is_found_while_the_run_saves(tmp_path, monkeypatch, ask):
    """A new checkpoint is renamed and the old one removed between two looks."""
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        fs.save(tmp_path, model, optimizer, step=step)
    saving = (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.saving-3f2a")
    looks, look = [], retain.look_at

    def look_and_save(path):
        if not looks:
            saving.rename(tmp_path / "step-00000002")
            remove([Found(tmp_path / "step-00000001", 1, None)])
        looks.append(path)
        return look(path)

    monkeypatch.setattr(retain, "look_at", look_and_save)
    found = ask(tmp_path)
    assert found == [] or found.step == 2


@pytest.mark.parametrize(
    "ask", [lambda p: superfluous(p, 1) == [], lambda p: choose(commit.ALONE, p).step == 2]
)
def test_a_checkpoint_removed_during_its_check_is_not_called_damaged(tmp_path, monkeypatch, ask):
    model, optimizer = model_and_optimizer()
    fs.save(tmp_path, model, optimizer, step=1)
    check, checked = read.why_not, []

    def save_and_check(entry, *ranks):
        if not checked:  # a live run that keeps one checkpoint
            fs.save(tmp_path, model, optimizer, step=2)
            remove([entry])
        checked.append(entry.step)
        return check(entry, *ranks)

    monkeypatch.setattr(read, "why_not", save_and_check)
    assert ask(tmp_path)
    assert checked == [1, 2]


def test_user_folders_with_names_like_a_stores_are_not_touched(tmp_path):
    for name in ("files-2024", "notes-2024"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "thesis.txt").write_text("x")
    model, optimizer = model_and_optimizer()
    with pytest.raises(CheckpointError, match="it contains files-2024"):
        fs.save(tmp_path / "mine", model, optimizer)
    assert len(list((tmp_path / "mine").rglob("thesis.txt"))) == 2


ENDS = """
import sys, threading
import torch
import fullshard as fs
from fullshard import saving
real, main_ended, has_left = saving.write_tensors, threading.Event(), threading.Event()
def slow(*arguments):
    main_ended.wait()
    assert not has_left.wait(0.2)  # else the rest of the exit may last long enough for the save
    return real(*arguments)
saving.write_tensors = slow
threading._register_atexit(has_left.set)  # it is called after the handler of the first save
model = fs.shard(torch.nn.Linear(4, 4))
fs.save(sys.argv[1], model, step=1, wait=False)
threading._register_atexit(main_ended.set)
"""


def test_a_background_save_is_completed_when_the_script_ends(tmp_path):
    python("-c", ENDS, tmp_path, run=forked.run)
    assert [found.step for found in checkpoints_in(tmp_path)] == [1]
