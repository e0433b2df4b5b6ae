"""Contracted features that are not built are refused by name before a run starts."""

import pytest

from fullshard.cli.arguments import load
from fullshard.config.environment import read_launch_environment
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.supported import check_supported
from fullshard.errors import ConfigError
from fullshard.recipes.registry import Command, check_command


def refusal(config, **how):
    with pytest.raises(ConfigError) as caught:
        check_supported(config, **how)
    return str(caught.value)


def test_sharding_that_is_not_built_is_named():
    config, said = ShardConfig(activation_checkpointing="offload"), "activation_checkpointing: 'off"
    assert refusal(config).startswith(said)
    assert refusal(RunConfig(model="x", sharding=config)).startswith(f"sharding.{said}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strategy": "zero2", "param_dtype": "bf16", "wrap": ["A"], "forward_prefetch": 3},
        {"strategy": "no_shard", "replicate": 4, "shard": 1},
        {"replicate": 1, "transport": "direct", "grad_sync": "last_micro_batch", "poison": True},
        {"transport": "c10d", "reduction": "ordered", "reduce_dtype": "bf16"},
        {"transport": "fake", "param_dtype": "fp16"},
        {"strategy": "HYBRID_SHARD_ZERO2", "replicate": 2, "grad_sync": "last_micro_batch_outer"},
        {"master_dtype": "bf16", "buffer_dtype": "bf16", "output_dtype": "fp32"},
        {"fp32_modules": ["norm"], "offload": "cpu", "activation_checkpointing": "every_2"},
        {"offload": "nvme"},
        {"offload": {"parameters": "cpu", "gradients": "nvme", "optimizer": "nvme"}},
        {"strategies": {"layers.0": "ddp", "layers.*": "zero2"}},
    ],
)
def test_sharding_that_is_built_passes(fields):
    check_supported(ShardConfig(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "jax", "sharding": {"transport": "direct"}}, "sharding.transport: 'direct'"),
        ({"backend": "jax", "sharding": {"fp32_modules": "a"}}, "sharding.fp32_modules: a list"),
        (
            {"backend": "jax", "sharding": {"master_dtype": "fp16"}},
            "sharding.master_dtype: 'float16'",
        ),
        ({"sharding": {"master_dtype": "fp16"}}, "sharding.master_dtype: 'float16'"),
        (
            {"backend": "jax", "sharding": {"reduce_dtype": "fp16"}},
            "sharding.reduce_dtype: 'float16'",
        ),
        ({"backend": "jax", "training": {"optim": "muon"}}, "training.optim: 'muon'"),
        (
            {"sharding": {"offload": "cpu"}, "training": {"optim": "adafactor"}},
            "sharding.offload: together with optim: adafactor",
        ),
        ({"launch": {"num_machines": 2}}, "launch.num_machines: 2 without a launcher"),
    ],
)
def test_a_run_that_is_not_built_is_named(fields, said):
    assert refusal(RunConfig(model="x", **fields)).startswith(f"{said} is not yet supported. ")


def test_a_run_without_checkpoints_may_set_keys_of_checkpoints():
    training = {"save_strategy": "no", "save_steps": 5, "save_total_limit": 2}
    check_supported(RunConfig(model="x", training=training))
    check_supported(RunConfig(model="x", training={"resume_from_checkpoint": False}))


def test_several_machines_need_a_launcher():
    config = RunConfig(model="x", launch={"num_machines": 2, "num_processes": 2})
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    check_supported(config, launch=read_launch_environment(torchrun))
    assert refusal(config).endswith("or as `fullshard launch --nnodes ... -m fullshard ...`")


def test_a_run_refuses_the_transport_that_moves_nothing():
    config = RunConfig(model="x", sharding={"transport": "fake"})
    assert refusal(config) == (
        "sharding.transport: expected a real transport, got 'fake'. "
        "It moves no data between ranks; it is for plans and tests"
    )
    check_supported(config, planning=True)


def test_a_strategy_is_chosen_for_a_run_but_not_without_a_batch():
    alone = ShardConfig(strategy="auto")
    assert refusal(alone).startswith("strategy: 'auto' is not yet supported. Name the strategy")
    check_supported(RunConfig(model="x", sharding=alone))


def test_a_plan_may_name_folders_that_a_run_needs(tmp_path):
    offload = {**dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")}
    config = RunConfig(model="x", sharding={"offload": {**offload, "folder": str(tmp_path / "a")}})
    check_supported(config, planning=True)
    assert refusal(config).startswith("sharding.offload.folder: expected a folder to write to, got")
    (tmp_path / "a").mkdir()
    check_supported(config)


def test_the_refusal_of_a_file_has_its_lines(load_file, snapshot):
    text = "model: x\nsharding:\n  transport: fake\n  activation_checkpointing: offload\n"
    with pytest.raises(ConfigError) as caught:
        load_file(text).check_supported()
    assert str(caught.value) == snapshot


@pytest.mark.parametrize(
    ("command", "fields", "said"),
    [
        ("train", {"teacher": "t"}, "teacher: applies to `fullshard distill` only; got a mapping"),
        (
            "sft",
            {"distill": {"alpha": 1}},
            "distill: applies to `fullshard distill` only; got a mapping",
        ),
        (
            "train",
            {"sft": {"packing": False}},
            "sft.packing: applies to `fullshard sft` only; got false",
        ),
        (
            "train",
            {"training": {"assistant_only_loss": "yes"}},
            "sft.assistant_only_loss: applies to `fullshard sft` only; got true",
        ),
        ("distill", {}, "teacher: expected the model from which the student learns, got none."),
        (
            "distill",
            {"distill": {"cache": "c", "teacher_offload": "cpu"}},
            "distill.teacher_offload: expected no distill.cache together with it, got 'cpu'",
        ),
        (
            "distill",
            {"model": "m", "teacher": "t", "distill": {"layers": 1}},
            "distill.layers: expected a teacher and no student, which is cut out of it; got",
        ),
    ],
)
def test_sections_of_other_recipes_are_refused(configured, command, fields, said):
    with pytest.raises(ConfigError) as caught:
        check_command(configured(**fields), Command(command))
    assert str(caught.value).startswith(said)


def test_a_recipe_accepts_its_own_sections_and_neutral_values(configured):
    check_command(configured(training={"packing": True}), Command.TRAIN)
    check_command(configured(training={"assistant_only_loss": False}), Command.TRAIN)
    check_command(RunConfig(model="x", sft={"packing": True}, lora={"r": 4}), Command.SFT)
    check_command(RunConfig(student="x", teacher="t", distill={"kd_ratio": 1}), Command.DISTILL)
    check_command(RunConfig(student="x", distill={"cache": "c"}), Command.DISTILL)


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ("training.optim=sgd training.adam_beta1=0.5", "training.adam_beta1"),
        ("training.lr_scheduler_type=constant training.warmup_ratio=0.1", "training.warmup_ratio"),
        ("training.save_strategy=epoch training.save_steps=7", "training.save_steps"),
        ("training.save_strategy=no training.save_total_limit=2", "training.save_total_limit"),
        ("training.eval_strategy=epoch training.eval_steps=7", "training.eval_steps"),
        ("training.max_steps=5 training.num_train_epochs=4", "training.num_train_epochs"),
        ("training.project=a", "training.project"),
        ("training.report_to=wandb training.logging_dir=a", "training.logging_dir"),
        ("data.shuffle_buffer=9", "data.shuffle_buffer"),
        ("data.tokenizer=FOLDER data.vocab_size=9", "data.vocab_size"),
        ("sharding.wrap_min_params=9", "sharding.wrap_min_params"),
        ("backend=jax sharding.wrap=transformer", "sharding.wrap"),
        ("backend=jax sharding.backward_prefetch=0", "sharding.backward_prefetch"),
        ("strategy=no_shard sharding.forward_prefetch=2", "sharding.forward_prefetch"),
        ("strategy=shard_grad_op sharding.backward_prefetch=2", "sharding.backward_prefetch"),
        ("sharding.grad_sync=last_micro_batch", "sharding.grad_sync"),
        ("sharding.reduction=ordered sharding.transport=direct", "sharding.reduction"),
        ("sharding.fp32_modules=norm", "sharding.fp32_modules"),
        ("sharding.grad_reduction=sum", "sharding.grad_reduction"),
        ("training.warmup_steps=2 training.warmup_ratio=0.1", "training.warmup_ratio"),
        ("training.max_steps=0 training.num_train_epochs=1", "training.max_steps"),
        ("distill.chunk_size=9 training.loss_chunk_size=9", "training.loss_chunk_size"),
        ("sft.num_samples=0 sft.sample_tokens=9", "sft.sample_tokens"),
        ("backend=jax sft.sample_tokens=9", "sft.sample_tokens"),
        ("distill.loss=hidden distill.temperature=3", "distill.temperature"),
        ("distill.beta=0.3", "distill.beta"),
        ("launch.main_process_port=29500", "launch.main_process_port"),
        ("training.optim=muon training.adam_beta1=0.5", ""),
        ("strategy=shard_grad_op sharding.forward_prefetch=2", ""),
        ("strategy=no_shard sharding.offload=cpu sharding.forward_prefetch=2", ""),
        ("sharding.fp32_modules=norm sharding.param_dtype=bf16", ""),
        ("sharding.grad_sync=last_micro_batch training.gradient_accumulation_steps=2", ""),
        ("sharding.wrap=size sharding.wrap_min_params=9", ""),
        ("model.config.torch_dtype=float16", "model.config.torch_dtype"),
        ("model.config.architectures=[GPT2LMHeadModel]", "model.config.architectures"),
        ("model.config.vocab_size=9", ""),
    ],
)
def test_a_key_made_ineffective_by_others_has_a_note(given, idle):
    model = "model.config.model_type=llama" if "model." in given else "model=MODEL"
    (note,) = load_config(None, [model, *given.split()]).notes or [None]
    assert (note.key if note else "") == idle
    assert not note or (note.status, note.place) == ("lost", "command line")


def test_a_key_made_ineffective_by_others_is_reported_when_a_file_is_run(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("model: MODEL\ntraining: {optim: sgd}\n")
    load(["training.adam_beta1=0.5"], tmp_path / "a.yaml")
    said = "command line: training.adam_beta1: lost: training.optim decides\n"
    assert capsys.readouterr().out == said
    load(["training.adam_beta1=0.9"], tmp_path / "a.yaml")  # a default, as in a run's config.yaml
    assert capsys.readouterr().out == ""


def test_a_key_that_another_file_overrules_is_reported_when_the_files_are_run(tmp_path, capsys):
    machines, recipe = tmp_path / "a.yaml", tmp_path / "b.yaml"
    machines.write_text("distributed_type: FSDP\ngradient_accumulation_steps: 4\n")
    recipe.write_text("model: MODEL\ngradient_accumulation_steps: 2\n")
    load(["max_steps=2"], recipe, machines)
    key = "gradient_accumulation_steps"
    said = f"{machines}:2: {key}: no effect: {key} ({recipe}:2) decides\n"
    assert capsys.readouterr().out == said
    load(["model=MODEL", f"{key}=2"], None, machines)  # typed
    assert capsys.readouterr().out == ""
