"""Model configurations: every key is known, every fault is said before a rank starts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.errors import ConfigError
from fullshard.train.model import (
    build_model,
    build_on_meta,
    check_length,
    check_model_folder,
    config_from_folder,
    config_from_settings,
    fit_to_tokenizer,
    freeze,
)
from fullshard.train.tokenizer import train_tokenizer

SETTINGS = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "llamma"},
            r"model.config.model_type: .*got 'llamma'. Did you mean 'llama'\?",
        ),
        ({"model_type": None}, r"got none. Use one such as"),
        ({"hiden_size": 16}, r"model.config.hiden_size: .*Did you mean 'hidden_size'\?"),
        ({"hidden_size": "wide"}, r"model.config: LlamaConfig refuses .*hidden_size.*"),
        ({"hidden_size": 17}, r"hidden size \(17\) is not a multiple"),
        ({"model_type": "vit"}, r"expected a type with a causal language model, got 'vit'"),
    ],
)
def test_wrong_configuration_says_what_is_wrong(change, expected):
    with pytest.raises(ConfigError, match=expected):
        config_from_settings({**SETTINGS, **change})


def test_keys_that_every_class_reads_are_known():
    config = config_from_settings(
        {**SETTINGS, "rope_theta": 5000.0, "attn_implementation": "eager", "use_cache": False}
    )
    assert config._attn_implementation == "eager"
    assert config.rope_parameters["rope_theta"] == 5000.0


def test_attribute_names_of_older_classes_are_known():
    config = config_from_settings({"model_type": "gpt2", "hidden_size": 16, "n_layer": 1})
    assert config.n_embd == 16


def test_vocabulary_left_out_is_the_tokenizers():
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings(SETTINGS)
    fit_to_tokenizer(config, tokenizer)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id


def test_vocabulary_that_is_too_small_is_refused():
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings({**SETTINGS, "vocab_size": 100})
    with pytest.raises(ConfigError, match=rf"at least {len(tokenizer)} .*got 100"):
        fit_to_tokenizer(config, tokenizer, ["vocab_size"])


def test_sequences_longer_than_the_model_has_positions_are_refused():
    check_length(config_from_settings(SETTINGS), 64)
    with pytest.raises(ConfigError, match=r"training.max_seq_length: expected at most 64"):
        check_length(config_from_settings(SETTINGS), 65)


def test_hub_name_that_is_no_folder_says_that_nothing_is_downloaded(tmp_path):
    (tmp_path / "llama-small").mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean '.*llama-small'\? Nothing is downloaded"):
        check_model_folder(tmp_path / "llamma-small")
    with pytest.raises(ConfigError, match=r"without config\.json"):
        check_model_folder(tmp_path / "llama-small")


def test_folder_with_a_configuration_that_transformers_refuses_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ConfigError, match=r"expected a config.json that transformers reads"):
        config_from_folder(tmp_path)


def test_initial_weights_depend_on_the_seed_alone():
    config = config_from_settings(SETTINGS)
    torch.manual_seed(9)
    first = build_model(config, None, torch.float32, 3)
    torch.rand(5)
    again = build_model(config, None, torch.float32, 3)
    other = build_model(config, None, torch.float32, 4)
    states = [dict(model.named_parameters()) for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(*(s["model.embed_tokens.weight"] for s in (states[0], states[2])))


def test_weights_of_a_folder_are_loaded_in_the_master_dtype(tmp_path):
    config = config_from_settings(SETTINGS)
    saved = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    loaded = build_model(config_from_folder(tmp_path), tmp_path, torch.float32, 0)
    weight = loaded.get_parameter("lm_head.weight")
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight, saved.get_parameter("lm_head.weight").float())


def test_freeze_takes_the_gradient_from_what_matches():
    model = build_on_meta(config_from_settings(SETTINGS))
    assert freeze(model, ["model.embed_tokens.*", "*.mlp.*"]) == 4
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all("mlp" in name or "embed" in name for name in frozen)


def test_freeze_glob_that_matches_nothing_names_the_nearest_parameter():
    model = build_on_meta(config_from_settings(SETTINGS))
    expected = r"got 'lm_haed.*', which matches none. Did you mean 'lm_head.weight'\?"
    with pytest.raises(ConfigError, match=expected):
        freeze(model, ["lm_haed.*"])


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="leave something to train"):
        freeze(build_on_meta(config_from_settings(SETTINGS)), ["*"])
