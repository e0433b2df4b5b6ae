"""What people read when a file of another tool is wrong, word for word."""

from __future__ import annotations

import pytest

from fullshard.config.load import load_config
from fullshard.errors import ConfigError

WRAP = "transformer_based_wrap, size_based_wrap, no_wrap"
STRATEGIES = "full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2"
BOTH = "Both shard the same parameters, so only one can; fullshard runs either file alone"

# What stands in a.yaml -> the whole error.
FILES = {
    "training:\n  <<: {max_steps: 5}\n  <<: {max_steps: 6}\n": (
        "a.yaml:3: training.<<: expected a key once, got it in line 2 and again in line 3. "
        "Remove one of the two"
    ),
    "zero_optimisation: {stage: 3}\n": (
        "a.yaml:1: zero_optimisation: unknown key. Did you mean 'zero_optimization'?"
    ),
    "model: {trust_remote_code: yes please}\n": (
        "a.yaml:1: model.trust_remote_code: expected true or false, got 'yes please'"
    ),
    "base_model: x\ndatasets: [{type: alpaca}]\n": (
        "a.yaml:2: datasets: expected a list of mappings with path, got a list"
    ),
    "model_name_or_path: x\nuse_peft: true\nlora_r: 0\n": (
        "a.yaml:3: lora_r: expected an integer >= 1, got 0"
    ),
    "distributed_type: FSDP\nmixed_precission: bf16\n": (
        "a.yaml:2: mixed_precission: unknown key. Did you mean 'mixed_precision'?"
    ),
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_parms: true\n": (
        "a.yaml:3: fsdp_config.fsdp_offload_parms: unknown key. Did you mean 'fsdp_offload_params'?"
    ),
    "distributed_type: FSDP\nfsdp_config: {transformer_layer_cls_to_warp: A}\n": (
        "a.yaml:2: fsdp_config.transformer_layer_cls_to_warp: unknown key. "
        "Did you mean 'transformer_layer_cls_to_wrap'?"
    ),
    "distributed_type: FSPD\n": (
        "a.yaml:1: distributed_type: expected one of fsdp, deepspeed, multi_gpu, multi_cpu, "
        "multi_xpu, multi_npu, multi_mlu, multi_hpu, no; got 'FSPD'. Did you mean 'fsdp'?"
    ),
    "distributed_type: MEGATRON_LM\n": (
        "a.yaml:1: distributed_type: 'MEGATRON_LM' is not yet supported. Use FSDP"
    ),
    "distributed_type: FSDP\nmixed_precision: fp8\n": (
        "a.yaml:2: mixed_precision: 'fp8' is not yet supported. Use bf16"
    ),
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULLSHARD\n": (
        f"a.yaml:3: fsdp_config.fsdp_sharding_strategy: expected one of {STRATEGIES}, auto; "
        "got 'FULLSHARD'. Did you mean 'full_shard'?"
    ),
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 6\n": (
        f"a.yaml:3: fsdp_config.fsdp_sharding_strategy: expected one of {STRATEGIES}, auto; got 6"
    ),
    "distributed_type: FSDP\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_WRAP\n": (
        f"a.yaml:3: fsdp_config.auto_wrap_policy: expected one of {WRAP}; "
        "got 'TRANSFORMER_WRAP'. Did you mean 'transformer_based_wrap'?"
    ),
    "distributed_type: FSDP\nfsdp_config: {state_dict_type: FULL}\n": (
        "a.yaml:2: fsdp_config.state_dict_type: expected one of full_state_dict, "
        "local_state_dict, sharded_state_dict; got 'FULL'. Did you mean 'full_state_dict'?"
    ),
    "distributed_type: FSDP\nfsdp_config: {sync_module_states: maybe}\n": (
        "a.yaml:2: fsdp_config.sync_module_states: expected true or false, got 'maybe'"
    ),
    "distributed_type: FSDP\nfsdp_config: {min_num_params: many}\n": (
        "a.yaml:2: fsdp_config.min_num_params: expected an integer >= 1, got 'many'"
    ),
    "distributed_type: FSDP\nfsdp_config: {ignored_modules: 'a(b|c)[0-9]'}\n": (
        "a.yaml:2: fsdp_config.ignored_modules: expected names of modules, with .* and | as the "
        "only wildcards; got 'a(b|c)[0-9]'"
    ),
    "distributed_type: FSDP\nfsdp_config: [a]\n": (
        "a.yaml:2: fsdp_config: expected a mapping of keys, got a list"
    ),
    "distributed_type: FSDP\nparallelism_config: {tp_size: 2}\n": (
        "a.yaml:2: parallelism_config.tp_size: 2 is not yet supported. "
        "Tensor parallelism comes later"
    ),
    "distributed_type: FSDP\nnum_processes: two\n": (
        "a.yaml:2: num_processes: expected an integer >= 1, got 'two'"
    ),
    "distributed_type: FSDP\ndeepspeed_config: {zero_stage: 3}\n": (
        "a.yaml:2: deepspeed_config: expected one of FSDP and DeepSpeed, got DeepSpeed beside "
        f"FSDP, which distributed_type (a.yaml:1) asks for. {BOTH}"
    ),
    "model: x\ntraining:\n  fsdp: full_shard\n  deepspeed: zero3.json\n": (
        "a.yaml:4: training.deepspeed: expected one of FSDP and DeepSpeed, got DeepSpeed beside "
        f"FSDP, which training.fsdp (a.yaml:3) asks for. {BOTH}"
    ),
    "model: x\ntraining:\n  fsdp: full_shard auto_warp\n": (
        f"a.yaml:3: training.fsdp: expected words among {STRATEGIES}, auto_wrap, offload; "
        "got 'full_shard auto_warp'. Did you mean 'auto_wrap'?"
    ),
    "model: x\ntraining:\n  fsdp: full_shard no_shard\n": (
        "a.yaml:3: training.fsdp: expected one strategy, and auto_wrap and offload; "
        "got 'full_shard no_shard'"
    ),
    "model: x\ntraining:\n  fsdp_config:\n    fsdp_forward_prefech: true\n": (
        "a.yaml:4: training.fsdp_config.fsdp_forward_prefech: unknown key. "
        "Did you mean 'fsdp_forward_prefetch'?"
    ),
    "model: x\ntraining:\n  fsdp_config:\n    backward_prefetch: pre_backward\n": (
        "a.yaml:4: training.fsdp_config.backward_prefetch: expected one of backward_pre, "
        "backward_post, no_prefetch, none; got 'pre_backward'. Did you mean 'backward_pre'?"
    ),
    "model: x\ntraining:\n  fsdp_config:\n    offload_params: true\n    offload_params: false\n": (
        "a.yaml:5: training.fsdp_config.offload_params: expected a key once, got it in line 4 and "
        "again in line 5. Remove one of the two"
    ),
    "model: x\ntraining:\n  fsdp_config:\n    offload_params: true\n    xla: true\n": (
        "a.yaml:5: training.fsdp_config.xla: true is not yet supported. Leave it out"
    ),
    "model: x\ntraining: {fsdp_config: missing.json}\n": (
        "a.yaml:2: training.fsdp_config: expected a configuration file, got 'missing.json', "
        "no such file. '.' has a.yaml"
    ),
    "sharding: {strategy: zero2}\ntraining: {fsdp: full_shard}\nmodel: x\n": (
        "a.yaml:2: training.fsdp: expected what sharding.strategy (a.yaml:1) says, 'zero2'; "
        "got 'full_shard' as sharding.strategy. Give one of the two"
    ),
    "output_dir: x\nlerning_rate: 1\n": (
        "a.yaml:2: lerning_rate: unknown key. Did you mean 'learning_rate'?"
    ),
    "output_dir: x\nlearning_rate: fast\nseed: -1\n": (
        "2 problems:\n"
        "  a.yaml:2: learning_rate: expected a number >= 0, got 'fast'\n"
        "  a.yaml:3: seed: expected an integer >= 0, got -1"
    ),
    "output_dir: x\npush_to_hub: true\n": (
        "a.yaml:2: push_to_hub: 'true' is not yet supported. Leave it out"
    ).replace("'true'", "true"),
    "base_model: x\nmicro_batchsize: 2\n": (
        "a.yaml:2: micro_batchsize: unknown key. Did you mean 'micro_batch_size'?"
    ),
    "base_model: x\nadapter: qlora\n": (
        "a.yaml:2: adapter: 'qlora' is not yet supported. Write lora, or leave it out"
    ),
    "base_model: x\noptimizer: lion_8bit\n": (
        "a.yaml:2: optimizer: expected one of adamw_torch, adamw_torch_fused, sgd, muon, "
        "adafactor, adamw_bnb_8bit; got 'lion_8bit'. This word of Hugging Face's is not yet "
        "supported: it scales blocks of a tensor together; of these adamw_bnb_8bit is there"
    ),
    '{"zero_optimization": {"stage": 4}}': (
        "a.yaml:1: zero_optimization.stage: expected one of 0, 1, 2, 3; got 4"
    ),
    '{"zero_optimization": {"ofload_param": {}}}': (
        "a.yaml:1: zero_optimization.ofload_param: unknown key. Did you mean 'offload_param'?"
    ),
    '{"zero_optimization":\n {"stage": 3,\n "offload_param": {"device": "gpu"}}}': (
        "a.yaml:3: zero_optimization.offload_param.device: expected one of none, cpu, nvme; "
        "got 'gpu'. Did you mean 'cpu'?"
    ),
    '{"train_batch_size": 8, "optimizer": {"type": "Lamb"}}': (
        "a.yaml:1: optimizer.type: 'Lamb' is not yet supported. Use AdamW or SGD"
    ),
    '{"train_batch_size": 8, "scheduler": {"type": "OneCycle"}}': (
        "a.yaml:1: scheduler.type: 'OneCycle' is not yet supported. "
        "Use WarmupLR, WarmupDecayLR or WarmupCosineLR"
    ),
    '{"train_batch_size": 8, "optimizer": {"params": {"betas": 1}}}': (
        "a.yaml:1: optimizer.params.betas: expected two numbers, got 1"
    ),
    '{"zero_optimization": 2, "train_batch_size": 8}': (
        "a.yaml:1: zero_optimization: expected true or false, got 2"
    ),
    '{"train_batch_size": 8,\n"bf16": {"enabled": true},\n"fp16": {"enabled": true}}': (
        "a.yaml:3: fp16.enabled: expected what bf16.enabled (a.yaml:2) says, 'bfloat16'; "
        "got 'float16' as sharding.param_dtype. Give one of the two"
    ),
}


@pytest.mark.parametrize(("text", "expected"), FILES.items(), ids=range(len(FILES)))
def test_a_wrong_file_says_where_what_and_how(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path.relative_to(tmp_path), needs_model=False)
    assert str(caught.value) == expected
    assert caught.value.exit_code == 2


def test_two_files_that_ask_for_two_engines_are_refused_before_either_is_read_further(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {offload_parms: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path.relative_to(tmp_path), ["deepspeed=zero3.yaml"], needs_model=False)
    assert str(caught.value) == (
        "command line: deepspeed: expected one of FSDP and DeepSpeed, got DeepSpeed beside FSDP, "
        f"which distributed_type (fsdp.yaml:1) asks for. {BOTH}"
    )


def test_all_problems_of_a_file_come_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {a: 1, min_num_params: x}\nb: 2\n")
    with pytest.raises(ConfigError, match="5 problems") as caught:
        load_config(path.relative_to(tmp_path), ["max_steps=x", "nothing=1"], needs_model=False)
    assert str(caught.value).count("a.yaml:") == 3
    assert str(caught.value).count("command line:") == 2


def test_a_later_check_names_the_key_that_stands_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  offload_params: true\n")
    resolved = load_config(path.relative_to(tmp_path), needs_model=False)
    error = resolved.located(ConfigError("offload: too little memory"))
    assert str(error) == "a.yaml:3: fsdp_config.offload_params: too little memory"


def test_a_typed_value_mends_what_a_file_says(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training: {fsdp: full_shrad, fsdp_config: missing.json}\n")
    with pytest.raises(ConfigError, match="2 problems"):
        load_config(path, needs_model=False)
    typed = ["training.fsdp=hybrid_shard", "training.fsdp_config={offload_params: true}"]
    sharding = load_config(path, typed, needs_model=False).config.sharding
    assert (sharding.strategy, sharding.offload.optimizer) == ("hybrid_shard", "cpu")


def test_three_batch_sizes_of_deepspeed_must_agree_with_the_ranks(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3,\n'
        ' "gradient_accumulation_steps": 2, "train_batch_size": 12}'
    )
    resolved = load_config(path, needs_model=False)
    assert resolved.for_ranks(2).config.training.gradient_accumulation_steps == 2
    with pytest.raises(ConfigError, match=r"zero.json:2: train_batch_size: expected 18, which is"):
        resolved.for_ranks(3)


def test_broken_json_is_not_called_yaml(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('// ours\n{"zero_optimization": {"stage": 2}}')
    with pytest.raises(ConfigError, match=r"a.json:2: expected JSON, got"):
        load_config(path, needs_model=False)
