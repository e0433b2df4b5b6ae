"""Errors of wrong files of other tools, word for word."""

import json

import pytest

from fullshard.errors import ConfigError

# Contents of a.yaml; __snapshots__/ has the errors.
FILES = (
    "distributed_type: FSDP\nmixed_precission: bf16\n",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_parms: true\n",
    "distributed_type: FSDP\nfsdp_config: {transformer_layer_cls_to_warp: A}\n",
    "distributed_type: FSPD\n",
    "distributed_type: MEGATRON_LM\n",
    "distributed_type: FSDP\nmixed_precision: fp8\n",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULLSHARD\n",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 6\n",
    "distributed_type: FSDP\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_WRAP\n",
    "distributed_type: FSDP\nfsdp_config: {state_dict_type: FULL}\n",
    "distributed_type: FSDP\nfsdp_config: {sync_module_states: maybe}\n",
    "distributed_type: FSDP\nfsdp_config: {min_num_params: many}\n",
    "distributed_type: FSDP\nfsdp_config: {ignored_modules: 'a(b|c)[0-9]'}\n",
    "distributed_type: FSDP\nfsdp_config: [a]\n",
    "distributed_type: FSDP\nparallelism_config: {cp_size: two}\n",
    "distributed_type: FSDP\nnum_processes: two\n",
    "distributed_type: FSDP\ndeepspeed_config: {zero_stage: 3}\n",
    "model: x\ntraining:\n  fsdp: full_shard\n  deepspeed: zero3.json\n",
    "model: x\ntraining:\n  fsdp: full_shard auto_warp\n",
    "model: x\ntraining:\n  fsdp: full_shard no_shard\n",
    "model: x\ntraining:\n  fsdp_config:\n    fsdp_forward_prefech: true\n",
    "model: x\ntraining:\n  fsdp_config:\n    backward_prefetch: pre_backward\n",
    "model: x\ntraining:\n  fsdp_config:\n    offload_params: true\n    offload_params: false\n",
    "model: x\ntraining:\n  fsdp_config:\n    offload_params: true\n    xla: true\n",
    "model: x\ntraining: {fsdp_config: missing.json}\n",
    "sharding: {strategy: zero2}\ntraining: {fsdp: full_shard}\nmodel: x\n",
    "output_dir: x\nlerning_rate: 1\n",
    "output_dir: x\nlearning_rate: fast\nseed: -1\n",
    "output_dir: x\npush_to_hub: true\n",
    "base_model: x\nmicro_batchsize: 2\n",
    "base_model: x\nadapter: qlora\n",
    "base_model: x\noptimizer: lion_8bit\n",
    '{"zero_optimization": {"stage": 4}}',
    '{"zero_optimization": {"ofload_param": {}}}',
    '{"zero_optimization":\n {"stage": 3,\n "offload_param": {"device": "gpu"}}}',
    '{"train_batch_size": 8, "optimizer": {"type": "Lamb"}}',
    '{"train_batch_size": 8, "scheduler": {"type": "OneCycle"}}',
    '{"train_batch_size": 8, "optimizer": {"params": {"betas": 1}}}',
    '{"zero_optimization": 2, "train_batch_size": 8}',
    '{"train_batch_size": 8,\n"bf16": {"enabled": true},\n"fp16": {"enabled": true}}',
    "training:\n  <<: {max_steps: 5}\n  <<: {max_steps: 6}\n",
    "zero_optimisation: {stage: 3}\n",
    "model: {trust_remote_code: yes please}\n",
    "base_model: x\ndatasets: [{type: alpaca}]\n",
    "model_name_or_path: x\nuse_peft: true\nlora_r: 0\n",
    "parallelism: {pipeline_parallel_degree: 2}\n",
    "parallelism: {tensor_parallel_degree: 2, expert_parallel_degree: 3}\n",
    "distributed_config: {fsdp_size: 3, ep_size: 2}\n",
    "distributed_config: {tp_size: 2, tp_plan: {a: colwise}}\n",
    "parallelism: {tensor_parallel_degre: 2}\n",
    "base_model: x\ndatasets: [{path: a, split: 'train[:10%]'}]\n",
    "base_model: x\ndatasets: []\npretraining_dataset: ''\n",
)


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_a_wrong_file_says_where_what_and_how(text, check_error):
    check_error("a.yaml", text, needs_model=False)


def test_a_later_check_names_the_key_of_the_file(load_file):
    text = "distributed_type: FSDP\nfsdp_config:\n  offload_params: true\n"
    resolved = load_file(text, needs_model=False)
    error = resolved.located(ConfigError("offload: too little memory"))
    assert str(error) == "a.yaml:3: fsdp_config.offload_params: too little memory"


def test_an_override_corrects_a_wrong_file(load_file):
    text = "training: {fsdp: full_shrad, fsdp_config: missing.json}\n"
    with pytest.raises(ConfigError, match="2 problems"):
        load_file(text, needs_model=False)
    typed = ["training.fsdp=hybrid_shard", "training.fsdp_config={offload_params: true}"]
    sharding = load_file(text, *typed, needs_model=False).config.sharding
    assert (sharding.strategy, sharding.offload.optimizer) == ("hybrid_shard", "cpu")


def test_three_batch_sizes_of_deepspeed_must_agree_with_the_ranks(load_file):
    resolved = load_file(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3,\n'
        ' "gradient_accumulation_steps": 2, "train_batch_size": 12}',
        needs_model=False,
    )
    assert resolved.for_ranks(2).config.training.gradient_accumulation_steps == 2
    with pytest.raises(ConfigError, match=r"a.yaml:2: train_batch_size: expected 18, which is"):
        resolved.for_ranks(3)


def test_broken_json_is_not_called_yaml(load_file):
    text = json.dumps({"model": "\U0001f600"})  # written as a pair of surrogates
    assert load_file(text, name="a.json").config.model.name_or_path == "\U0001f600"
    text = '// ours\n{"zero_optimization": {"stage": 2}}'
    with pytest.raises(ConfigError, match=r"a.json:2: expected JSON, got"):
        load_file(text, name="a.json", needs_model=False)
