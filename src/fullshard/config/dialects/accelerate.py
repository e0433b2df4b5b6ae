"""Accelerate's YAML: the machines, and `fsdp_config` or `deepspeed_config`."""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.config.dialects.deepspeed import home, nvme_path, stage
from fullshard.config.dialects.fsdp import FSDP, MESH
from fullshard.config.dialects.rules import (
    Meaning,
    Said,
    Status,
    Table,
    choice,
    each,
    file_rule,
    is_empty,
    is_neutral,
    lost,
    no_effect,
    not_yet,
    refused,
    to,
    translated,
    unless,
    word_among,
)

# The strategy that a type means; None: the configuration of that engine has it.
_DDP = "multi_gpu multi_cpu multi_xpu multi_npu multi_mlu multi_hpu no"
_TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(("fsdp", "deepspeed"), None),
    **dict.fromkeys(_DDP.split(), "no_shard"),
}
_TYPES_LATER = ("megatron_lm", "xla", "tpu")


def _distributed_type(value: object, said: Said) -> Meaning:
    if not is_empty(value) and is_neutral(value, _TYPES_LATER):
        raise refused(value, "Use FSDP")
    word = word_among(value, _TYPES)
    strategy = _TYPES[word]
    if strategy is None:
        engine = "fsdp_config" if word == "fsdp" else "deepspeed_config"
        return Meaning(Status.TRANSLATED, f"fullshard's engine runs what {engine} says")
    values: dict[str, object] = {"sharding.strategy": strategy}
    if word == "no" and is_empty(said.get("num_processes")):
        values["launch.num_processes"] = 1
    return translated(values, "every rank keeps everything")


@unless()
def _precision(value: object, said: Said) -> Meaning:
    words = {"no": None, "bf16": "bfloat16", "fp16": "float16", "fp32": None, "fp8": "fp8"}
    if word_among(value, words) == "fp8":
        raise refused(value, "Use bf16")
    why = "masters and reduced gradients stay float32, and buffers are not cast"
    return choice("sharding.param_dtype", words, why)(value, said)


DEEPSPEED_PLUGIN: Table = {
    "zero_stage": stage,
    **each(home, "offload_optimizer_device offload_param_device"),
    "offload_optimizer_nvme_path": nvme_path("offload_optimizer"),
    "offload_param_nvme_path": nvme_path("offload_param"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "gradient_clipping": to("training.max_grad_norm"),
    "zero3_init_flag": no_effect("every rank builds only its own part of the weights"),
    "zero3_save_16bit_model": no_effect("a run always leaves a Hugging Face folder in model/"),
    "deepspeed_config_file": file_rule,
    "deepspeed_moe_layer_cls_names": no_effect("units of experts are found by themselves"),
    "deepspeed_multinode_launcher": lost("start the command on every machine", "standard", "none"),
    **each(
        lost("start the command on every machine"),
        "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    ),
}

ACCELERATE: Table = {
    "distributed_type": _distributed_type,
    "num_processes": to("launch.num_processes", "", -1),
    "num_machines": to("launch.num_machines"),
    "machine_rank": to("launch.machine_rank"),
    "main_process_ip": to("launch.main_process_ip"),
    "main_process_port": to("launch.main_process_port"),
    "mixed_precision": _precision,
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED_PLUGIN,
    "parallelism_config": MESH,
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "compute_environment": not_yet("Use LOCAL_MACHINE", "local_machine", 0),
    "use_cpu": lost("CUDA_VISIBLE_DEVICES= hides accelerators, and is what decides", False),
    "gpu_ids": lost("CUDA_VISIBLE_DEVICES says which accelerators ranks see", "all"),
    "rdzv_backend": no_effect("the launcher serves the rendezvous itself"),
    "same_network": no_effect("ranks meet at launch.main_process_ip"),
    "main_training_function": no_effect("the command is what runs"),
    "debug": no_effect("ranks always compare their collectives"),
    "enable_cpu_affinity": lost("processes are not bound to cores", False),
    **each(lost("the model runs without torch.compile", "no"), "dynamo_backend dynamo_config"),
    "fp8_config": not_yet("Use bf16"),
    "megatron_lm_config": not_yet("Tensor and pipeline parallelism come later"),
    "mpirun_config": lost("start the command with mpirun itself"),
    "ipex_config": lost("it concerns Intel's extension"),
    **each(
        no_effect("it concerns TPUs"),
        "downcast_bf16 command_file commands tpu_name tpu_zone tpu_use_cluster tpu_use_sudo",
        "tpu_vm tpu_env",
    ),
}
