"""Exported folders open in transformers and in torch's tools, and give the same logits."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

import fullshard as fs
from support.models import CASES, hugging_face

MODELS = ["tied llama", "llama", "mixture of experts", "one tensor of several"]
TOKENS = torch.arange(14).view(2, 7)


def whole(name):
    return (CASES[name].build() if name in CASES else one_of_several()).float()


def one_of_several():
    """One tensor in its files contains queries, keys and values."""
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 8}
    return hugging_face("hrm_text", intermediate_size=48, **sizes)


def write(root):
    """Writes a checkpoint of each model after a step of SGD; returns the logits of one process."""
    for name in MODELS:
        sharded, one = fs.shard(whole(name)), whole(name)
        for model in (sharded, one):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
        fs.save(Path(root) / name, sharded, optimizer=None)
        if dist.get_rank() == 0:
            with torch.no_grad():
                torch.save(one.eval()(TOKENS).logits, Path(root) / f"{name}.logits")


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    ranks(2)(write, str(root))
    return root


def logits_of(folder, **settings):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_folder_gives_the_logits_of_the_model(fullshard, written, tmp_path, name):
    folder = tmp_path / "exported"
    done = fullshard(
        "ckpt", "export", written / name, folder, "--max-shard-size", "20KB", "--json", code=0
    )
    assert done.json["left_out"] == []
    wanted = torch.load(written / f"{name}.logits")
    assert torch.allclose(logits_of(folder), wanted, atol=1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 3
    assert all(size < 26_000 for size in sizes)  # 20 KB or one tensor, plus a header
    state = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert state.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    whole(name).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in theirs.items()}
    again = tmp_path / "again"
    assert fullshard("ckpt", "diff", written / name, folder).exit_code == 0
    assert fullshard("ckpt", "import", folder, again).exit_code == 0
    rows = [fullshard("ckpt", "inspect", at, "--json").json for at in (written / name, again)]
    ours, its = ({r["name"] for r in one["tensors"] if r["kind"] == "model"} for one in rows)
    assert ours == its  # names of the model, so that a run can start from it
    assert fullshard("ckpt", "export", again, tmp_path / "exported again").exit_code == 0


def test_an_export_in_bf16_is_the_rounded_model_in_one_file(fullshard, written, tmp_path):
    folder = tmp_path / "exported"
    fullshard("ckpt", "export", written / "llama", folder, "--dtype", "bf16", code=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    done = fullshard("ckpt", "diff", written / "llama", folder, "--json", code=8)
    assert {row["verdict"] for row in done.json["rows"]} == {
        "same but for rounding to the other's dtype"
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_dcp_load_reads_an_export_with_its_optimizer(fullshard, tmp_path):
    model = fs.shard(whole("tied llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    fs.save(tmp_path / "ours", model, optimizer, step=1)
    words = ("ckpt", "export", tmp_path / "ours", tmp_path / "dcp", "--format", "dcp")
    fullshard(*words, code=0)
    theirs = whole("tied llama")
    adamw = torch.optim.AdamW(theirs.parameters(), lr=3.0)
    state, states = get_state_dict(theirs, adamw)
    dcp.load({"model": state, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(theirs, adamw, model_state_dict=state, optim_state_dict=states)
    for name, value in fs.full_state_dict(model).items():
        assert torch.equal(theirs.state_dict()[name], value), name
    assert adamw.param_groups[0]["lr"] == 1e-2
    for mine, its in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(
            adamw.state[its]["exp_avg"], optimizer.state[mine]["exp_avg"].view_as(its)
        )
        assert adamw.state[its]["step"] == 1
    # Our import reads it back.
    done = fullshard("ckpt", "diff", tmp_path / "ours", tmp_path / "dcp", "--json")
    assert [row["name"] for row in done.json["rows"]] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["tied tensors", "an optimizer", "a damaged configuration"])
def test_references_to_file_names_are_renamed_or_dropped(fullshard, tmp_path, case):
    model = whole("tied llama")
    model.config.save_pretrained(tmp_path)
    base = model.model  # its names begin after "model."
    if case == "an optimizer":
        optimizer = torch.optim.AdamW(base.parameters())
        base(TOKENS).last_hidden_state.sum().backward()
        optimizer.step()
        state, states = get_state_dict(base, optimizer)
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=tmp_path, no_dist=True)
    else:
        head = {"lm_head.weight": model.lm_head.weight}
        torch.save({**base.state_dict(), **head}, tmp_path / "pytorch_model.bin")
    if case == "a damaged configuration":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", "--json", code=0)
    told = {
        "tied tensors": [],
        "an optimizer": ["the states of AdamW, under the names and shapes of files"],
        "a damaged configuration": ["the names of the model of config.json, those of the files"],
    }
    assert [note.partition(" stay: ")[0] for note in done.json["left_out"]] == told[case]
    facts = fullshard("ckpt", "inspect", tmp_path / "ours", "--json").json
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    if case == "a damaged configuration":
        assert facts["tied"] == {"lm_head.weight": "embed_tokens.weight"}
        return
    assert facts["tied"] == (tied if case == "tied tensors" else {})
    names = {row["name"] for row in facts["tensors"]}
    assert names == {name for name, _ in model.named_parameters()}
    fullshard("ckpt", "export", tmp_path / "ours", tmp_path / "exported", code=0)


def test_a_refused_export_names_the_reason_and_leaves_no_file(fullshard, written, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = fullshard("ckpt", "export", written / "llama", tmp_path / "full", code=7)
    assert "expected a new or empty folder" in done.err
    for words in (("export", written / "llama"), ("import", written / "llama")):
        done = fullshard("ckpt", *words, tmp_path / "full", "--dry-run", code=7)
        assert "expected a new or empty folder" in done.err
    config = json.loads((written / "llama" / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    words = ("ckpt", "export", written / "llama", tmp_path / "new", "--dry-run", "--json")
    done = fullshard(*words, "--config", tmp_path / "config", code=0)
    assert done.json["left_out"] == [f"rms_norm_eps {config['rms_norm_eps']}: --config has 0.5"]
    other = whole("mixture of experts")
    other.save_pretrained(tmp_path / "config")
    words = ("ckpt", "export", written / "llama", tmp_path / "new")
    done = fullshard(*words, "--config", tmp_path / "config", code=7)
    assert "as the model of config.json has it" in done.err
    done = fullshard(*words, "--config", tmp_path / "config", "--dry-run", code=7)
    assert "as the model of config.json has it" in done.err
    done = fullshard(*words, "--config", tmp_path / "config", "--format", "dcp", code=2)
    assert "--config: expected --format hf, got dcp" in done.err
    state = load_file(tmp_path / "config" / "model.safetensors")
    del state["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(state, tmp_path / "config" / "model.safetensors")
    done = fullshard("ckpt", "export", tmp_path / "config", tmp_path / "new", code=7)
    assert "has none, but model.layers.0.mlp.experts." in done.err
    assert fullshard(*words, "--dtype", "int3").exit_code == 2
    for size in ("5 apples", "1.2.3GB", "9" * 400):
        assert fullshard(*words, "--max-shard-size", size).exit_code == 2
    done = fullshard(*words, "--format", "dcp", "--max-shard-size", "5GB", code=2)
    assert "--max-shard-size: expected --format hf, got dcp" in done.err
    assert fullshard("ckpt", "export", written / "llama", "x" * 5000).exit_code == 7
    assert fullshard(*words, "--dry-run").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "full"]


@pytest.mark.parametrize("there", ["an empty folder", "nothing"])
def test_an_export_through_a_link_goes_where_it_leads(fullshard, written, tmp_path, there):
    if there == "an empty folder":
        (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    fullshard("ckpt", "export", written / MODELS[0], tmp_path / "out", code=0)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_an_export_removes_leftovers_of_a_killed_one(fullshard, written, tmp_path):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    dead, alive = (tmp_path / f".out.saving-{pid:x}" for pid in (ended.pid, os.getppid()))
    others = [tmp_path / ".other.saving-1fffff", tmp_path / ".out.saving-0123456789ab"]
    for left in (dead, alive, *others):
        left.mkdir()
        (left / "model.safetensors").write_text("half")
    fullshard("ckpt", "export", written / MODELS[0], tmp_path / "out", code=0)
    assert not dead.exists()
    assert all(left.exists() for left in (alive, *others))
