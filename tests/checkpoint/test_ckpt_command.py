"""`fullshard ckpt` lists every tensor, finds one flipped byte, and names tensors that differ."""

import json
import os
import shutil
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fullshard as fs
from fullshard.checkpoint import commit
from fullshard.checkpoint.files import TensorFile
from fullshard.checkpoint.read import Checkpoint, remove, superfluous
from fullshard.launch.run_lock import RunLock
from fullshard.saving import Saves
from support.models import perturbed
from support.processes import close_folders, python
from support.scripts import Tiny, error_of, tokens_of

POSITION = {"samples_seen": 6, "epoch": 0.5}


def write(root, steps):
    """Writes checkpoints of a tied model after 1, 2, ... steps."""
    torch.manual_seed(0)
    model = fs.shard(perturbed(Tiny(tied=True)), wrap=["Block"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        model(tokens_of(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fs.save(root, model, optimizer, step=step, position=POSITION)


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    ranks(2)(write, str(root / "checkpoints"), 3)
    return root


@pytest.fixture
def run_dir(written, tmp_path):
    """A run's folder with three checkpoints that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_lists_the_newest_first_and_marks_incomplete_ones(fullshard, run_dir):
    folder = run_dir / "checkpoints"
    (folder / "step-00000003" / "COMPLETE.json").unlink()
    done = fullshard("ckpt", "ls", run_dir, "--json", code=0)
    assert [entry["step"] for entry in done.json["checkpoints"]] == [3, 2, 1]
    assert [entry["complete"] for entry in done.json["checkpoints"]] == [False, True, True]
    assert done.json["newest"] == str(folder / "step-00000002")
    assert "NOT COMPLETE: it has no COMPLETE.json" in fullshard("ckpt", "ls", folder).out


def test_inspect_shows_tensors_optimizer_step_ranks_and_position(fullshard, written):
    facts = fullshard("ckpt", "inspect", written, "--json").json
    tensors = {row["name"]: row for row in facts["tensors"] if row["kind"] == "model"}
    state = Tiny(tied=True).state_dict()
    assert tensors.keys() == state.keys() - {"head.weight"}
    assert all(tensors[name]["shape"] == list(state[name].shape) for name in tensors)
    # Each rank stores 672 of Block's 1,344 elements; the cut falls into a matrix.
    assert max(row["num_slices"] for row in tensors.values()) == 2
    assert (facts["step"], facts["world_size"], facts["position"]) == (3, 2, POSITION)
    assert facts["optimizer"] == "AdamW"
    assert {row["name"] for row in facts["optimizer_states"]} == {"exp_avg", "exp_avg_sq", "step"}
    text = fullshard("ckpt", "inspect", written).out
    assert "blocks.0.mid.weight" in text
    assert "head.weight = embed.weight" in text
    assert "samples_seen 6" in text


@pytest.mark.parametrize("name", ["model-00001", "optimizer-00000"])
def test_verify_names_file_and_tensor_of_one_flipped_byte(fullshard, run_dir, name):
    assert fullshard("ckpt", "verify", run_dir).exit_code == 0
    newest = run_dir / "checkpoints" / "step-00000003"
    file = newest / f"{name}.safetensors"
    before = {key: value.clone() for key, value in load_file(file).items()}  # a mapped file
    flip(file, file.stat().st_size - 1)
    damaged = [key for key, value in load_file(file).items() if not torch.equal(value, before[key])]
    done = fullshard("ckpt", "verify", run_dir, "--json", code=7)
    (damage,) = done.json["damaged"]
    assert damage["file"] == file.name
    assert damage["tensors"] == [f"{name.partition('-')[0]}/{key}" for key in damaged]
    assert len(damaged) == 1
    text = fullshard("ckpt", "verify", newest).out
    assert file.name in text
    assert damaged[0] in text


def test_verify_names_damaged_texts_headers_and_the_index(fullshard, run_dir):
    newest = run_dir / "checkpoints" / "step-00000003"
    flip(newest / "plan.json", 20)
    flip(newest / "model-00000.safetensors", 12)
    done = fullshard("ckpt", "verify", newest, "--json", code=7)
    damages = {damage["file"]: damage["tensors"] for damage in done.json["damaged"]}
    assert damages.keys() == {"plan.json", "model-00000.safetensors"}
    assert damages["plan.json"] == []
    assert len(damages["model-00000.safetensors"]) > 1
    flip(newest / "index.json", 40)
    done = fullshard("ckpt", "verify", newest, code=7)
    assert "index.json: expected the bytes that were written" in done.err


def test_diff_names_differing_tensors_and_their_differences(fullshard, written, tmp_path):
    one, two = (written / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    assert fullshard("ckpt", "diff", one, one).exit_code == 0
    done = fullshard("ckpt", "diff", one, two, "--json", code=8)
    rows = {row["name"]: row for row in done.json["rows"]}
    # AdamW's first steps change a weight by at most about lr.
    assert 0.005 < rows["embed.weight"]["max_abs"] < 0.02
    assert rows["embed.weight/step"]["max_abs"] == 1.0
    assert not {"steps", "shift", "unused"} & rows.keys()


def test_diff_compares_a_checkpoint_with_a_hugging_face_folder(fullshard, written, tmp_path):
    torch.manual_seed(0)
    state = perturbed(Tiny(tied=True)).state_dict()
    one = written / "checkpoints" / "step-00000001"
    for name, tensor in state.items():  # the tensors of the checkpoint, read with safetensors only
        if name not in ("head.weight",):
            tensor.copy_(whole(one, name, tensor.shape))
    theirs = {name: value.clone() for name, value in state.items()}
    save_file(theirs, tmp_path / "model.safetensors")
    done = fullshard("ckpt", "diff", one, tmp_path, code=0)
    assert "only A has an optimizer (AdamW): not compared" in done.out
    theirs["scale"] += 0.25
    theirs["blocks.1.up.weight"] = theirs["blocks.1.up.weight"].bfloat16()
    theirs["shift"] = theirs["shift"][:-1].clone()
    theirs["new"] = theirs.pop("unused")
    save_file(theirs, tmp_path / "model.safetensors")
    done = fullshard("ckpt", "diff", tmp_path, one, "--json", code=8)
    rows = {row["name"]: row for row in done.json["rows"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "scale": "different values",
        "blocks.1.up.weight": "same but for rounding to the other's dtype",
        "shift": "different shapes",
        "new": "only in A",
        "unused": "only in B",
    }
    assert rows["scale"]["max_abs"] == pytest.approx(0.25, abs=1e-6)


def whole(checkpoint, name, shape):
    """Assembles a tensor from its slices as the format's page describes, without our reader."""
    index = json.loads((checkpoint / "index.json").read_text())
    entry = index["tensors"][f"model/{name}"]
    parts = [load_file(checkpoint / index["files"][p[0]])[name] for p in entry["slices"]]
    return torch.cat([part.reshape(-1) for part in parts]).view(shape)


def test_prune_keeps_the_newest_and_removes_leftovers_of_crashes(fullshard, run_dir):
    folder = run_dir / "checkpoints"
    left = folder / ".step-00000002.saving-ab12"
    left.mkdir()
    gone = [str(folder / "step-00000001"), str(left)]
    done = fullshard("ckpt", "prune", run_dir, "--keep", 2, "--dry-run", "--json")
    assert sorted(done.json["removed"]) == sorted(gone)
    assert len(list(folder.iterdir())) == 4
    assert fullshard("ckpt", "prune", run_dir, "--keep", 2).exit_code == 0
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002", "step-00000003"]
    going = superfluous(folder, 1)
    assert fullshard("ckpt", "prune", run_dir).exit_code == 0
    remove(going)  # a resumed run removes the same ones
    assert [p.name for p in folder.iterdir()] == ["step-00000003"]


def test_leftovers_of_a_killed_prune_are_listed_with_sizes_and_removed(
    fullshard, run_dir, monkeypatch
):
    folder = run_dir / "checkpoints"
    for _ in range(2):  # the second command removes the rest
        with monkeypatch.context() as killed:
            killed.setattr("fullshard.checkpoint.read.remove_tree", lambda _: None)
            fullshard("ckpt", "prune", run_dir, "--keep", 1, code=0)
        (left := folder / ".step-00000001.old-0" / "COMPLETE.json").unlink(missing_ok=True)
        rows = fullshard("ckpt", "ls", folder, "--json", code=0).json["checkpoints"]
        assert {row["path"] for row in rows} == {str(path) for path in folder.iterdir()}
        assert rows[-1]["num_bytes"] == sum(file.stat().st_size for file in left.parent.iterdir())
        assert "`fullshard ckpt prune`, removes it" in rows[-1]["why"]
    fullshard("ckpt", "prune", run_dir, "--keep", 1, code=0)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_prune_never_removes_the_only_good_one(fullshard, run_dir, caplog):
    folder = run_dir / "checkpoints"
    for step in (2, 3):
        flip(folder / f"step-0000000{step}" / "model-00000.safetensors", -1)
    fullshard("ckpt", "prune", run_dir, "--keep", 1, code=0)
    assert f"{folder / 'step-00000003'} stays, but does not count" in caplog.text
    assert len(list(folder.iterdir())) == 3
    flip(folder / "step-00000001" / "optimizer-00000.safetensors", -1)
    done = fullshard("ckpt", "prune", run_dir, "--keep", 1, code=7)
    assert "expected a complete one" in done.err
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("export", "step-00000001/hf"),
        ("export", "step-00000001/a/b"),
        ("export", "step-00000009"),
        ("import", "step-00000001/copy"),
    ],
)
def test_nothing_is_written_where_checkpoints_are_pruned(fullshard, run_dir, command, place):
    folder = run_dir / "checkpoints"
    done = fullshard("ckpt", command, folder / "step-00000001", folder / place, "--json")
    within = folder if place.endswith("9") else folder / "step-00000001"
    message = done.json["error"]["message"]
    assert message.startswith(f"FOLDER: expected a folder outside of checkpoints, got '{folder}")
    assert f"Write to another folder, such as '{within}-{command}'" in message
    assert not (folder / place).exists()


def test_an_import_is_refused_in_the_folder_of_an_active_run(fullshard, run_dir, tmp_path):
    source, target = run_dir / "checkpoints/step-00000001", run_dir / "checkpoints/step-99999999"
    with RunLock(run_dir):
        done = fullshard("ckpt", "import", source, target, code=2)
        assert f"FOLDER: expected a folder that no run uses, got '{run_dir}'" in done.err
        assert not target.exists()
        fullshard("ckpt", "import", source, tmp_path / "step-99999999", code=0)
    fullshard("ckpt", "import", source, target, code=0)


def test_an_import_is_refused_where_a_process_saves(fullshard, run_dir, tmp_path):
    """Covers processes that save as a run with training.checkpoint_dir does."""
    source, place = run_dir / "checkpoints/step-00000001", tmp_path / "elsewhere"
    Saves().claim_folder(place)
    done = fullshard("ckpt", "import", source, place / "step-99999999", code=2)
    assert f"in '{place}', where a process saves its steps" in done.err
    assert list(place.iterdir()) == []
    close_folders(place)
    fullshard("ckpt", "import", source, place / "step-99999999", code=0)


def test_an_import_leaves_locks_of_other_tools_alone(fullshard, run_dir, tmp_path):
    lock = tmp_path / "tool" / ".lock"
    (lock.parent / "steps").mkdir(parents=True)
    lock.write_text("4711")
    source = run_dir / "checkpoints/step-00000001"
    fullshard("ckpt", "import", source, lock.parent / "steps/step-99999999", code=0)
    assert lock.read_text() == "4711"


def test_an_import_may_add_a_step_beside_the_files_of_a_run(fullshard, run_dir):
    RunLock(run_dir).close()  # the run has ended
    (run_dir / "run.json").write_text("{}")
    source = run_dir / "checkpoints/step-00000001"
    fullshard("ckpt", "import", source, run_dir / "step-99999999", code=0)


def test_no_run_starts_where_an_import_adds_a_step(fullshard, run_dir, tmp_path, monkeypatch):
    """The run would take the unfinished step for its own newest one."""
    source, place = tmp_path / "source", tmp_path / "elsewhere"
    (run_dir / "checkpoints/step-00000001").rename(source)
    read, refused = Checkpoint.read, []
    claims = {
        run_dir / "checkpoints": partial(RunLock, run_dir),
        place: partial(Saves().claim_folder, place),
    }

    def read_while_a_run_begins(self, key, *span):
        for folder, claim in claims.items():
            if list(folder.glob(".step-99999999*")) and not refused:
                refused.append(error_of(claim))
        read(self, key, *span)

    monkeypatch.setattr(Checkpoint, "read", read_while_a_run_begins)
    RunLock(run_dir).close()  # the run has ended
    (run_dir / "run.json").write_text("{}")
    for folder in claims:
        fullshard("ckpt", "import", source, folder / "step-99999999", code=0)
        assert "expected a folder that no" in refused.pop()


AT = {  # the call at which a signal arrives
    "claim": (commit, "make_note"),
    "read": (Checkpoint, "read"),
    "report": (commit, "fill_note"),
    "end": (commit, "put_in_place"),
}


@pytest.mark.parametrize(
    ("words", "at"),
    [(("export", "--format", "dcp"), "read"), *((("import",), at) for at in AT)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_signal_leaves_no_part_of_a_copy(fullshard, run_dir, tmp_path, monkeypatch, words, at):
    function = getattr(*AT[at])

    def stopped(*given):
        if list(tmp_path.glob(".copy*")):
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*given)

    monkeypatch.setattr(*AT[at], stopped)
    command, *options = words
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignored: exit code 0
    try:
        done = fullshard("ckpt", command, run_dir, tmp_path / "copy", *options, code=75)
    finally:
        signal.signal(signal.SIGTERM, before)
    told = "ckpt: expected to reach its end, got SIGTERM. Run the command again."
    assert told in done.err
    assert not list(tmp_path.glob("*copy*"))


def test_a_step_with_a_dangling_link_is_skipped_and_reported(fullshard, run_dir, tmp_path, caplog):
    newest, loop = run_dir / "checkpoints" / "step-00000009", tmp_path / "loop"
    newest.symlink_to("nowhere")
    done = fullshard("ckpt", "ls", run_dir, "--json")
    assert [row["complete"] for row in done.json["checkpoints"]] == [False, True, True, True]
    assert fullshard("ckpt", "verify", run_dir).exit_code == 7
    assert f"skipped {newest}" in caplog.text
    loop.symlink_to("loop")
    assert fullshard("ckpt", "import", run_dir, loop).exit_code == 7


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune"])
def test_a_folder_without_checkpoints_is_a_checkpoint_error(fullshard, tmp_path, command):
    done = fullshard("ckpt", command, tmp_path / "nothing", code=7)
    assert "CheckpointError: checkpoint: expected a checkpoint or a folder of step-*" in done.err


def test_a_mistyped_folder_is_answered_with_the_nearest_name(fullshard, run_dir):
    done = fullshard("ckpt", "ls", run_dir.with_name("rum"))
    assert f"which does not exist. Did you mean '{run_dir}'?" in done.err
    assert "ckpt ls" not in done.err
    assert fullshard("ckpt", "ls", "x" * 5000).exit_code == 7


@pytest.mark.parametrize(
    "words", [("export", "--config"), ("export", "--format", "dcp"), ("import",)], ids=" ".join
)
def test_an_export_of_a_replaced_checkpoint_gets_no_name(
    fullshard, run_dir, tmp_path, monkeypatch, words
):
    command, *options = words
    if options == ["--config"]:
        (tmp_path / "config.json").write_text('{"model_type": "none"}')
        options.append(tmp_path)
    newest = run_dir / "checkpoints" / "step-00000003"
    read, reads, swap_at = Checkpoint.read, [], []

    def read_and_swap(self, key, *span):
        read(self, key, *span)
        reads.append(key)
        if swap_at == [len(reads)]:  # the last read of a complete and undamaged checkpoint
            newest.rename(tmp_path / "old")
            newest.with_name("step-00000002").rename(newest)

    monkeypatch.setattr(Checkpoint, "read", read_and_swap)
    fullshard("ckpt", command, newest, tmp_path / "first", *options, code=0)
    swap_at.append(2 * len(reads))
    done = fullshard("ckpt", command, newest, tmp_path / "second", *options, code=7)
    assert "to stay unchanged while it is read; another save replaced it" in done.err
    assert sorted(tmp_path.glob("*first*")) == [tmp_path / "first"]
    assert not list(tmp_path.glob("*second*"))


@pytest.mark.parametrize("command", ["export", "import"])
def test_an_import_of_rewritten_weights_gets_no_name(fullshard, tmp_path, monkeypatch, command):
    """`save_pretrained` writes in place, so a copy could mix old and new weights."""
    folder, read, reads = tmp_path / "model", TensorFile.read, []
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    weights = {name: torch.full((4, 4), float(at)) for at, name in enumerate("ab")}
    save_file(weights, folder / "model.safetensors")

    def read_and_write(self, *span):
        read(self, *span)
        reads.append(span)
        if len(reads) == 1:
            save_file({name: -w for name, w in weights.items()}, folder / "model.safetensors")

    monkeypatch.setattr(TensorFile, "read", read_and_write)
    done = fullshard("ckpt", command, folder, tmp_path / "made", code=7)
    assert (
        "model.safetensors': expected it to stay unchanged while it is read; it was written"
        in done.err
    )
    assert not list(tmp_path.glob("*made*"))


LIMITED = """
import json, resource, sys
import psutil, torch, transformers.models.auto.configuration_auto
import fullshard.checkpoint.read, fullshard.formats.hugging_face
from fullshard.cli.app import run
codes = []
for mib, *words in json.loads(sys.argv[1]):
    most = psutil.Process().memory_info().vms + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    codes.append(run(words))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(codes)
"""


@pytest.mark.long
def test_running_out_of_memory_is_not_reported_as_damage(tmp_path, fullshard):
    """With code 7 a scheduler would give up an undamaged checkpoint."""
    big, whole = tmp_path / "big", tmp_path / "whole"
    big.mkdir()
    save_file({"w": torch.zeros(25_000_000)}, big / "model.safetensors")
    (big / "config.json").write_text('{"model_type": "none"}')
    assert fullshard("ckpt", "import", big, whole).exit_code == 0

    table = [
        (40, "export", str(whole), "new"),
        (40, "import", str(big), "new"),
        (40, "verify", str(whole)),  # it reads part by part
    ]
    words = json.dumps([(m, "ckpt", *w) for m, *w in table])
    done = python("-c", LIMITED, words, cwd=tmp_path, timeout=400)
    assert done.stdout.splitlines()[-1:] == ["[4, 4, 0]"], done.stdout + done.stderr
