"""The folder that a run writes is what transformers would have written of the unsharded model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fullshard as fs
from fullshard.train.export import save_model
from fullshard.train.model import (
    build_model,
    config_from_settings,
    fit_to_tokenizer,
    quiet_libraries,
)
from fullshard.train.tokenizer import train_tokenizer

MODELS = {
    "tied llama": {"model_type": "llama", "tie_word_embeddings": True},
    "untied llama": {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2"},
    "mixture of experts": {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8},
}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "dtype": "bfloat16",  # of the file that the configuration came from, not of this run
}


@pytest.mark.parametrize("name", MODELS)
def test_folder_equals_what_transformers_saves(name, tmp_path):
    quiet_libraries()
    tokenizer = train_tokenizer(["some text"], 300)
    config = config_from_settings({**SIZES, **MODELS[name]})
    fit_to_tokenizer(config, tokenizer)
    model = build_model(config, None, torch.float32, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand_like(parameter)  # ones and zeros would hide faults
    model.save_pretrained(tmp_path / "theirs")
    save_model(fs.shard(model), config, tokenizer, tmp_path / "ours", rank=0)
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, theirs[key]), key
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype is torch.float32


def test_other_ranks_write_nothing(tmp_path):
    tokenizer = train_tokenizer(["some text"], 300)
    config = config_from_settings({**SIZES, "model_type": "llama"})
    fit_to_tokenizer(config, tokenizer)
    model = fs.shard(build_model(config, None, torch.float32, seed=5))
    save_model(model, config, tokenizer, tmp_path / "ours", rank=1)
    assert not (tmp_path / "ours").exists()
