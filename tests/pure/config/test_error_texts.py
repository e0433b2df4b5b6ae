"""Errors of wrong configurations, word for word."""

import os
import pickle
from itertools import pairwise
from pathlib import Path

import pytest

from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.errors import ConfigError

LLAMA = "model: {config: {model_type: llama}}\n"

# Contents of train.yaml; __snapshots__/ has the errors.
FILES = (
    "",
    "# a comment\n",
    "- model\n",
    "just words\n",
    "model: [1\n",
    "model: x\n\tdata: y\n",
    "model: x\nmodel: y\n",
    "model: x\ntraining:\n  seed: 1\n  max_steps: 2\n  seed: 3\n",
    "model: x\ntraining: {max_steps: 010, seed: 1:30, learning_rate: 01.5, run_name: '07'}\n",
    "model: x\ntraining.max_steps: 9\n",
    "model: x\ntraining: {seed: 99999999999999999999}\n",
    "model: x\ndata: &a [*a]\n",
    "a: &a [x,x,x]\n" + "".join(f"{c}: &{c} [*{p},*{p},*{p}]\n" for p, c in pairwise("abcdefghi")),
    "model: !python/name:os.system x\n",
    "data: x.txt\n",
    "model: {}\n",
    "model: {name_or_path: x, config: {model_type: llama}}\n",
    "model:\n  config:\n    hidden_size: 8\n",
    "model: 3\n",
    "model: x\nsharding:\n  strategy: ful_shard\n",
    "model: x\nstrategy: ful_shard\n",
    "model: x\ntraining:\n  evaluation_strategy: yes\n",
    "model: x\ntraining:\n  lerning_rate: 1\n",
    "model: x\ntraining:\n  dataloader_num_worker: 1\n",
    "model: x\ntraining:\n  label_names: [a]\n",
    "model: x\ntraining:\n  bf16: true\n  fp16: true\n",
    "model: x\ntraining:\n  optim: galore_adamw\n",
    "model: x\ntraining:\n  lr_scheduler_type: polynomial\n",
    "model: x\ntraining:\n  learning_rate: fast\n",
    "model: x\ntraining:\n  learning_rate: .nan\n",
    "model: x\ntraining:\n  adam_beta1: 1\n",
    "model: x\ntraining:\n  per_device_train_batch_size: 0\n",
    "model: x\ntraining:\n  output_dir: 2024\n",
    "model: x\ntraining: fast\n",
    "model: x\ntraining:\n  bf16: maybe\n",
    "model: x\ntraining: {bf16: true}\nsharding:\n  param_dtype: fp32\n",
    "model: x\nforward_prefetch: 1\n",
    "model: x\nsharding:\n  param_dtype: float8\n",
    "model: x\nsharding:\n  backward_prefetch: BACKWARD\n",
    "model: x\nsharding:\n  offload:\n    params: gpu\n    x: 1\n",
    "model: x\nlaunch: {main_process_port: 70000}\n",
    "model: ${nowhere}\n",
    "model: ???\n",
    "no: 1\nmodel: x\n1: 2\n",
)


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_a_wrong_file_says_where_what_and_how(text, check_error):
    check_error("train.yaml", text, needs_model=True)


def test_all_problems_of_a_file_and_a_command_line_come_at_once(load_file, snapshot):
    text = "model: x\ntraining:\n  seed: -1\n  max_length: 1\nfreezes: a\n"
    with pytest.raises(ConfigError) as caught:
        load_file(text, "max_step=5", "5", "sharding.shard=0", name="train.yaml")
    assert str(caught.value) == snapshot


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


def test_options_in_python_are_refused_in_the_same_words(snapshot):
    with pytest.raises(ConfigError) as caught:
        ShardConfig(strategy="ful_shard", shard=0, wrap="transfomer", param_dtyp="bf16")
    assert str(caught.value) == snapshot


def test_contradictions_come_together_with_all_other_problems(configured, snapshot):
    with pytest.raises(ConfigError) as caught:
        configured(
            model={"config": {}},
            strategy="zero2",
            sharding={"strategy": "ddp"},
            training={"max_length": 5, "max_seq_length": 6, "seed": "x"},
            launch=7,
        )
    assert str(caught.value) == snapshot


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError) as caught:
        ShardConfig(strategy="x" * 1000)
    assert len(str(caught.value)) < 250


def test_errors_can_be_sent_to_another_process():
    with pytest.raises(ConfigError) as caught:
        ShardConfig(shard=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def test_a_pipe_a_device_and_a_name_that_no_file_has_are_typed_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(ConfigError, match="expected a readable file"):
            load_config(path)


@pytest.mark.parametrize("value", [[1], [None], b"x", "full_shard", [["a"]], 3])
def test_strategies_of_units_that_are_no_mapping_are_named(value):
    with pytest.raises(ConfigError, match="strategies: expected a mapping of module names"):
        ShardConfig(strategies=value)


def test_a_tilde_is_the_users_home_as_in_a_shell(monkeypatch):
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


def test_an_empty_mixture_does_not_mean_the_embedded_text(tmp_path):
    with pytest.raises(ConfigError, match=r"data.mixture: expected at least one source, got an e"):
        load_config(None, ["data.mixture=[]"])
    written = tmp_path / "config.yaml"  # the file of a run, which has every key
    written.write_text(load_config(None, []).to_yaml())
    assert "mixture: []" in written.read_text()
    assert load_config(written, []).config.data.uses_baseline
