"""Imported checkpoints of other tools compute and train like the original model."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import fullshard as fs
from support.models import CASES, perturbed
from support.scripts import NUM_TOKENS, Tiny, differences

WRITERS = {
    "fsdp2 dcp": (4, "AdamW"),
    "fsdp2 dcp, model alone": (4, None),
    "accelerate, sharded": (4, "AdamW"),
    "fsdp2 ranks": (4, None),
    "fsdp2 ranks, replicated": (4, None),
    "fsdp1 ranks, sharded tensors": (2, None),
    "fsdp1 whole": (2, None),
}


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, NUM_TOKENS, (4, 5), generator=generator)


def train(model, optimizer, steps):
    for step in steps:
        model(tokens(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def model_of(seed=0):
    torch.manual_seed(seed)
    model = Tiny(tied=False)
    model.scale = nn.Parameter(torch.ones(1))  # FSDP2 rejects zero-dimensional parameters
    return perturbed(model)


def adamw_of(model, lr=1e-2):
    """AdamW without weight decay; FSDP1 gives an unused parameter a gradient of zeros."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def one_process(steps):
    """Trains in one process; all ranks see the same batch."""
    model = model_of()
    optimizer = adamw_of(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def write_fsdp2(root):
    mesh = init_device_mesh("cpu", (2,))
    model = model_of()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw_of(model)
    train(model, optimizer, range(2))
    state, states = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=root / "fsdp2 dcp")
    dcp.save(state, checkpoint_id=root / "fsdp2 dcp, model alone")
    folder = root / "accelerate, sharded"  # two folders with the names that Accelerate uses
    dcp.save({"model": state}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
    save_rank(root / "fsdp2 ranks", state)


def write_replicated(root):
    """Ranks 0 and 1 hold the shards; ranks 2 and 3 hold replicas of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    fully_shard(model, mesh=mesh)
    train(model, adamw_of(model), range(2))
    save_rank(root / "fsdp2 ranks, replicated", model.state_dict())


def write_fsdp1(root):
    model = FullyShardedDataParallel(
        model_of(), device_id=torch.device("cpu"), use_orig_params=True
    )
    train(model, adamw_of(model), range(2))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        save_rank(root / "fsdp1 ranks, sharded tensors", model.state_dict())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if dist.get_rank() == 0:  # the name that Accelerate gives it
        (root / "fsdp1 whole").mkdir()
        torch.save(state, root / "fsdp1 whole" / "pytorch_model_fsdp.bin")


def save_rank(folder, state):
    folder.mkdir(exist_ok=True)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")


def write_two(root):
    write_fsdp2(Path(root))
    with warnings.catch_warnings():  # FSDP1 itself issues many warnings
        warnings.simplefilter("ignore")
        write_fsdp1(Path(root))


def write_four(root):
    write_replicated(Path(root))


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("theirs")
    ranks(2)(write_two, str(root))
    ranks(4)(write_four, str(root))
    return root


def loaded(checkpoint, optimizer):
    model = fs.shard(model_of(seed=1))
    adamw = adamw_of(model, lr=7.0)
    fs.load(checkpoint, model, adamw if optimizer else None)
    return model, adamw


@pytest.mark.parametrize("name", WRITERS)
def test_an_import_has_equal_weights_and_continues_with_the_optimizer_states(
    fullshard, written, tmp_path, name
):
    optimizer = WRITERS[name][1]
    done = fullshard("ckpt", "import", written / name, tmp_path / "ours", "--json", code=0)
    assert done.json["optimizer"] == optimizer
    assert fullshard("ckpt", "verify", tmp_path / "ours").exit_code == 0
    model, adamw = loaded(tmp_path / "ours", optimizer is not None)
    one, theirs = one_process(2)
    assert not list(differences(fs.full_state_dict(model), one.state_dict(), 1e-5))
    if optimizer is not None:
        assert adamw.param_groups[0]["lr"] == 1e-2
        train(model, adamw, range(2, 4))
        train(one, theirs, range(2, 4))
        assert not list(differences(fs.full_state_dict(model), one.state_dict(), 1e-5))


def test_a_missing_ranks_file_is_named(fullshard, written, tmp_path):
    folder = shutil.copytree(written / "fsdp2 ranks", tmp_path / "theirs")
    (folder / "model_world_size_2_rank_1.pt").unlink()
    done = fullshard("ckpt", "import", folder, tmp_path / "ours", code=7)
    assert "expected the files of 2 ranks; got those of 0" in done.err
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_1_rank_1.pt")
    done = fullshard("ckpt", "import", folder, tmp_path / "ours", code=7)
    assert "got those of 1 of 1, 0 of 2" in done.err


def test_tensors_of_one_rank_only_are_not_dropped_silently(fullshard, tmp_path):
    for rank, state in enumerate([{"w": torch.ones(2)}, {"w": torch.zeros(2)}]):
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", "--dry-run", code=0)
    assert "left out: w of other ranks than 0, which differs" in done.out
    torch.save({"w": torch.ones(2), "v": torch.ones(1)}, tmp_path / "model_world_size_2_rank_1.pt")
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", code=7)
    assert "expected the same names on all ranks; got v on some" in done.err


def test_a_view_that_is_not_the_same_tensor_is_not_tied(fullshard, tmp_path):
    one = torch.arange(9.0).view(3, 3)
    torch.save({"a": one, "same": one, "turned": one.T}, tmp_path / "x")
    fullshard("ckpt", "import", tmp_path / "x", tmp_path / "ours", "--json", code=0)
    found = fullshard("ckpt", "inspect", tmp_path / "ours", "--json").json
    assert {"a", "turned"} <= {row["name"] for row in found["tensors"]}


def test_each_rank_needs_one_file_of_deepspeed(fullshard, tmp_path):
    facts = {"module": {}, "param_shapes": [{"w": torch.Size([4])}]}
    torch.save(facts, tmp_path / "mp_rank_00_model_states.pt")
    part = {"partition_count": 2, "single_partition_of_fp32_groups": [torch.ones(2)]}
    for name in ("zero_pp_rank_0_mp", "bf16_zero_pp_rank_0_mp"):
        file = tmp_path / f"{name}_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": part}, file)
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", code=7)
    assert "expected one *_optim_states.pt per rank, from 0" in done.err
    file.rename(tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert fullshard("ckpt", "import", tmp_path, tmp_path / "ours").exit_code == 0
    part["single_partition_of_fp32_groups"] = [torch.ones(4)]  # a file of a larger model
    for rank in (0, 1):
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": part}, file)
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "more", code=7)
    assert "param_shapes: expected 4 elements in group 0, got 8" in done.err


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tensor_that_two_files_hold_is_refused(fullshard, tmp_path, kind):
    from safetensors.torch import save_file

    one = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    write = save_file if kind == "safetensors" else torch.save
    write({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.part")
    write({"b": torch.zeros(2)}, tmp_path / "2.part")
    index = {"weight_map": {"a": "1.part", "b": "2.part"}}
    (tmp_path / f"{one}.index.json").write_text(json.dumps(index))
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", code=7)
    assert "2.part': expected each tensor in one file; got b in another one too" in done.err
    write({"c": torch.zeros(2)}, tmp_path / "2.part")  # a file of another save
    listed = {"weight_map": {"a": "1.part", "d": "2.part"}}
    (tmp_path / f"{one}.index.json").write_text(json.dumps(listed))
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", code=7)
    assert f"{one}.index.json': expected d in the files; it has none" in done.err
    empty = tmp_path / "empty"
    empty.mkdir()
    write({}, empty / one)
    done = fullshard("ckpt", "import", empty, tmp_path / "ours", code=7)
    assert "expected tensors in the files" in done.err or "got no named tensors" in done.err


def test_tied_weights_that_differ_are_not_exported_as_one(fullshard, tmp_path):
    model = CASES["llama"].build()
    model.config.tie_word_embeddings = True  # its weights are not tied
    model.config.save_pretrained(tmp_path / "theirs")
    torch.save(model.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    assert fullshard("ckpt", "import", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    done = fullshard("ckpt", "export", tmp_path / "ours", tmp_path / "back", code=7)
    assert "expected lm_head.weight to equal model.embed_tokens.weight" in done.err
    assert not (tmp_path / "back").exists()


@pytest.mark.short(2)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["tied llama", "llama"])
def test_a_hugging_face_folder_goes_in_and_out_with_the_same_logits(
    fullshard, tmp_path, name, kind
):
    from transformers import AutoModelForCausalLM

    theirs = CASES[name].build().float().eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    if kind == "bin":
        for file in tmp_path.glob("theirs/model*"):
            file.unlink()
        torch.save(theirs.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    done = fullshard("ckpt", "import", tmp_path / "theirs", tmp_path / "ours", code=0)
    assert "left out" not in done.out
    assert fullshard("ckpt", "diff", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    ours = fs.shard(CASES[name].build().float())
    with torch.no_grad():
        for param in ours.parameters():
            param.fill_(1.0)
    fs.load(tmp_path / "ours", ours)
    fullshard("ckpt", "export", tmp_path / "ours", tmp_path / "back", code=0)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert torch.equal(back(ids).logits, wanted)
        assert torch.allclose(ours.eval()(ids).logits, wanted, atol=1e-6)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_that_could_execute_code_is_refused_by_name(fullshard, tmp_path, capfd):
    torch.save({"weight": torch.ones(2), "more": Evil()}, tmp_path / "pytorch_model.bin")
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "ours", code=7)
    assert "it names print, and what could execute code is not read" in done.err
    assert "executed" not in done.out
    assert not (tmp_path / "ours").exists()


def test_other_folders_and_damaged_files_are_refused(fullshard, tmp_path):
    assert fullshard("ckpt", "import", tmp_path / "none", tmp_path / "o").exit_code == 7
    (tmp_path / "empty").mkdir()
    done = fullshard("ckpt", "import", tmp_path / "empty", tmp_path / "o", code=7)
    assert "got a folder with none. Pass the folder with weights" in done.err
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and then nothing")
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "o", code=7)
    assert "expected a whole file of torch.save" in done.err
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    done = fullshard("ckpt", "import", tmp_path / "dcp", tmp_path / "o", code=7)
    assert "it names builtins.print" in done.err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "dcp/__0_0.distcp"])
def test_a_flipped_byte_of_a_weight_is_found(fullshard, tmp_path, name):
    state = {"w": torch.full((64,), 3.0)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    place = (tmp_path / name).parent
    assert fullshard("ckpt", "import", place, tmp_path / "whole").exit_code == 0
    data = bytearray((tmp_path / name).read_bytes())
    data[data.index(state["w"].numpy().tobytes())] ^= 1
    (tmp_path / name).write_bytes(data)
    done = fullshard("ckpt", "import", place, tmp_path / "o", code=7)
    assert "expected entries that equal their checksums" in done.err


def test_an_import_of_several_formats_names_the_ignored_ones(fullshard, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    (tmp_path / "adapter_model.safetensors").touch()
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "new", "--dry-run", "--json")
    assert done.json["source"] == "a Hugging Face folder"
    adapters = "adapter_model.safetensors, not merged"
    assert done.json["left_out"] == ["pytorch_model_fsdp.bin, of another format", adapters]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_optimizer_states_in_the_layout_of_torchs_tutorial_are_found(fullshard, tmp_path):
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(3.0)}
    groups = [{"params": ["w"], "lr": 0.1, "decoupled_weight_decay": True}]
    app = {
        "model": {"w": torch.zeros(2)},
        "optim": {"state": {"w": moments}, "param_groups": groups},
    }
    dcp.save({"app": app, "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = fullshard("ckpt", "import", tmp_path / "dcp", tmp_path / "new", "--json")
    assert (done.json["num_tensors"], done.json["optimizer"]) == (1, "AdamW")
    assert done.json["left_out"] == ["epoch, beside the model"]
    assert (
        fullshard("ckpt", "inspect", tmp_path / "new", "--json").json["tensors"][0]["name"] == "w"
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["dcp", "file"])
def test_other_contents_of_an_imported_file_are_named(fullshard, tmp_path, kind):
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "step": 7}
    if kind == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / kind, no_dist=True)
    else:
        torch.save(state, tmp_path / kind)
    done = fullshard("ckpt", "import", tmp_path / kind, tmp_path / "new", "--dry-run", "--json")
    assert done.json["num_tensors"] == 1
    assert sorted(done.json["left_out"]) == ["ema, beside the model", "step, beside the model"]


def test_an_import_of_a_trainers_checkpoint_reads_the_step_and_names_the_rest(fullshard, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for name in ("optimizer.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 42}')
    done = fullshard("ckpt", "import", tmp_path, tmp_path / "new", "--json")
    assert done.json["left_out"] == [
        "optimizer.pt, of the Trainer",
        "rng_state*.pth, of the Trainer",
    ]
    assert fullshard("ckpt", "inspect", tmp_path / "new", "--json").json["step"] == 42
    for odd in ("[]", '{"global_step": -1}'):
        (tmp_path / "trainer_state.json").write_text(odd)
        assert fullshard("ckpt", "import", tmp_path, tmp_path / "other").exit_code == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 64}, "in the files"),
        ({"num_hidden_layers": 5}, "is not in the files"),
        ({"num_hidden_layers": 1}, "as it is: it lacks model.layers.1"),
    ],
)
def test_an_import_reports_a_configuration_of_another_model(fullshard, tmp_path, change, said):
    CASES["llama"].build().save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **change}))
    words = ("ckpt", "import", tmp_path / "theirs", tmp_path / "ours", "--config")
    done = fullshard(*words, tmp_path / "other", "--dry-run", code=0)
    assert "left out: a model of config.json as it is: " in done.out
    assert said in done.out
