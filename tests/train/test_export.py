"""A run's exported folder is what transformers would write of the unsharded model."""

import json
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard as fs
from fullshard.config.schema import LoraConfig, RunConfig
from fullshard.data.tokenize import train_tokenizer
from fullshard.errors import CheckpointError, ConfigError
from fullshard.models.build import Adapters, generation_text, save_model, write_folder
from fullshard.models.config import (
    build_model,
    config_from_settings,
    fit_to_tokenizer,
    quiet_libraries,
)
from fullshard.models.lora import add_adapters
from fullshard.run.folder import RunFolder
from fullshard.run.on_torch import TorchSide
from fullshard.saving import SaveSettings

MODELS = {
    "tied llama": {"model_type": "llama", "tie_word_embeddings": True},
    "untied llama": {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2"},
    "mixture of experts": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 8,
    },
}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "dtype": "bfloat16",  # dtype of the configuration's source, not of this run
}


def made(name):
    """Returns a configuration that fits the tokenizer, and a model of it."""
    quiet_libraries()
    tokenizer = train_tokenizer(["some text"], 300)
    config = config_from_settings({**SIZES, **MODELS[name]})
    fit_to_tokenizer(config, tokenizer)
    return config, tokenizer, build_model(config, None, torch.float32, seed=5)


def test_generation_settings_of_models_without_an_end_of_text_are_kept(tmp_path):
    AutoConfig.for_model("roc_bert", is_decoder=True).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert generation_text(AutoConfig.from_pretrained(tmp_path)) == {"generation_config.json": "{}"}


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_equals_that_of_transformers(name, tmp_path):
    config, tokenizer, model = made(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand_like(parameter)  # ones and zeros would hide faults
    model.generation_config.update(do_sample=True, temperature=0.3, eos_token_id=[1, 2])
    model.save_pretrained(tmp_path / "theirs")
    config.name_or_path = tmp_path / "theirs"
    texts = generation_text(config)
    write_folder(model.state_dict(), config, tokenizer, tmp_path / "whole", texts)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "of a run before").touch()
    save_model(fs.shard(model), config, tokenizer, tmp_path / "ours", texts=texts)
    given = (tmp_path / "theirs" / "generation_config.json").read_text()
    for folder in ("ours", "whole"):
        assert (tmp_path / folder / "generation_config.json").read_text() == given
    config.eos_token_id = 7  # like a tokenizer trained on the data
    assert generation_text(config) == {}
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "theirs", "whole"}
    assert not (tmp_path / "ours" / "of a run before").exists()
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, theirs[key]), key
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype is torch.float32


def test_a_model_from_full_weights_replaces_the_older_one_as_a_whole(tmp_path, monkeypatch):
    config, tokenizer, model = made("tied llama")
    weights = model.state_dict()
    folder = tmp_path / "model"
    for left in ("model", ".model.saving-0", ".model.old-0"):  # a kill between two renames
        (tmp_path / left).mkdir()
        (tmp_path / left / "of a run before").touch()

    def stop(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(tokenizer), "save_pretrained", stop)
        with pytest.raises(KeyboardInterrupt):
            write_folder(weights, config, tokenizer, folder)
    assert [path.name for path in folder.iterdir()] == ["of a run before"]
    write_folder(weights, config, tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (folder / "of a run before").exists()
    AutoModelForCausalLM.from_pretrained(folder)


def test_adapters_replace_older_ones_as_a_whole(tmp_path, monkeypatch):
    config, tokenizer, model = made("untied llama")
    lora = LoraConfig(r=2)
    add_adapters(model, lora)
    fs.shard(model)
    adapters = Adapters(lora, None, tmp_path / "adapter")
    adapters.folder.mkdir()
    (adapters.folder / "of a run before").touch()

    def stop(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fullshard.models.lora.peft_config", stop)  # a kill after the weights
        with pytest.raises(KeyboardInterrupt):
            save_model(model, config, tokenizer, tmp_path / "model", adapters)
    assert [path.name for path in adapters.folder.iterdir()] == ["of a run before"]
    save_model(model, config, tokenizer, tmp_path / "model", adapters)
    names = sorted(path.name for path in adapters.folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "model"}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # issued by peft
@pytest.mark.parametrize("name", ["untied llama", "gpt2"])
def test_merged_weights_are_those_that_peft_computes(name, tmp_path):
    config, tokenizer, model = made(name)
    lora = LoraConfig(r=2, lora_alpha=3)
    add_adapters(model, lora)
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    wanted = {n: m.base_layer.weight + m.get_delta_weight("default") for n, m in layers.items()}
    adapters = Adapters(lora, None, tmp_path / "adapter")
    save_model(fs.shard(model), config, tokenizer, tmp_path / "model", adapters)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert wanted
    for layer, weight in wanted.items():
        torch.testing.assert_close(found[f"{layer}.weight"], weight)


def adapted(run, seed=5, dtype=torch.float32, **places):
    """The torch side of a run that trains adapters on weights from a seed."""
    config, tokenizer, _ = made("untied llama")
    model = build_model(config, None, torch.float32, seed).to(dtype)
    add_adapters(model, run.lora)
    data = SimpleNamespace(tokenizer=tokenizer)
    folder = RunFolder(Path("run"))
    vars(folder).update(places)
    told = {"config": run, "folder": folder, "model_config": config}
    side = TorchSide(SimpleNamespace(**told, dataset=data))
    side.model = fs.shard(model, master_dtype=dtype)
    side.optimizer = torch.optim.AdamW(side.model.parameters())
    side.average = None
    return side


def test_adapters_continue_only_over_the_weights_that_they_were_trained_with(tmp_path):
    """The checkpoint has the old weights, but exported adapters would name the new ones."""
    run = RunConfig(lora={"r": 2}, model="nowhere")
    for dtype in (torch.bfloat16, torch.float32):
        adapted(run, dtype=dtype).save(tmp_path / "saved", {}, SaveSettings())
        for now in (torch.bfloat16, torch.float32):
            adapted(run, dtype=now).load(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"the weights over .* in 'None' \(.*weight differs\)"):
        adapted(run, seed=6).load(tmp_path / "saved")


def test_adapters_of_a_student_name_its_cut_of_the_teacher(tmp_path):
    run = RunConfig(lora={"r": 2}, teacher="whole", model="whole", distill={"layers": 1})
    places = {name: tmp_path / name for name in ("model", "adapter", "model_ema", "adapter_ema")}
    adapted(run, **places).export(None)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == "run/student"


def test_the_folder_of_the_first_weights_may_be_gone_at_the_end_of_a_run(tmp_path):
    _, _, model = made("untied llama")
    model.save_pretrained(first := tmp_path / "first")
    run = RunConfig(lora={"r": 2}, model=str(first))
    side = adapted(run)
    side._session.model_config.name_or_path = str(first)
    assert side.texts  # read as a run begins, for its checkpoints
    shutil.rmtree(first)
    places = {name: tmp_path / name for name in ("model", "adapter", "model_ema", "adapter_ema")}
    vars(side._session.folder).update(places)
    side.export(None)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(first)
    assert (tmp_path / "model" / "generation_config.json").is_file()


def on_a_rank(folder, cap):
    config, tokenizer, model = made("mixture of experts")
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "theirs", max_shard_size=cap)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fullshard.models.build.MAX_FILE_BYTES", cap)
        return save_model(fs.shard(model), config, tokenizer, folder / "ours")


def test_ranks_take_turns_in_writing_files(ranks, tmp_path):
    first, second = ranks(2)(on_a_rank, tmp_path, 20_000)
    assert len(first) > 1
    assert second
    assert not set(first) & set(second)
    ours, theirs = ({}, {})
    for found, folder in ((ours, "ours"), (theirs, "theirs")):
        for path in (tmp_path / folder).glob("*.safetensors"):
            found.update(load_file(path))
            assert path.stat().st_size < 30_000
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    names = {path.name for path in (tmp_path / "ours").glob("*.safetensors")}
    assert names == {*first, *second}
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def on_a_full_disk(folder):
    """The second rank cannot write its first file; both ranks must raise, and none may hang."""
    config, tokenizer, model = made("untied llama")
    fs.shard(model)
    if dist.get_rank() == 1:
        limit = 10_000  # limit of bytes per file
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fullshard.models.build.MAX_FILE_BYTES", 30_000)
            save_model(model, config, tokenizer, folder / "ours")
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_a_rank_that_cannot_write_is_an_error_on_all(ranks, tmp_path):
    said = ranks(2)(on_a_full_disk, tmp_path)
    assert all("File too large" in text for text in said), said


def test_checkpoint_with_adapters_is_named_by_readers_of_other_models(tmp_path, fullshard):
    config, _, model = made("untied llama")
    config.save_pretrained(tmp_path / "config")
    add_adapters(model, LoraConfig(r=2))
    fs.save(tmp_path / "saved", fs.shard(model), optimizer=None)
    with pytest.raises(CheckpointError, match="has the adapters of lora, the other has none"):
        fs.load(tmp_path / "saved", fs.shard(made("untied llama")[2]), optimizer=None)
    words = tmp_path / "saved", tmp_path / "out", "--config", tmp_path / "config"
    said = fullshard("ckpt", "export", *words, code=7).err
    assert "use model/ or adapter/ of the finished run with lora" in said
