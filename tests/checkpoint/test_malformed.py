"""Malformed files: every importer reads them correctly or raises a typed error."""

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fullshard as fs
from fullshard.checkpoint.format import Manifest
from fullshard.checkpoint.read import find_damage, remove
from fullshard.checkpoint.retain import checkpoints_in, newest_complete, tidy
from fullshard.errors import FullshardError
from fullshard.formats.detect import open_source
from fullshard.formats.ours import write_checkpoint

Mutate = Callable[[Path, st.DataObject], None]


def model_and_optimizer():
    torch.manual_seed(0)
    model = fs.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def deepspeed(folder, stage):
    """Writes one rank's files in DeepSpeed's layout."""
    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    facts = {"module": {"buffer": torch.ones(2)}, "param_shapes": [{"a": torch.Size([2, 3])}]}
    facts |= {"buffer_names": ["buffer"], "shared_params": {"b": "a"}, "global_steps": 1}
    facts |= {"frozen_param_shapes": {"f": torch.Size([2])}}
    facts |= {"frozen_param_fragments": {"f": torch.ones(2)}}
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    states = {name: [torch.arange(6.0)], "partition_count": 1}
    prefix = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(facts, folder / "global_step1" / f"{prefix}_model_states.pt")
    torch.save(
        {"optimizer_state_dict": states},
        folder / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Writes a small folder for every importer."""
    root = tmp_path_factory.mktemp("seeds")
    model, optimizer = model_and_optimizer()
    fs.save(root / "ours", model, optimizer, step=7, note={"a": (1, 2.5), "t": torch.ones(2)})
    whole = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    for name in ("safetensors", "bin", "ranks", "file"):
        (root / name).mkdir()
    save_file(whole, root / "safetensors" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(whole, "model.safetensors")}
    (root / "safetensors" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "safetensors" / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"state_dict": whole, "step": 1}, root / "bin" / "pytorch_model.bin")
    torch.save(whole, root / "ranks" / "model_world_size_1_rank_0.pt")
    states = {"a": {"step": torch.tensor(1.0), "exp_avg": whole["a"], "exp_avg_sq": whole["a"]}}
    group = {"params": ["a"], "lr": 0.1, "decoupled_weight_decay": True}
    nested = {"model": whole, "optimizer": {"state": states, "param_groups": [group]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming ... a single process"
        dcp.save(nested, checkpoint_id=root / "dcp", no_dist=True)
    for stage in (2, 3):
        deepspeed(root / f"deepspeed{stage}", stage)
    return root


KINDS = ("ours", "safetensors", "bin", "ranks", "dcp", "deepspeed2", "deepspeed3")


def taken(path):
    """Returns all that an importer reads: tensors and the optimizer's states."""
    with open_source(path) as source:
        found = {name: entry.read() for name, entry in source.tensors.items()}
        if source.optimizer is not None:
            states = source.optimizer.tensors.items()
            found |= {"/".join(names): entry.read() for names, entry in states}
            for param, values in source.optimizer.scalars.items():
                found |= {f"{param}/{n}": torch.tensor(float(v)) for n, v in values.items()}
        return {**found, "step": torch.tensor(-1 if source.step is None else source.step)}


def imported(path, target):
    shutil.rmtree(target, ignore_errors=True)
    with open_source(path) as source:
        write_checkpoint(source, target, lambda _count: None)


def loaded(path, model, optimizer):
    """Returns step, note, parameters and optimizer states after fs.load."""
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = fs.load(path, model, optimizer)
    values = [p.full_tensor() for p in model.parameters()]
    values += [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    return [state["step"], state["note"]["a"], *(v.tolist() for v in values)]


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


JUNK: list[Any] = [
    None, True, -1, 2**70, 3.5, float("inf"), float("nan"), "", "x", "../x", "a\0b", "\ud800",
    [], {}, [-1], [[[]]], {"a": None}, "I64", 10**12, b"raw",
]  # fmt: skip
TENSORS = [torch.zeros(2, 2).to_sparse(), torch.empty(3, device="meta"), torch.zeros(0)]


def places(value, at=()):
    """Yields the paths of all values in nested containers."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*at, key))


def replaced(value, at, new):
    """Returns a copy with one value replaced, or with the key removed if `new` is raw bytes."""
    if not at:
        return new
    value = copy.copy(value)
    if new == b"raw" and len(at) == 1:
        del value[at[0]]
    else:
        value[at[0]] = replaced(value[at[0]], at[1:], new)
    return value


def seal(folder, name="COMPLETE.json"):
    """Updates COMPLETE.json to match a changed file, as an attacker would."""
    path = folder / "COMPLETE.json"
    table = json.loads(path.read_text())
    if name != path.name:
        data = (folder / name).read_bytes()
        table["files"][name] = [len(data), xxhash.xxh3_128_hexdigest(data)]
    table.pop("checksum", None)
    sealed = xxhash.xxh3_128_hexdigest(json.dumps(table, sort_keys=True).encode())
    path.write_text(json.dumps({**table, "checksum": sealed}))


def change_json(path, data):
    """Replaces one value of a JSON file."""
    table = json.loads(path.read_text())
    at = data.draw(st.sampled_from(list(places(table))))
    new = data.draw(st.sampled_from([junk for junk in JUNK if at or junk != b"raw"]))
    changed = replaced(table, at, new) if new != b"raw" or at else {}
    path.write_text(json.dumps(changed, default=str))
    if (path.parent / "COMPLETE.json").exists() and isinstance(changed, dict):
        with suppress(KeyError, TypeError, AttributeError):  # COMPLETE.json itself was changed
            seal(path.parent, path.name)


def change_pickle(path, data):
    """Replaces one value of a file of torch.save."""
    table = torch.load(path, weights_only=False)
    at = data.draw(st.sampled_from(list(places(table))))
    new = data.draw(st.sampled_from([*JUNK, *TENSORS] if at else JUNK[:-1]))
    torch.save(replaced(table, at, new), path)


def change_bytes(path, data):
    """Flips, cuts off, removes or inserts bytes."""
    old = path.read_bytes()
    at = data.draw(st.integers(0, max(len(old) - 1, 0)))
    new = data.draw(st.sampled_from([b"", b"\0", b"\xff\xff", b"[" * 100_000, b"-", b"9" * 5000]))
    skip = data.draw(st.sampled_from([0, 1, 8, len(old)]))
    path.write_bytes(old[:at] + new + old[at + skip :])


def change(folder, data):
    path = data.draw(st.sampled_from(files_in(folder)))
    ways: list[Mutate] = [change_bytes]
    if path.suffix == ".json":
        ways += [change_json] * 4
    elif path.suffix in (".pt", ".bin"):
        ways += [change_pickle] * 4
    data.draw(st.sampled_from(ways))(path, data)


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_files_of_every_kind_raise_only_typed_errors(seeds, tmp_path, kind):
    number = iter(range(10**6))
    model, optimizer = model_and_optimizer()

    @given(st.data())
    def fuzz(data):
        folder = shutil.copytree(seeds / kind, tmp_path / str(next(number)))
        change(folder if kind != "ours" else folder / "step-00000007", data)
        for attempt in (
            lambda: imported(folder, tmp_path / "target"),
            lambda: loaded(folder, model, optimizer) if kind == "ours" else None,
        ):
            with suppress(FullshardError):
                attempt()
        shutil.rmtree(folder)

    fuzz()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_any_flipped_bit_is_found_or_changes_nothing(seeds, tmp_path):
    """Covers load, export, import and verify."""
    folder = shutil.copytree(seeds / "ours", tmp_path / "ours")
    files = files_in(folder)
    wanted, (model, optimizer) = taken(folder), model_and_optimizer()
    right = loaded(folder, model, optimizer)

    @given(st.data())
    def flips(data):
        path = data.draw(st.sampled_from(files))
        old = path.read_bytes()
        bit = data.draw(st.integers(0, 8 * len(old) - 1))
        new = bytearray(old)
        new[bit // 8] ^= 1 << bit % 8
        path.write_bytes(new)
        checks = (
            lambda: same(taken(folder), wanted),
            lambda: loaded(folder, model, optimizer) == right,
            lambda: bool(find_damage(newest_complete(folder), lambda _count: None)),
        )
        try:
            for check in checks:
                with suppress(FullshardError):
                    assert check() or path.name == "COMPLETE.json"
        finally:
            path.write_bytes(old)

    flips()


@pytest.mark.parametrize("command", ["export", "import", "diff"])
def test_a_flipped_weight_is_found_by_every_command_that_reads_it(
    fullshard, seeds, tmp_path, command
):
    folder = shutil.copytree(seeds / "ours", tmp_path / "ours")
    path = folder / "step-00000007" / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # a bit of a number's exponent
    path.write_bytes(data)
    other = seeds / "ours" if command == "diff" else tmp_path / "out"
    words = ("--format", "dcp") if command == "export" else ()
    done = fullshard("ckpt", command, folder, other, *words, code=7)
    assert "expected the bytes of model/1." in done.err
    assert not (tmp_path / "out").exists()


def header(table, body):
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(begin, end, shape=None, dtype="F32"):
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "offsets before the data": {"a": entry(-8, 8)},
    "tensors that overlap": {"a": entry(0, 8), "b": entry(4, 16)},
    "bytes of no tensor": {"a": entry(0, 8)},
    "a shape of other bytes": {"a": entry(0, 16, [5])},
    "more than the file has": {"a": entry(0, 1 << 40)},
    "an endless shape": {"a": entry(0, 16, [1 << 62, 1 << 62, 0])},
    "flags for numbers": {"a": entry(False, 16)},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_foreign_header_must_place_every_byte_once(fullshard, tmp_path, what):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.safetensors"
    path.write_bytes(header(HEADERS[what], bytes(16)))
    done = fullshard("ckpt", "import", tmp_path / "in", tmp_path / "out", code=7)
    assert f"{path}: expected a whole safetensors file" in done.err
    assert not (tmp_path / "out").exists()


def test_a_crafted_newest_checkpoint_does_not_hide_a_good_one(seeds, tmp_path):
    model, optimizer = model_and_optimizer()
    for step, (name, text) in enumerate(
        [
            ("COMPLETE.json", "[" * 200_000),
            ("COMPLETE.json", '{"format": "fullshard-checkpoint", "version": 1e999}'),
            ("COMPLETE.json", '["\\ud800", "\\u0000"]'),
            ("index.json", '{"world_size": 1, "files": ["../x"], "tied": {}, "tensors": {}}'),
            ("state.json", '{"step": 99, "world_size": 1, "extra": [], "state": []}'),
            ("state.json", "null"),
            ("state.json", '{"step": 7, "extra": {}, "state": {}, "optimizer": {}}'),
        ],
        start=8,
    ):
        folder = tmp_path / f"step-{step:08d}"
        shutil.copytree(seeds / "ours" / "step-00000007", folder)
        (folder / name).write_text(text)
        if name != "COMPLETE.json":
            seal(folder, name)
    shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "step-00000007")
    assert fs.load(tmp_path, model, optimizer)["step"] == 7


def test_the_step_of_a_checkpoint_is_protected(seeds, tmp_path):
    folder = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "it")
    path = folder / "COMPLETE.json"
    text = path.read_text()
    other = json.loads(text.replace('"step": 7', '"step": 5'))
    for checksum in ({}, {"checksum": None}, {"checksum": other.pop("checksum")}):
        path.write_text(json.dumps({**other, **checksum}))
        with pytest.raises(FullshardError, match="values that differ from those written"):
            newest_complete(folder)
    seal(folder)
    with pytest.raises(FullshardError, match=r"step 7 in state\.json and 5 in"):
        taken(folder)
    path.write_text(text)
    seal(folder)
    assert Manifest.from_json(path.read_bytes(), "").step == 7
    assert taken(folder)["step"] == 7


def test_an_optimizers_group_without_a_setting_is_refused(seeds, tmp_path):
    folder = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "it")
    model, optimizer = model_and_optimizer()
    state = json.loads((folder / "state.json").read_text())
    (group,) = state["optimizer"]["groups"]
    rate, names = group.pop("lr"), group["params"]
    for settings in (group, {"params": names}):  # the second is like optax's, which has no groups
        state["optimizer"]["groups"] = [settings]
        (folder / "state.json").write_text(json.dumps(state))
        seal(folder, "state.json")
        if settings is group:
            with pytest.raises(FullshardError, match="expected lr in the saved settings of each"):
                fs.load(folder, model, optimizer)
    fs.load(folder, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == rate


def test_a_dtype_other_than_its_files_is_refused(fullshard, seeds, tmp_path):
    folder = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "it")
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"F32"', '"I32"'))
    seal(folder, "index.json")
    done = fullshard("ckpt", "export", folder, tmp_path / "out", "--format", "dcp", code=7)
    assert "in I32; there is none" in done.err


def test_pipes_devices_and_links_out_of_the_folder_are_refused(fullshard, seeds, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    for name, what in (("model.safetensors", "/dev/zero"), ("tokenizer.json", str(secret))):
        folder = shutil.copytree(seeds / "safetensors", tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(what)
        done = fullshard("ckpt", "import", folder, tmp_path / "out")
        assert (done.exit_code, (tmp_path / "out").exists()) == (7, False)
    assert f"tokenizer.json: expected a file of this folder; it is a link to '{secret}'" in done.err
    # A snapshot of a Hugging Face cache contains only links to blobs in a sibling folder.
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    shutil.copytree(seeds / "safetensors", cache / "snapshots" / "1")
    (cache / "blobs" / "1f").write_text("{}")
    (cache / "snapshots" / "1" / "tokenizer.json").symlink_to("../../blobs/1f")
    assert fullshard("ckpt", "import", cache / "snapshots" / "1", tmp_path / "out").exit_code == 0
    for kind, name in (
        ("bin", "pytorch_model.bin"),
        ("dcp", ".metadata"),
        ("deepspeed2", "latest"),
    ):
        folder = shutil.copytree(seeds / kind, tmp_path / kind)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert fullshard("ckpt", "import", folder, tmp_path / "pipe").exit_code == 7
    folder = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "piped")
    (folder / "COMPLETE.json").unlink()
    os.mkfifo(folder / "COMPLETE.json")
    assert fullshard("ckpt", "ls", tmp_path / "piped").exit_code == 7


def test_file_names_cannot_make_a_list_of_a_billion_ranks(fullshard, seeds, tmp_path):
    name = "model_world_size_999999999_rank_0.pt"
    shutil.copy(seeds / "ranks" / "model_world_size_1_rank_0.pt", tmp_path / name)
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "out", code=7)
    assert "expected the files of 999999999 ranks; got those of 0" in done.err


def test_a_dcp_pickle_cannot_change_classes(fullshard, seeds, tmp_path):
    from torch.distributed.checkpoint.metadata import Metadata

    folder = shutil.copytree(seeds / "dcp", tmp_path / "dcp")
    # GLOBAL Metadata, (None, {"hacked": 1}), BUILD: this sets attributes of the class.
    pickled = b"c" + f"{Metadata.__module__}\nMetadata\n".encode()
    pickled += b"(N(Vhacked\nI1\ndtb."
    (folder / ".metadata").write_bytes(pickled)
    fullshard("ckpt", "import", folder, tmp_path / "out", code=7)
    assert not hasattr(Metadata, "hacked")


def test_names_from_files_cannot_send_escape_codes_to_the_terminal(fullshard, tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    (tmp_path / "in").mkdir()
    save_file({evil: torch.ones(2, 2)}, tmp_path / "in" / "model.safetensors")
    assert fullshard("ckpt", "import", tmp_path / "in", tmp_path / evil.strip()).exit_code == 0
    spoken = [
        fullshard("ckpt", "inspect", tmp_path / evil.strip()),
        fullshard("ckpt", "export", tmp_path / evil.strip(), tmp_path / "out"),
        fullshard("ckpt", "ls", tmp_path / (evil + "no")),
    ]
    for done in spoken:
        assert not {"\x1b", "\x07", "\u202e"} & set(done.out + done.err)
    assert "owned" in spoken[0].out
    assert spoken[2].exit_code == 7


@pytest.mark.parametrize("at", ["step-00000009", "elsewhere", ".step-00000007.old-0"])
def test_a_link_to_a_checkpoint_is_not_counted_as_a_checkpoint(fullshard, seeds, tmp_path, at):
    real = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "step-00000007")
    fs.save(tmp_path, *model_and_optimizer(), step=1)
    older = tmp_path / "step-00000001"
    if at == "step-00000009":
        (tmp_path / at).symlink_to(real.name)
    else:
        real.rename(tmp_path / at)
        real.symlink_to(at)
    assert len(checkpoints_in(tmp_path)) == 2
    assert fullshard("ckpt", "prune", tmp_path, "--keep", "1").exit_code == 0
    assert newest_complete(tmp_path).path == real
    assert not older.exists()
    tidy(tmp_path / "step-00000007")
    assert newest_complete(tmp_path).step == 7


def test_removing_a_link_keeps_its_target(seeds, tmp_path):
    (tmp_path / "step-00000007").symlink_to(seeds / "ours" / "step-00000007")
    remove(checkpoints_in(tmp_path))
    assert not list(tmp_path.iterdir())
    assert newest_complete(seeds / "ours").step == 7


def test_resuming_from_an_older_checkpoint_is_always_reported(fullshard, seeds, tmp_path, caplog):
    shutil.copytree(seeds / "ours", tmp_path / "run")
    newest = shutil.copytree(seeds / "ours" / "step-00000007", tmp_path / "run" / "step-00000009")
    (newest / "COMPLETE.json").unlink()
    verified = fullshard("ckpt", "verify", tmp_path / "run")
    exported = fullshard("ckpt", "export", tmp_path / "run", tmp_path / "out", "--format", "dcp")
    assert (verified.exit_code, exported.exit_code) == (7, 0)
    assert f"DAMAGED  {newest}: it has no COMPLETE.json" in verified.out.replace("\n", "")
    why = "it has no COMPLETE.json, so its save never finished"
    said = f"skipped {newest}: {why}; using step-00000007"
    assert [m for m in caplog.messages if "skipped" in m] == [said, said]


def test_another_file_of_the_name_config_json_is_no_fault_of_the_weights(tmp_path):
    (tmp_path / "weights").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    with open_source(tmp_path / "weights") as source:
        assert [*source.tensors] == ["w"]
