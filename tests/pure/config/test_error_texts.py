"""What people read when a configuration is wrong, word for word."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from pathlib import Path

import pytest

from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.errors import ConfigError

STRATEGIES = "full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2, auto"
LLAMA = "model: {config: {model_type: llama}}\n"

# What stands in train.yaml -> the whole error.
FILES = {
    "": "train.yaml: expected a mapping of keys, got an empty file. Write at least `model:`",
    "# a comment\n": (
        "train.yaml: expected a mapping of keys, got an empty file. Write at least `model:`"
    ),
    "- model\n": "train.yaml:1: expected a mapping of keys, got a list",
    "just words\n": "train.yaml:1: expected a mapping of keys, got text",
    "model: [1\n": (
        "train.yaml:2: expected YAML, got something else (while parsing a flow sequence expected "
        "',' or ']', but got '<stream end>')"
    ),
    "model: x\n\tdata: y\n": (
        "train.yaml:2: expected YAML, got something else (while scanning for the next token found "
        "character '\\t' that cannot start any token). YAML is indented by spaces"
    ),
    "model: x\nmodel: y\n": (
        "train.yaml:2: model: expected a key once, got it in line 1 and again in line 2. "
        "Remove one of the two"
    ),
    "model: x\ntraining:\n  seed: 1\n  max_steps: 2\n  seed: 3\n": (
        "train.yaml:5: training.seed: expected a key once, got it in line 3 and again in line 5. "
        "Remove one of the two"
    ),
    "model: x\ntraining: {max_steps: 010, seed: 1:30, learning_rate: 01.5, run_name: '07'}\n": (
        "2 problems:\n"
        "  train.yaml:2: training.max_steps: expected a decimal number, got 010, which YAML reads "
        "in base 8. Put it in quotes if it is text\n"
        "  train.yaml:2: training.seed: expected a decimal number, got 1:30, which YAML reads in "
        "base 60. Put it in quotes if it is text"
    ),
    "model: x\ntraining.max_steps: 9\n": (
        "train.yaml:2: training.max_steps: unknown key. Write it as `max_steps:` in the section "
        "`training:`"
    ),
    "model: x\ntraining: {seed: 99999999999999999999}\n": (
        "train.yaml:2: training.seed: expected an integer >= 0, got 99999999999999999999. "
        "The limit is 2^63 - 1"
    ),
    "model: x\ndata: &a [*a]\n": (
        "train.yaml: expected a mapping of keys, got one that contains itself through an alias"
    ),
    "a: &a [x,x,x]\n"
    + "".join(f"{c}: &{c} [*{p},*{p},*{p}]\n" for p, c in pairwise("abcdefghi")): (
        "train.yaml: expected a mapping of keys, got aliases that write more than 10,000 values"
    ),
    "model: !python/name:os.system x\n": (
        "train.yaml:1: expected YAML, got something else (could not determine a constructor for "
        "the tag '!python/name:os.system')"
    ),
    "data: x.txt\n": (
        "train.yaml: model: missing. A Hugging Face folder, or {config: {model_type: ...}} for one "
        "of random weights."
    ),
    "model: {}\n": ("train.yaml:1: model: expected one of name_or_path and config, got neither"),
    "model: {name_or_path: x, config: {model_type: llama}}\n": (
        "train.yaml:1: model: expected one of name_or_path and config, got both"
    ),
    "model:\n  config:\n    hidden_size: 8\n": (
        "train.yaml:2: model.config.model_type: expected the name of an architecture, such as "
        "llama; got nothing"
    ),
    "model: 3\n": (
        "train.yaml:1: model: expected a folder, or a mapping with name_or_path or config; got 3"
    ),
    "model: x\nsharding:\n  strategy: ful_shard\n": (
        f"train.yaml:3: sharding.strategy: expected one of {STRATEGIES}; got 'ful_shard'. "
        "Did you mean 'full_shard'?"
    ),
    "model: x\nstrategy: ful_shard\n": (
        f"train.yaml:2: strategy: expected one of {STRATEGIES}; got 'ful_shard'. "
        "Did you mean 'full_shard'?"
    ),
    "model: x\ntraining:\n  evaluation_strategy: yes\n": (
        "train.yaml:3: training.evaluation_strategy: expected one of no, steps, epoch; got true"
    ),
    "model: x\ntraining:\n  lerning_rate: 1\n": (
        "train.yaml:3: training.lerning_rate: unknown key. Did you mean 'learning_rate'?"
    ),
    "model: x\ntraining:\n  dataloader_num_worker: 1\n": (
        "train.yaml:3: training.dataloader_num_worker: unknown key. "
        "Did you mean 'dataloader_num_workers'?"
    ),
    "model: x\ntraining:\n  label_names: [a]\n": (
        "train.yaml:3: training.label_names: a list is not yet supported. Leave it out"
    ),
    "model: x\ntraining:\n  bf16: true\n  fp16: true\n": (
        "train.yaml:4: training.fp16: expected what sharding.param_dtype says, 'bfloat16'; "
        "got true. Give one of the two"
    ),
    "model: x\ntraining:\n  optim: galore_adamw\n": (
        "train.yaml:3: training.optim: expected one of adamw_torch, adamw_torch_fused, sgd, muon, "
        "adafactor, adamw_bnb_8bit; got 'galore_adamw'. This word of Hugging Face's is not yet "
        "supported: it needs whole matrices; of these adafactor and muon are there"
    ),
    "model: x\ntraining:\n  lr_scheduler_type: polynomial\n": (
        "train.yaml:3: training.lr_scheduler_type: expected one of linear, cosine, constant, "
        "constant_with_warmup; got 'polynomial'. This word of Hugging Face's is not yet supported"
    ),
    "model: x\ntraining:\n  learning_rate: fast\n": (
        "train.yaml:3: training.learning_rate: expected a number >= 0, got 'fast'"
    ),
    "model: x\ntraining:\n  learning_rate: .nan\n": (
        "train.yaml:3: training.learning_rate: expected a number >= 0, got nan"
    ),
    "model: x\ntraining:\n  adam_beta1: 1\n": (
        "train.yaml:3: training.adam_beta1: expected a number >= 0 and < 1, got 1"
    ),
    "model: x\ntraining:\n  per_device_train_batch_size: 0\n": (
        "train.yaml:3: training.per_device_train_batch_size: "
        "expected an integer >= 1, or auto; got 0"
    ),
    "model: x\ntraining:\n  output_dir: 2024\n": (
        "train.yaml:3: training.output_dir: expected text, got 2024. "
        "Write it in quotes if it is meant as text"
    ),
    "model: x\ntraining: fast\n": "train.yaml:2: training: expected a mapping of keys, got 'fast'",
    "model: x\ntraining:\n  bf16: maybe\n": (
        "train.yaml:3: training.bf16: expected true or false, got 'maybe'"
    ),
    "model: x\ntraining: {bf16: true}\nsharding:\n  param_dtype: fp32\n": (
        "train.yaml:2: training.bf16: expected what sharding.param_dtype says, 'fp32'; got true. "
        "Give one of the two"
    ),
    "model: x\nforward_prefetch: 1\n": (
        "train.yaml:2: forward_prefetch: unknown key. Write sharding.forward_prefetch"
    ),
    "model: x\nsharding:\n  param_dtype: float8\n": (
        "train.yaml:3: sharding.param_dtype: expected one of float64, float32, bfloat16, float16; "
        "got 'float8'. Did you mean 'float64'?"
    ),
    "model: x\nsharding:\n  backward_prefetch: BACKWARD\n": (
        "train.yaml:3: sharding.backward_prefetch: expected an integer >= 0, or one of "
        "backward_pre, backward_post, no_prefetch; got 'BACKWARD'. Did you mean 'backward_pre'?"
    ),
    "model: x\nsharding:\n  offload:\n    params: gpu\n    x: 1\n": (
        "2 problems:\n"
        "  train.yaml:4: sharding.offload.params: expected one of cpu, nvme; got 'gpu'. "
        "Did you mean 'cpu'?\n"
        "  train.yaml:5: sharding.offload.x: unknown key. "
        "Known keys: parameters, gradients, optimizer, folder"
    ),
    "model: x\nlaunch: {main_process_port: 70000}\n": (
        "train.yaml:2: launch.main_process_port: expected an integer >= 1 and < 65,536; got 70000"
    ),
    "model: ${nowhere}\n": "train.yaml:1: model: Interpolation key 'nowhere' not found",
    "model: ???\n": "train.yaml:1: model: Missing mandatory value: model",
    "no: 1\nmodel: x\n1: 2\n": (
        "2 problems:\n"
        "  train.yaml: False: unknown key. Known keys: backend, model, data, sharding, training, "
        "launch, freeze, teacher, lora, sft, distill\n"
        "  train.yaml:3: 1: unknown key. Known keys: backend, model, data, sharding, training, "
        "launch, freeze, teacher, lora, sft, distill"
    ),
}


@pytest.mark.parametrize(("text", "expected"), FILES.items(), ids=range(len(FILES)))
def test_a_wrong_file_says_where_what_and_how(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path.relative_to(tmp_path))
    assert str(caught.value) == expected
    assert caught.value.exit_code == 2


def test_all_problems_of_a_file_and_a_command_line_come_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.yaml"
    path.write_text("model: x\ntraining:\n  seed: -1\n  max_length: 1\nfreezes: a\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path.relative_to(tmp_path), ["max_step=5", "5", "sharding.shard=0"])
    assert str(caught.value) == (
        "6 problems:\n"
        "  command line: max_step: unknown key. Did you mean 'max_steps'?\n"
        "  command line: expected key=value, got '5'. "
        "One configuration file comes first, then its overrides\n"
        "  command line: sharding.shard: expected an integer >= 1, got '0'\n"
        "  train.yaml:4: training.max_length: expected an integer >= 2, got 1\n"
        "  train.yaml:3: training.seed: expected an integer >= 0, got -1\n"
        "  train.yaml:5: freezes: unknown key. Did you mean 'freeze'?"
    )


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.yaml").write_text(LLAMA)
    (tmp_path / "other.yml").write_text(LLAMA)

    def error_of(path):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value).replace(str(tmp_path), "DIR")

    missing = "expected a configuration file, got no such file"
    assert error_of(tmp_path / "trainx.yaml") == (
        f"DIR/trainx.yaml: {missing}. Did you mean 'DIR/train.yaml'?"
    )
    assert error_of(tmp_path / "zzz") == f"DIR/zzz: {missing}. 'DIR' has other.yml, train.yaml"
    assert error_of(tmp_path) == "DIR: expected a configuration file, got a folder"
    assert error_of(tmp_path / "no" / "x") == (
        "DIR/no/x: expected a configuration file, got no folder 'DIR/no'"
    )


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_bytes(b"model: x # caff\xe9\n")
    with pytest.raises(ConfigError, match=r"expected UTF-8 text, got byte 0xe9 at offset 15$"):
        load_config(path)


def test_options_in_python_are_refused_in_the_same_words():
    with pytest.raises(ConfigError) as caught:
        ShardConfig(strategy="ful_shard", shard=0, wrap="transfomer", param_dtyp="bf16")
    assert str(caught.value) == (
        "4 problems:\n"
        f"  strategy: expected one of {STRATEGIES}; got 'ful_shard'. Did you mean 'full_shard'?\n"
        "  shard: expected an integer >= 1, got 0\n"
        "  wrap: expected one of auto, transformer, size, none, or class names, or a callable; "
        "got 'transfomer'. Did you mean 'transformer'?\n"
        "  param_dtyp: unknown key. Did you mean 'param_dtype'?"
    )


def test_contradictions_come_together_with_all_other_problems():
    with pytest.raises(ConfigError) as caught:
        RunConfig(
            model={"config": {}},
            strategy="zero2",
            sharding={"strategy": "ddp"},
            training={"max_length": 5, "max_seq_length": 6, "seed": "x"},
            launch=7,
        )
    assert str(caught.value) == (
        "5 problems:\n"
        "  strategy: expected what sharding.strategy says, 'ddp'; got 'zero2'. "
        "Give one of the two\n"
        "  model.config.model_type: expected the name of an architecture, such as llama; "
        "got nothing\n"
        "  training.max_length: expected the same value as max_seq_length, which is its other "
        "name and says 6; got 5. Give one of the two\n"
        "  training.seed: expected an integer >= 0, got 'x'\n"
        "  launch: expected a mapping of keys, got 7"
    )


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError) as caught:
        ShardConfig(strategy="x" * 1000)
    assert len(str(caught.value)) < 250


def test_errors_survive_the_way_to_another_process():
    with pytest.raises(ConfigError) as caught:
        ShardConfig(shard=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


@pytest.mark.parametrize(
    "text",
    [
        "model: " + "{a: " * 3000,
        "!!int key: 3",
        "training: {seed: " + "9" * 5000 + "}",
        "a: !!binary 1",
    ],
    ids=["deep", "key", "digits", "binary"],
)
def test_yaml_that_its_readers_choke_on_is_a_typed_error(tmp_path, text):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"train\.yaml"):
        load_config(path)


def test_a_pipe_a_device_and_a_name_that_no_file_has_are_typed_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(ConfigError, match="expected a readable file"):
            load_config(path)


@pytest.mark.parametrize("value", [[1], [None], b"x", "full_shard", [["a"]], 3])
def test_strategies_of_units_that_are_no_mapping_are_named(value):
    with pytest.raises(ConfigError, match="strategies: expected a mapping of module names"):
        ShardConfig(strategies=value)


def test_a_home_is_that_of_the_user_as_in_a_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    words = ["model=~/llama", "output_dir=~/run", "data=a/~/b", "run_name=~x"]
    config = load_config(None, words).config
    assert config.model.name_or_path == "/me/llama"
    assert config.training.output_dir == "/me/run"
    assert (config.data.path, config.training.run_name) == ("a/~/b", "~x")
    root = Path("~root").expanduser()
    config = load_config(None, ["model=~", "output_dir=~root/run", "data.vocab_size=null"]).config
    assert config.model.name_or_path == "/me"
    assert config.training.output_dir == f"{root}/run"
    assert RunConfig(model="~").model.name_or_path == "/me"


def test_an_empty_mixture_is_no_wish_for_the_embedded_text(tmp_path):
    with pytest.raises(ConfigError, match=r"data.mixture: expected at least one source, got an e"):
        load_config(None, ["data.mixture=[]"])
    written = tmp_path / "config.yaml"  # of a run: it has every key
    written.write_text(load_config(None, []).to_yaml())
    assert "mixture: []" in written.read_text()
    assert load_config(written, []).config.data.uses_baseline
