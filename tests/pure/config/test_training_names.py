"""`training` accepts Hugging Face's names of three generations."""

import dataclasses

import pytest

from fullshard.config.schema import LaunchConfig, TrainingConfig
from fullshard.config.training import MOVED, names
from fullshard.config.values import (
    DType,
    IntervalStrategy,
    LrSchedule,
    Optimizer,
    Recompute,
    RecomputeKind,
)
from fullshard.errors import ConfigError

# Names of TrainingArguments in transformers 4.40 that 5.x has dropped or renamed; for others, see
# NEUTRAL.
NAMES_OF_4_40 = [
    "evaluation_strategy",
    "warmup_ratio",
    "overwrite_output_dir",
    "logging_dir",
    "save_safetensors",
    "no_cuda",
    "use_mps_device",
    "group_by_length",
    "length_column_name",
]


def is_known(name):
    return name in MOVED or name in TrainingConfig.known_names()


@pytest.mark.parametrize("name", NAMES_OF_4_40)
def test_names_of_transformers_4_40_are_known(name):
    assert is_known(name)


def test_every_name_of_the_installed_transformers_is_known():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.TrainingArguments.__dataclass_fields__
    assert [name for name in theirs if not is_known(name)] == []


def test_the_default_of_a_name_that_is_not_built_yet_is_accepted(configured):
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        if field.name in names() and field.name != "do_train":  # this trains
            missing = field.default is dataclasses.MISSING
            value = field.default_factory() if missing else field.default
            training = configured(training={field.name: value}).training
            assert training == TrainingConfig(), field.name


def test_defaults_are_those_of_the_installed_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.TrainingArguments.__dataclass_fields__
    ours = TrainingConfig()
    # An omitted value has another meaning here; the docs of each field define it.
    undecided = {"output_dir", "eval_strategy", "save_strategy", "save_steps", "bf16", "fp16"}
    undecided |= {"report_to", "project"}  # "none" means no tracker; the other is our own name
    shared = [n for n in TrainingConfig.field_names() if n in theirs and n not in undecided]
    assert len(shared) > 15
    assert {n: getattr(ours, n) for n in shared} == {n: theirs[n].default for n in shared}


def test_no_name_is_both_a_field_and_in_the_table():
    assert not set(names()) & set(TrainingConfig.field_names())
    assert not set(names()) & {*TrainingConfig.ALIASES, *MOVED}


def test_a_file_of_hugging_face_habits_is_read(configured):
    config = configured(
        training={
            "evaluation_strategy": False,  # `no` in YAML
            "save_strategy": "no",
            "learning_rate": "5e-5",
            "max_length": "1e3",
            "lr_scheduler_type": "COSINE",
            "optim": "adamw_torch",
            "warmup_steps": 0.1,
            "logging_steps": "10",
            "report_to": "none",
            "dataloader_num_workers": 0,
            "fp16": "False",
            "push_to_hub": False,
            "packing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
    )
    training = config.training
    assert training.eval_strategy is IntervalStrategy.NO
    assert training.save_strategy is IntervalStrategy.NO
    assert training.learning_rate == 5e-5
    assert training.max_seq_length == 1000
    assert training.lr_scheduler_type is LrSchedule.COSINE
    assert training.optim is Optimizer.ADAMW_TORCH
    assert training.warmup_steps == 0.1
    assert training.logging_steps == 10


# Names that are not built yet: values, besides the defaults of the installed transformers, that ask
# for the behaviour of a run without them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "activation_offloading": (False,),
    "adafactor": (False,),
    "auto_find_batch_size": (False, None),
    "dataset_kwargs": (None, {}),
    "debug": ("", None),
    "dispatch_batches": (None,),
    "do_eval": (True, False, None),
    "do_predict": (False, None),
    "do_train": (True, None),
    "eos_token": (None,),
    "eval_delay": (0, None),
    "eval_packing": (None, True),
    "evaluate_during_training": (False, None),
    "fp16_backend": ("auto",),
    "fp16_opt_level": ("O1",),
    "fsdp": (None, "", False, []),
    "fsdp_config": (None, {}),
    "fsdp_min_num_params": (0,),
    "fsdp_transformer_layer_cls_to_wrap": (None,),
    "generation_config": (None,),
    "generation_max_length": (None,),
    "generation_num_beams": (None,),
    "half_precision_backend": ("auto",),
    "include_inputs_for_metrics": (False,),
    "include_num_input_tokens_seen": ("no", False),
    "include_tokens_per_second": (True, False),
    "jit_mode_eval": (False,),
    "label_smoothing_factor": (0,),
    "loss_type": (None, "nll"),
    "lr_scheduler_kwargs": (None, {}),
    "model_init_kwargs": (None, {}),
    "mp_parameters": ("",),
    "neftune_noise_alpha": (None, "none"),
    "optim_args": (None, ""),
    "packing_strategy": ("bfd", None),
    "pad_to_multiple_of": (None,),
    "pad_token": (None,),
    "padding_free": (False,),
    "past_index": (-1,),
    "per_gpu_eval_batch_size": (None,),
    "per_gpu_train_batch_size": (None,),
    "predict_with_generate": (False,),
    "prediction_loss_only": (True, False),
    "push_to_hub_model_id": (None,),
    "push_to_hub_organization": (None,),
    "push_to_hub_token": (None,),
    "ray_scope": ("last",),
    "sharded_ddp": (None, "", []),
    "sortish_sampler": (False,),
    "split_batches": (None, False),
    "torchdynamo": (None,),
    "tpu_metrics_debug": (False,),
    "tpu_num_cores": (None,),
    "use_ipex": (False,),
    "xpu_backend": (None,),
}


def test_every_name_that_is_not_built_yet_says_so(configured):
    for name, neutral in NEUTRAL.items():
        if not name.startswith("fsdp"):  # these names are in a table
            refusal = rf"training\.{name}: 'so be it' is not yet supported\. \w"
            with pytest.raises(ConfigError, match=refusal):
                configured(training={name: "so be it"})
        for value in neutral:
            assert configured(training={name: value}).training == TrainingConfig(), (name, value)


def test_zero_and_false_are_distinct_neutral_values(configured):
    with pytest.raises(ConfigError, match=r"training.eval_delay: false is not yet"):
        configured(training={"eval_delay": False})
    with pytest.raises(ConfigError, match=r"training.label_smoothing_factor: 0.1 is not yet"):
        configured(training={"label_smoothing_factor": 0.1})


def test_bf16_is_the_dtype_of_the_sharding(configured):
    config = configured(training={"bf16": True})
    assert config.sharding.param_dtype is DType.BFLOAT16
    assert config.training.bf16 is True
    agreeing = {"param_dtype": "torch.bfloat16"}
    assert configured(training={"bf16": True}, sharding=agreeing) == config


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "fp32"), (True, "fp16"), (False, "bf16")])
def test_bf16_that_contradicts_the_dtype_is_an_error(configured, bf16, dtype):
    expected = "training.bf16: expected the value of sharding.param_dtype"
    with pytest.raises(ConfigError, match=expected):
        configured(training={"bf16": bf16}, sharding={"param_dtype": dtype})


def test_bf16_false_does_not_mean_float32(configured):
    config = configured(training={"bf16": False}, sharding={"param_dtype": "fp32"})
    assert config.sharding.param_dtype is DType.FLOAT32
    assert configured(training={"bf16": False}).sharding.param_dtype is None


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_both_names_of_recompute_are_that_of_the_sharding(configured, name):
    config = configured(training={name: True})
    assert config.sharding.activation_checkpointing == Recompute(RecomputeKind.BLOCK)
    expected = f"training.{name}: expected the value of sharding.activation"
    with pytest.raises(ConfigError, match=expected):
        configured(training={name: True}, sharding={"activation_checkpointing": "none"})


def test_keys_of_other_sections_are_moved_there(configured):
    training = {"ddp_timeout": 5, "dataset_text_field": "story"}
    config = configured(strategy="ddp", training=training)
    assert config.launch.timeout == 5
    assert config.data.text_column == "story"
    assert config.strategy is config.sharding.strategy
    assert config.strategy.value == "no_shard"


def test_an_alias_must_agree_with_its_name():
    assert TrainingConfig(max_length=8, max_seq_length=8).max_seq_length == 8
    with pytest.raises(
        ConfigError, match=r"^max_length: expected the value of its alias max_seq_len"
    ):
        TrainingConfig(max_length=8, max_seq_length=9)


def test_evaluation_is_on_if_its_steps_are_given_and_it_is_not_off():
    assert TrainingConfig().evaluates is IntervalStrategy.NO
    assert TrainingConfig(eval_steps=5).evaluates is IntervalStrategy.STEPS
    assert TrainingConfig(eval_steps=5, eval_strategy="no").evaluates is IntervalStrategy.NO
    assert TrainingConfig(eval_strategy="epoch").evaluates is IntervalStrategy.EPOCH


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", None, True, float("nan")])
def test_steps_are_a_number_or_a_share(value):
    with pytest.raises(ConfigError, match=r"^logging_steps: expected an integer >= 1, or a share"):
        TrainingConfig(logging_steps=value)


def test_processes_are_counted_over_all_machines():
    assert LaunchConfig(num_machines=2, num_processes=4, machine_rank=1).num_processes == 4
    with pytest.raises(ConfigError, match=r"^num_processes: expected a multiple of 2, because"):
        LaunchConfig(num_machines=2, num_processes=3)
    with pytest.raises(ConfigError, match=r"^machine_rank: expected an integer < 1, because"):
        LaunchConfig(machine_rank=1)
