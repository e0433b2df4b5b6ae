"""Overrides of the command line: names map to keys, and replace values of the file."""

import pytest

from fullshard.config.load import overrides_from_args
from fullshard.config.values import DType, IntervalStrategy, Strategy
from fullshard.errors import ConfigError

FILE = """\
model:
  config: {model_type: llama, hidden_size: 64, vocab_size: 512}
data: story.txt
strategy: zero2
training: {max_length: 64, bf16: true, max_steps: 10, warmup_steps: 3, seed: 1}
"""


@pytest.fixture
def load(load_file):
    return lambda *overrides, text=FILE: load_file(text, *overrides, name="train.yaml").config


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.max_steps=5", "training", "max_steps", 5),
        ("max_steps=5", "training", "max_steps", 5),
        ("distillation.training.max_steps=5", "training", "max_steps", 5),
        ("max-steps=5", "training", "max_steps", 5),
        ("max_length=128", "training", "max_seq_length", 128),
        ("training.max_seq_length=128", "training", "max_seq_length", 128),
        ("evaluation_strategy=no", "training", "eval_strategy", IntervalStrategy.NO),
        ("learning_rate=1e-3", "training", "learning_rate", 1e-3),
        ("output_dir=2024", "training", "output_dir", "2024"),
        ("output_dir=runs/a=b", "training", "output_dir", "runs/a=b"),
        ("ddp_timeout=5", "launch", "timeout", 5),
        ("strategy=ddp", "sharding", "strategy", Strategy.NO_SHARD),
        ("sharding.strategy=ddp", "sharding", "strategy", Strategy.NO_SHARD),
        ("param_dtype=fp32", "sharding", "param_dtype", DType.FLOAT32),
        ("wrap=[A,B]", "sharding", "wrap", ("A", "B")),
        ("wrap=LlamaDecoderLayer", "sharding", "wrap", ("LlamaDecoderLayer",)),
        ("replicate=null", "sharding", "replicate", None),
        ("num_processes=4", "launch", "num_processes", 4),
        ("model=other", "model", "name_or_path", "other"),
        ("model.name_or_path=other", "model", "name_or_path", "other"),
        ("model_name_or_path=other", "model", "name_or_path", "other"),
        ("data=other.txt", "data", "path", "other.txt"),
        ("data=null", "data", "path", None),
        ("data.vocab_size=7", "data", "vocab_size", 7),
        ("tokenizer=folder", "data", "tokenizer", "folder"),
    ],
)
def test_a_name_means_its_key_and_replaces_the_file(load, override, section, key, value):
    assert getattr(getattr(load(override), section), key) == value


@pytest.mark.parametrize("name", ["model", "student", "model.name_or_path"])
def test_a_student_of_the_file_is_replaced(load, name):
    text = "teacher: t\nstudent: s\n"
    assert load(f"{name}=other", text=text).model.name_or_path == "other"
    assert load(f"{name}=null", text=text).model.name_or_path == "t"


def test_a_key_of_the_models_configuration_needs_no_prefix(load):
    config = load("hidden_size=128").model.config
    assert config == {"model_type": "llama", "hidden_size": 128, "vocab_size": 512}


def test_values_of_other_tools_keys_are_read_as_yaml(load):
    assert load("model.config.tie=no").model.config["tie"] is False
    assert load("model.config.rope={theta: 1e4}").model.config["rope"] == {"theta": 1e4}


def test_other_values_of_a_section_stay(load):
    assert load("data.vocab_size=7").data.path == "story.txt"
    assert load("training.seed=2").training.max_steps == 10
    assert load("sharding={wrap: none}").sharding.strategy is Strategy.FULL_SHARD


def test_the_last_of_two_overrides_wins(load):
    assert load("max_length=8", "training.max_seq_length=9").training.max_seq_length == 9


def test_an_override_replaces_other_spellings_in_the_file(load):
    config = load("param_dtype=fp32", "num_train_epochs=2", "warmup_ratio=0.1")
    assert config.training.bf16 is None
    assert config.training.max_steps == -1
    assert config.training.warmup_steps == 0
    text = FILE.replace("bf16: true, ", "") + "sharding: {param_dtype: fp32}\n"
    assert load("bf16=true", text=text).sharding.param_dtype is DType.BFLOAT16


def test_an_override_without_effect_keeps_the_files_choice(load):
    without = FILE.replace("bf16: true, max_steps: 10", "fp16: true, num_train_epochs: 1")
    for steps in ("-1", "0"):
        config = load("bf16=false", f"max_steps={steps}", "warmup_ratio=0", text=without)
        assert config.sharding.param_dtype is DType.FLOAT16
        assert (config.training.num_train_epochs, config.training.warmup_steps) == (1, 3)
    share = FILE.replace("warmup_steps: 3", "warmup_ratio: 0.1, train_batch_size: 6")
    assert load("warmup_steps=0", text=share).training.warmup_ratio == 0.1
    assert load("per_device_train_batch_size=2", text=share).training.train_batch_size is None
    share = share.replace("train_batch_size", "per_device_train_batch_size")
    assert load("train_batch_size=null", text=share).training.per_device_train_batch_size == 6
    halves = FILE.replace("bf16: true, ", "") + "sharding: {param_dtype: PARAM}\n"
    for param, kept in (("fp16", DType.FLOAT16), ("bf16", None)):
        assert load("bf16=no", text=halves.replace("PARAM", param)).sharding.param_dtype is kept


def test_a_models_configuration_replaces_a_folder_however_it_was_written(load):
    for text in ("model: FOLDER\n", "model: {name_or_path: FOLDER}\n"):
        model = load("model.config={model_type: llama}", text=text).model
        assert (model.name_or_path, model.config) == (None, {"model_type": "llama"})
        assert load("model.name_or_path=x", text=text).model.name_or_path == "x"


def test_overrides_that_contradict_each_other_are_refused(load):
    expected = "^command line: bf16: expected the value of sharding.param_dtype, 'fp32'; got 'true'"
    with pytest.raises(ConfigError, match=expected):
        load("bf16=true", "param_dtype=fp32")


def test_an_ambiguous_name_lists_its_meanings(load):
    with pytest.raises(ConfigError) as caught:
        load("vocab_size=5")
    assert str(caught.value) == (
        "command line: vocab_size: expected an unambiguous key, got 'vocab_size', which is "
        "the end of data.vocab_size and model.config.vocab_size. Write the full key"
    )
    without = FILE.replace(", vocab_size: 512", "")
    assert load("vocab_size=5", text=without).data.vocab_size == 5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("max_step=5", "max_step: unknown key. Did you mean 'max_steps'?"),
        ("qqqqq=5", "qqqqq: unknown key. Write it as section.key=value"),
        ("trainingg.seed=5", "trainingg: unknown key. Did you mean 'training'?"),
        ("training.sed=5", "training.sed: unknown key. Did you mean 'seed'?"),
        ("launch.max_steps=5", "launch.max_steps: unknown key. Did you mean 'training.max_steps'?"),
        ("data.strategy=auto", "data.strategy: unknown key. Did you mean 'strategy'?"),
        ("lr=5", "lr: unknown key. Did you mean 'learning_rate'?"),
        ("epochs=5", "epochs: unknown key. Did you mean 'num_train_epochs'?"),
        ("seed=x", "seed: expected an integer >= 0, got 'x'"),
        (
            "weight_decay=1e300",
            "weight_decay: expected a number >= 0, got '1e300'. The limit is 2^63",
        ),
        ("timeout=1:30", "timeout: expected a number >= 1 and < 1,000,000,000; got '1:30'"),
        # float32 would lose the loss, which is multiplied by the square of the temperature
        ("temperature=1e-300", "temperature: expected a number >= 1e-06 and < 1,000; got '1e-300'"),
        ("temperature=1e4", "temperature: expected a number >= 1e-06 and < 1,000; got '1e4'"),
        ("strategy=ful", "strategy: expected one of full_shard, shard_grad_op, "),
        ("auto_find_batch_size=true", "auto_find_batch_size: 'true' is not yet supported"),
        ("=5", "expected key=value, got '=5'"),
        ("training.=5", "expected key=value, got 'training.=5'"),
        ("data.path=", "data.path: expected text that is not empty, got ''"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(load, override, said):
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert str(caught.value).startswith(f"command line: {said}")


def test_text_that_yaml_cannot_read_is_text(load):
    assert load("freeze=*embed*").freeze == ("*embed*",)


@pytest.mark.parametrize("name", ["runs/a #2", "a\nb", "&x", "x\x85y", "it's", "a  b"])
def test_a_path_is_what_was_typed(load, name):
    assert load(f"output_dir={name}").training.output_dir == name


@pytest.mark.parametrize(
    ("args", "overrides"),
    [
        (["--max_steps", "5"], ["training.max_steps=5"]),
        (["--max_steps=5"], ["training.max_steps=5"]),
        (["--max-steps", "-1"], ["training.max_steps=-1"]),
        (["--bf16"], ["training.bf16=true"]),
        (["--bf16", "--seed", "1"], ["training.bf16=true", "training.seed=1"]),
        (["--evaluation_strategy", "no"], ["training.evaluation_strategy=no"]),
        (["--fp16"], ["training.fp16=true"]),
        (["--lerning_rate", "1"], ["training.lerning_rate=1"]),
        (["--num_processes", "4"], ["num_processes=4"]),
        (["--nproc-per-node=4"], ["nproc_per_node=4"]),  # torchrun's flags, after `--`
        (["--strategy", "zero2"], ["strategy=zero2"]),
        (["--sharding.wrap", "none"], ["sharding.wrap=none"]),
        (["--model_name_or_path", "x"], ["model_name_or_path=x"]),
        (["max_steps=5", "--seed", "1", "data=x"], ["max_steps=5", "training.seed=1", "data=x"]),
        (["stray"], ["stray"]),
        ([], []),
    ],
)
def test_flags_of_hugging_face_are_keys_of_training(args, overrides):
    assert overrides_from_args(args) == overrides


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("nproc_per_node=4", "world_size", 4),
        ("nnodes=2", "num_machines", 2),
        ("master_addr=here", "main_process_ip", "here"),
        ("master_port=29500", "main_process_port", 29500),
    ],
)
def test_flags_of_torchrun_are_fields_of_launch(load, flag, field, value):
    assert getattr(load(flag).launch, field) == value


def test_torchruns_processes_are_those_of_each_machine(load):
    machines = ("nnodes=2", "master_addr=here", "master_port=29500")
    assert load("nproc_per_node=8", *machines).launch.world_size == 16
    assert load("nproc_per_node=8", "num_processes=16", *machines).launch.world_size == 16
    with pytest.raises(ConfigError, match=r"nproc_per_node: .* num_processes \(8\).*; got 8"):
        load("nproc_per_node=8", "num_processes=8", *machines)
