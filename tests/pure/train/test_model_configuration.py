"""Model configurations: every key is known, and every fault is an error before a rank starts."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.config.files import read_job
from fullshard.config.load import load_config
from fullshard.config.schema import ModelConfig
from fullshard.data.tokenize import train_tokenizer
from fullshard.engine.hugging_face import build_on_meta
from fullshard.errors import ConfigError, untrusted
from fullshard.launch.exit_codes import exit_code_of
from fullshard.models.build import check_weights, with_fitting_length
from fullshard.models.config import (
    build_model,
    check_model_folder,
    config_from_folder,
    config_from_settings,
    fit_to_tokenizer,
    freeze,
    quiet_libraries,
)
from fullshard.models.generate import SamplingSettings
from fullshard.run.generation import Request, generate
from support.sizes import sizes_of

SETTINGS = sizes_of(16, 32, 2, layers=1, model_type="llama", max_position_embeddings=64)


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


def test_keys_that_only_the_code_of_a_model_reads_are_known():
    config = config_from_settings({"model_type": "qwen3_moe", "head_dim": 24})
    assert config.head_dim == 24
    for key in ("head_dimm", "to_dict"):
        with pytest.raises(ConfigError, match=f"{key}: expected a key of Qwen3MoeConfig"):
            config_from_settings({"model_type": "qwen3_moe", key: 24})


def test_vocabulary_left_out_is_the_tokenizers():
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings(SETTINGS)
    fit_to_tokenizer(config, tokenizer)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10_000_000, r"num_hidden_layers: expected between 1 and 1,000"),
        ("num_hidden_layers", -1, r"num_hidden_layers: expected between 1 and 1,000, got -1"),
        ("hidden_size", -32, "hidden_size: expected at least 1, got -32"),
        ("num_key_value_heads", 7, "num_key_value_heads: expected a divisor of 2, got 7"),
        ("attention_dropout", 2, "attention_dropout: expected a number from 0 to 1, got 2"),
        ("num_attention_heads", 0, "refuses these values: integer division"),
        ("intermediate_size", -4, r"cannot build a model \(RuntimeError: .* with negative"),
        ("head_dim", -4, r"cannot build a model \(RuntimeError: .* with negative"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(key, value, said):
    with pytest.raises(ConfigError, match=said):
        build_on_meta(config_from_settings({**SETTINGS, key: value}))


def test_vocabulary_that_is_too_small_is_refused():
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings({**SETTINGS, "vocab_size": 100})
    with pytest.raises(ConfigError, match=rf"at least {len(tokenizer)} .*got 100"):
        fit_to_tokenizer(config, tokenizer, ["vocab_size"])


@pytest.mark.parametrize(
    ("name", "teacher_positions", "words", "expected"),
    [
        ("main_job.yaml", None, [], (64, "model")),
        ("sft_job.yaml", None, [], (64, "model")),
        ("distill_jax_job.yaml", 32, [], (32, "teacher")),
        ("distill_jax_job.yaml", 4096, [], (64, "model")),
        ("main_job.yaml", None, ["max_seq_length=64"], (64, None)),
        ("main_job.yaml", None, ["max_seq_length=65"], "at most 64 .the model's max_position_emb"),
        (
            "distill_jax_job.yaml",
            32,
            ["max_length=64"],
            "at most 32 .the teacher's max_position_emb",
        ),
    ],
)
def test_a_default_length_is_fitted_to_the_model_and_a_given_one_is_checked(
    tmp_path, caplog, name, teacher_positions, words, expected
):
    positions = {"model": 64, "teacher": teacher_positions}
    for whose, limit in positions.items():
        if limit:
            config_from_settings({**SETTINGS, "max_position_embeddings": limit}).save_pretrained(
                tmp_path / whose
            )
            words = [*words, f"{whose}={tmp_path / whose}"]
    recipe = name.partition("_")[0]
    package = None if recipe == "main" else f"fullshard.recipes.{recipe}"
    resolved = load_config([read_job(name, package)], words)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=rf"training.max_seq_length: expected {expected}"):
            with_fitting_length(resolved)
        return
    length, whose = expected
    with caplog.at_level("INFO", "fullshard"):
        fitted = with_fitting_length(resolved)
    assert fitted.config.training.max_seq_length == length
    said = f"max_seq_length: {length} (the {whose}'s max_position_embeddings); the default is 128"
    assert caplog.messages == ([said] if whose else [])


def test_a_hub_name_is_answered_that_models_are_not_downloaded(tmp_path):
    (tmp_path / "llama-small").mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean '.*llama-small'\? Nothing is downloaded"):
        check_model_folder(tmp_path / "llamma-small")
    with pytest.raises(ConfigError, match=r"without config\.json"):
        check_model_folder(tmp_path / "llama-small")


def test_folder_with_a_configuration_that_transformers_refuses_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ConfigError, match=r"expected a config.json that transformers reads"):
        config_from_folder(ModelConfig(name_or_path=str(tmp_path)))


def test_a_file_that_names_a_model_of_another_type_is_told(tmp_path, caplog):
    def read(model_type, *names):
        found = {"model_type": model_type, "architectures": names}
        (tmp_path / "config.json").write_text(json.dumps(found))
        return config_from_folder(ModelConfig(name_or_path=str(tmp_path))).model_type

    for name in ("GPT2Model", "GPT2ForSequenceClassification", "Unheard", "logging"):
        assert read("gpt2", name) == "gpt2"
    assert read("internlm3", "LlamaForCausalLM") == "internlm3"  # it has the model of another type
    assert not caplog.messages
    assert [read("gpt2", "LlamaForCausalLM") for _ in range(2)] == ["gpt2"] * 2
    (told,) = caplog.messages
    assert "architectures: LlamaForCausalLM" in told
    assert "it is read: GPT2LMHeadModel" in told


@pytest.mark.parametrize("name", ["musicgen", "dots3_note"])
def test_a_type_of_several_texts_or_of_unequal_layers_is_no_raw_error(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ConfigError, match=r"one text model, equal in all layers; got .* Use anoth"):
        config_from_folder(ModelConfig(name_or_path=str(tmp_path)))


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
    loaded = build_model(
        config_from_folder(ModelConfig(name_or_path=str(tmp_path))), tmp_path, torch.float32, 0
    )
    weight = loaded.get_parameter("lm_head.weight")
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight, saved.get_parameter("lm_head.weight").float())


def test_freeze_turns_gradients_of_matching_parameters_off():
    model = build_on_meta(config_from_settings(SETTINGS))
    assert freeze(model, ["model.embed_tokens.*", "*.mlp.*"]) == 4
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all("mlp" in name or "embed" in name for name in frozen)


def test_freeze_glob_that_matches_nothing_names_the_nearest():
    model = build_on_meta(config_from_settings(SETTINGS))
    expected = r"got 'lm_haed.*', which matches none. Did you mean 'lm_head.\*'\?"
    with pytest.raises(ConfigError, match=expected):
        freeze(model, ["lm_haed.*"])


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="leave something to train"):
        freeze(build_on_meta(config_from_settings(SETTINGS)), ["*"])


def saved_with(tmp_path, change, **settings):
    config = config_from_settings({**SETTINGS, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    found = config_from_folder(ModelConfig(name_or_path=str(tmp_path)))
    return build_model(found, tmp_path, torch.float32, 0)


@pytest.mark.parametrize("section", ["model", "teacher"])
def test_weights_that_their_config_calls_quantized_or_adapted_are_refused(tmp_path, section):
    saved_with(tmp_path, {})
    config = load_config([read_job()], [f"{section}={tmp_path}"]).config
    check_weights(config)
    adapters = tmp_path / "adapter_config.json"  # transformers would merge them
    adapters.write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=rf"{section}.name_or_path: .* with {adapters.name}"):
        check_weights(config)
    (tmp_path / "model.safetensors").rename(tmp_path / "kept")  # a folder of only adapters
    with pytest.raises(ConfigError, match=rf"{section}.name_or_path: .* with {adapters.name}"):
        check_weights(config)
    (tmp_path / "kept").rename(tmp_path / "model.safetensors")
    adapters.unlink()
    path = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **quantized}))
    with pytest.raises(ConfigError, match=f"{section}.name_or_path: .* not quantized") as caught:
        check_weights(config)
    assert str(path) in str(caught.value)


def test_weights_that_the_files_lack_are_never_initialised_randomly(tmp_path):
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.\S+, .* and 6 more") as caught:
        saved_with(tmp_path, {"num_hidden_layers": 2})
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({"": torch.ones(16, dtype=torch.int8)}, "floating point; .* I8"),
        ({"": torch.ones(16).to(torch.float8_e4m3fn), "_scale_inv": torch.ones(1)}, "_scale_inv"),
    ],
)
def test_quantized_codes_are_never_read_as_weights(tmp_path, codes, said):
    saved_with(tmp_path, {})
    file = tmp_path / "model.safetensors"
    codes = {f"model.norm.weight{end}": tensor for end, tensor in codes.items()}
    save_file({**load_file(file), **codes}, file, {"format": "pt"})
    found = config_from_folder(ModelConfig(name_or_path=str(tmp_path)))
    with pytest.raises(ConfigError, match=said):
        build_model(found, tmp_path, torch.float32, 0)


def test_tied_weights_may_be_absent_and_unused_ones_are_named(tmp_path, caplog):
    change = {"num_hidden_layers": 1}
    model = saved_with(tmp_path, change, num_hidden_layers=2, tie_word_embeddings=True)
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").shape == (32, 16)
    assert "has weights that its config.json does not: model.layers.1." in caplog.text


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"num_hidden_layers": 2}, r"its files lack model\.layers\.1\."),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "FOLDER: "),
        ("generation_config.json", {"num_beams": 0}, "FOLDER: .*ZeroDivisionError"),
        ("generation_config.json", [], r"FOLDER: '.*generation_config.json': expected settings"),
        ("generation_config.json", "{", r"FOLDER: '.*generation_config.json': expected settings"),
        ("generation_config.json", {"eos_token_id": "x"}, "FOLDER: "),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "FOLDER: "),
    ],
)
def test_a_folder_that_cannot_generate_is_one_typed_error(tmp_path, file, change, said):
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings(SETTINGS)
    fit_to_tokenizer(config, tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / file
    whole = {**json.loads(path.read_text()), **change} if isinstance(change, dict) else change
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    with pytest.raises(ConfigError, match=said):
        generate(Request(tmp_path, ("some",), SamplingSettings(2)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="FOLDER: "):  # never generates from random weights
        generate(Request(tmp_path, ("some",), SamplingSettings(2)), is_sharded=True)
    (tmp_path / "config.json").write_text(config.to_json_string())
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "model.safetensors").mkdir()  # transformers would report that it is missing
    with pytest.raises(ConfigError, match="Is a directory"):
        generate(Request(tmp_path, ("some",), SamplingSettings(2)))


def test_a_model_that_reads_what_it_predicts_is_refused(tmp_path):
    settings = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 300}
    with pytest.raises(ConfigError, match=r"model.config.is_decoder: expected true, got false"):
        build_on_meta(config_from_settings(settings))
    build_on_meta(config_from_settings({**settings, "is_decoder": True}))
    for kind, key, value in (
        ("llama", "is_causal", False),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("xlm", "causal", False),
    ):
        config = AutoConfig.for_model(kind, **{key: value})
        config.save_pretrained(tmp_path)
        told = rf"model.config.{key}: expected attention to .* Set it to {value is False}, in"
        with pytest.raises(ConfigError, match=told):
            config_from_folder(ModelConfig(name_or_path=str(tmp_path)))
    with pytest.raises(ConfigError, match="got 'xlnet', for which transformers has none"):
        config_from_settings({"model_type": "xlnet"})


def test_a_prompt_longer_than_the_model_is_cut_and_bad_ones_are_typed_errors(tmp_path, caplog):
    tokenizer = train_tokenizer(["some text"], 270)
    config = config_from_settings(
        {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_positions": 16}
    )
    fit_to_tokenizer(config, tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert generate(Request(tmp_path, ("some words " * 9,)))[0].num_new_tokens <= 8
    assert "the model has 16 positions" in caplog.text
    with pytest.raises(ConfigError, match="--prompt: expected UTF-8 text"):
        generate(Request(tmp_path, ("a\udcff",), SamplingSettings(2)))
    with pytest.raises(ConfigError, match="--seed: expected an integer >= 0"):
        SamplingSettings(seed=1 << 70)


def test_missing_docstrings_are_named(monkeypatch):
    """transformers needs docstrings to build a model; its error names the configuration."""
    flags = SimpleNamespace(optimize=2)
    monkeypatch.setattr("fullshard.models.config.sys", SimpleNamespace(flags=flags))
    with pytest.raises(ConfigError, match=r"PYTHONOPTIMIZE: expected at most 1, .* got 2"):
        quiet_libraries()


def test_a_library_that_cannot_be_mapped_is_no_configuration_error(monkeypatch):
    """transformers imports late; under `ulimit -v` its error said that it cannot build a Llama."""

    def build(*_, **__):
        raise ImportError("libx.so: failed to map segment from shared object")

    monkeypatch.setattr("fullshard.engine.hugging_face.build", build)
    with pytest.raises(ImportError) as found:
        build_on_meta(config_from_settings(SETTINGS))
    assert exit_code_of(found.value) == 4
    with pytest.raises(ImportError), untrusted("a.json", "a table"):
        build()
