"""Any configuration file is read, or refused with a typed error."""

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.load import load_config
from fullshard.errors import ConfigError

OURS = (files("fullshard.config") / "defaults" / "main_job.yaml").read_text(encoding="utf-8")
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_min_num_params: 2000}
mixed_precision: bf16
num_machines: 1
num_processes: 4
model: MODEL
"""
DEEPSPEED = """\
{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
 "bf16": {"enabled": true}, "gradient_clipping": 1.0, "train_batch_size": "auto",
 "flops_profiler": {"enabled": false}, "tensorboard": {"enabled": false}, "model": "MODEL"}
"""
AXOLOTL = """\
base_model: MODEL
datasets: [{path: data.jsonl, type: chat_template}]
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
micro_batch_size: 2
optimizer: adamw_torch
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer}
"""
LONG = ["9" * 400, "9" * 5000, "[" * 200 + "]" * 200, "{a: " * 1500 + "1" + "}" * 1500]
WORDS = r"""
!!int word | !!binary aGk= | !!timestamp x | !!bool x | !!float x | !!set {a} | ? | << | -1 | 1e400
.nan | null | '' | {} | [] | [[1]] | {1: {2: 3}} | ${model} | ${oc.env:NOWHERE} | ??? | *a
&a {x: *a} | "\0" | "\ud800" | 2020-01-01 | 1:2:3 | 0x1f | % | @ | "
"""
ODD = st.sampled_from([*LONG, *re.split(r" \| |\n", WORDS.strip())])


@st.composite
def mutated(draw):
    """A valid file with a few changed words, lines or characters."""
    text = draw(st.sampled_from([OURS, ACCELERATE, DEEPSPEED, AXOLOTL]))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 12)))
        insertion = draw(ODD | st.text(max_size=4) | st.just(""))
        if draw(st.booleans()):  # a whole value
            begin = text.find(": ", begin) + 2
            end = (
                min(i for i in (text.find(c, begin) for c in ",}\n") if i >= 0) if begin > 1 else 0
            )
        text = text[: max(0, begin)] + insertion + text[max(0, begin, end) :]
    return text


@given(text=mutated())
def test_any_file_is_read_or_refused_by_a_typed_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        resolved = load_config(path, needs_model=False)
    except ConfigError:
        return
    path.write_text(resolved.to_yaml(), encoding="utf-8")
    again = load_config(path, needs_model=not resolved.is_without_model)
    assert again.config == resolved.config  # a configuration that was read survives a round trip


@pytest.mark.parametrize("model", ["", "model:\n", "model: {name_or_path: null}\n", "student:\n"])
def test_a_configuration_without_a_model_survives_being_written(load_file, model):
    resolved = load_file(f"training: {{seed: 1}}\n{model}", needs_model=False)
    assert load_file(resolved.to_yaml(), needs_model=False).config == resolved.config
    with pytest.raises(ConfigError, match="model: expected one of name_or_path and config"):
        load_file(resolved.to_yaml())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: x\ntraining: {!!int seed: 3}\n", "a value that cannot be read"),
        ("model: x\ndata: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("model: x\ntraining: {max_steps: " + "9" * 5000 + "}", "a value that cannot be read"),
        ("model: {config: {model_type: llama, x: !!binary aGk=}}", "model.config.x: expected text"),
        ("model: {config: {model_type: llama, x: {1.5: 2}}}", "expected words as keys, got 1.5"),
        ('model: "a\\0b"', "text without NUL characters"),
        ("a: !!binary 1", "expected YAML, got something else"),
    ],
)
def test_malformed_values_are_named(load_file, text, said):
    with pytest.raises(ConfigError) as caught:
        load_file(text)
    assert said in str(caught.value)
    assert "a.yaml" in str(caught.value)


def test_whole_numbers_as_keys_of_a_models_configuration_are_text_as_in_json(load_file):
    text = "model: {config: {model_type: llama, id2label: {0: a, 1: b}}}\n"
    assert load_file(text).config.model.config["id2label"] == {"0": "a", "1": "b"}


def test_every_lost_key_of_a_group_is_named(load_file):
    text = (
        '{"model": "x", "zero_optimization": {"stage": 3}, '
        '"flops_profiler": {"enabled": true, "profile_step": 1}}'
    )
    notes = {note.key: note.status for note in load_file(text).notes}
    assert notes["flops_profiler.profile_step"] == "lost"
