"""transformers' Trainer and TRL's SFTTrainer on two ranks equal one process without fullshard."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from fullshard.config.environment import LaunchEnvironment, Launcher
from fullshard.config.sharding import ShardConfig
from fullshard.config.values import DType, Strategy
from fullshard.errors import ConfigError
from fullshard.integrations.accelerator import ShardedAccelerator, sharding_in, sharding_of
from support import forked
from support.processes import python

pytestmark = pytest.mark.timeout(300)  # the first test includes two runs, each with its own limit

SCRIPT = Path(__file__).with_name("trainer_job.py")
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: FULL_STATE_DICT
"""


def run(folder, *words):
    """Runs in a separate process, because a trainer's state is per process."""
    folder.mkdir()
    python(*words, folder, run=forked.run, env=os.environ)
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of one process with the original libraries, and of two ranks."""
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "fsdp.yaml").write_text(ACCELERATE)
    plain = run(folder / "plain", SCRIPT, "plain")
    launch = ["-m", "fullshard", "launch", "--config_file", folder / "fsdp.yaml"]
    launch += ["--log-dir", folder / "logs"]
    return folder, plain, run(folder / "sharded", *launch, SCRIPT, "sharded")


def assert_same(found, wanted, tolerance):
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.long
def test_losses_norms_and_evaluation_are_those_of_one_process(runs):
    _, plain, sharded = runs
    # transformers sums losses in float32, whatever the model's dtype.
    assert_same(sharded["trainer"]["history"], plain["trainer"]["history"], 1e-6)
    assert any("eval_loss" in row for row in plain["trainer"]["history"])
    assert sharded["trainer"]["parameters"] == plain["trainer"]["parameters"]


def assert_same_file(folder, name, tolerance):
    ours, theirs = (load_file(folder / who / name) for who in ("sharded", "plain"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.long
def test_the_saved_folder_has_the_weights_of_one_process(runs):
    folder, _, _ = runs
    assert_same_file(folder, "trainer/final/model.safetensors", 1e-12)
    AutoModelForCausalLM.from_pretrained(folder / "sharded" / "trainer" / "final")


@pytest.mark.long
def test_a_resumed_run_has_the_same_losses(runs):
    _, _, sharded = runs
    assert sharded["resumed"]["history"] == sharded["trainer"]["history"]


@pytest.mark.long
def test_a_checkpoint_of_the_plain_trainer_is_resumed_with_optimizer_and_schedule(runs):
    _, plain, sharded = runs
    assert_same(sharded["switched"]["history"], plain["trainer"]["history"], 1e-6)


@pytest.mark.long
def test_old_checkpoints_are_removed_and_ours_is_in_the_folder(runs):
    folder, _, _ = runs
    saved = sorted(path.name for path in (folder / "sharded" / "trainer").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6"]
    newest = folder / "sharded" / "trainer" / "checkpoint-6"
    assert (newest / "fullshard" / "COMPLETE.json").is_file()
    assert not (newest / "optimizer.pt").exists()


@pytest.mark.long
def test_an_adapter_trains_as_in_one_process_and_is_saved_alone(runs):
    folder, plain, sharded = runs
    assert_same(sharded["sft"]["history"], plain["sft"]["history"], 1e-4)
    assert sharded["sft"]["strategy"] == "shard_grad_op"  # a value of the launcher's file
    assert_same_file(folder, "sft/final/adapter_model.safetensors", 1e-4)
    assert not (folder / "sharded" / "sft" / "final" / "model.safetensors").exists()


def arguments(tmp_path, **more):
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **more)


def test_the_arguments_of_a_trainer_configure_sharding(tmp_path):
    assert sharding_of(arguments(tmp_path)).strategy is Strategy.FULL_SHARD
    found = sharding_of(
        arguments(
            tmp_path,
            bf16=True,
            fsdp=True,
            fsdp_config={"reshard_after_forward": False, "transformer_layer_cls_to_wrap": "Block"},
        )
    )
    assert found.strategy is Strategy.SHARD_GRAD_OP
    assert found.param_dtype is DType.BFLOAT16
    assert found.wrap == ("Block",)


def test_a_misspelt_key_of_fsdp_config_is_an_error(tmp_path):
    given = arguments(tmp_path, fsdp=True, fsdp_config={"reshard_after_foward": True})
    with pytest.raises(ConfigError, match=r"Did you mean.*reshard_after_forward"):
        sharding_of(given)


@pytest.fixture
def launched_with(monkeypatch, tmp_path):
    """Makes this process rank 0 of two under `fullshard launch --config_file`, with this text."""

    def launched_with(text):
        file = tmp_path / "file.yaml"
        file.write_text(text)
        here = LaunchEnvironment(Launcher.FULLSHARD, 0, 2, 0, 2, config_file=file)
        for name, value in here.to_variables().items():
            monkeypatch.setenv(name, value)

    return launched_with


def test_a_precision_of_the_script_overrides_the_file(launched_with):
    launched_with("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {}\n")
    assert sharding_in("no").param_dtype is None
    assert sharding_in("fp16").param_dtype is DType.FLOAT16
    with pytest.raises(ConfigError, match="fp8"):
        sharding_in("fp8")


def test_accumulation_that_differs_from_the_file_is_an_error(launched_with, tmp_path):
    given = arguments(tmp_path)
    launched_with("zero_optimization: {stage: 2}\ngradient_accumulation_steps: 3\n")
    with pytest.raises(ConfigError, match=r"expected 3, as in .*file.yaml:2; got 1"):
        sharding_of(given)


@pytest.mark.parametrize("plugin", ["", "ACCELERATE_USE_FSDP"])
def test_an_accelerator_with_separate_or_sharded_ranks_is_refused(
    launched_with, monkeypatch, plugin
):
    launched_with("distributed_type: FSDP\nfsdp_config: {}\n")
    known = SimpleNamespace(distributed_type=DistributedType.NO, num_processes=2 if plugin else 1)
    if plugin:
        monkeypatch.setenv(plugin, "true")
    with pytest.raises(ConfigError, match=plugin or "each would train alone"):
        ShardedAccelerator.taking_over(known, ShardConfig())
