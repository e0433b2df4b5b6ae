"""DeepSpeed's JSON: ZeRO's stages, offload, batch, precision, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fullshard.config.dialects.mesh import AUTO_EP, AUTO_TP
from fullshard.config.dialects.rules import (
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    each,
    flag,
    happens,
    is_auto,
    is_empty,
    lost,
    mapping_of,
    no_effect,
    not_yet,
    refused,
    to,
    translated,
    unless,
    word_among,
)
from fullshard.config.fields import Rejected, to_flag, to_number
from fullshard.config.values import words_of

HOMES: Mapping[str, object] = {"none": None, "cpu": "cpu", "nvme": "nvme"}

_STAGES = {
    "0": ("no_shard", "stage 0 replicates everything"),
    "1": ("shard_grad_op", "stage 1, with gradients sharded too: less memory, the same losses"),
    "2": ("shard_grad_op", "stage 2"),
    "3": ("full_shard", "stage 3"),
}


@unless()
def stage(value: object, said: Said) -> Meaning:
    """A ZeRO stage; with MiCS it is sharded within a group."""
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: sharding.strategy decides")
    strategy, why = _STAGES[word_among(value, _STAGES)]
    group = to_number(said.get("mics_shard_size"))
    if group is not None and group > 0:
        return translated({"sharding.strategy": "hybrid_shard"}, "mics_shard_size makes copies")
    return translated({"sharding.strategy": strategy}, why)


def _zero(value: object, said: Said) -> Meaning:
    """`zero_optimization: true` is stage 1."""
    return stage("1" if to_flag(value) else "0", said)


@unless()
def home(value: object, said: Said) -> Meaning:
    """The memory of DeepSpeed's parameters, or of optimizer states with gradients.

    torch's optimizers update parameters in place, so here all state leaves the device.
    """
    if HOMES[word_among(value, HOMES)] is None:
        return happens("sharding.offload")
    why = "parameters, gradients and optimizer state leave the device together"
    parameters, optimizer = _device(said, "offload_param"), _device(said, "offload_optimizer")
    if "nvme" not in (parameters, optimizer):
        return translated({"sharding.offload": "cpu"}, why)
    homes = {"parameters": parameters, "gradients": optimizer, "optimizer": optimizer}
    return translated({f"sharding.offload.{key}": home for key, home in homes.items()}, why)


def _device(said: Said, key: str) -> object:
    """The device, from a nested or flat key; an invalid value is reported by its own rule."""
    value = mapping_of(said.get(key)).get("device", said.get(f"{key}_device"))
    return next((HOMES[word] for word in words_of(value) if HOMES.get(word)), "cpu")


def nvme_path(key: str) -> Rule:
    """The NVMe folder, if the key `offload_*` uses NVMe."""

    @unless("none")
    def rule(value: object, said: Said) -> Meaning:
        if _device(said, key) != "nvme":
            return Meaning(Status.NO_EFFECT, "the device is not nvme")
        why = "unnamed files in it, which are gone when the run ends"
        return translated({"sharding.offload.folder": value}, why)

    return rule


def _old_offload(value: object, said: Said) -> Meaning:
    return home("cpu" if to_flag(value) else "none", said)


def _among(key: str, words: Mapping[str, str], advice: str) -> Rule:
    """Reads a class name of DeepSpeed's; one without a counterpart is not supported yet."""

    @unless()
    def rule(value: object, _: Said) -> Meaning:
        word = str(value).strip().lower()
        if word not in words:
            raise refused(value, advice)
        why = "DeepSpeed's Adam decays like AdamW" if word == "adam" else ""
        return translated({key: words[word]}, why)

    return rule


_OPTIMIZERS = {"adam": "adamw_torch", "adamw": "adamw_torch", "sgd": "sgd"}
_SCHEDULES = {
    "warmuplr": "constant_with_warmup",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}


def _betas(value: object, _: Said) -> Meaning:
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: training.adam_beta1 and adam_beta2 decide")
    betas = cast("list[object]", value) if isinstance(value, list) else []
    if len(betas) != 2:
        raise Rejected("two numbers")
    return translated({"training.adam_beta1": betas[0], "training.adam_beta2": betas[1]})


def _is_size(value: object) -> None:
    if not is_auto(value) and to_number(value) is None and not isinstance(value, bool):
        raise Rejected("a number or auto")


def _autocast(value: object, said: Said) -> Meaning:
    enabled = said.get("enabled")
    if is_empty(enabled) or not to_flag(enabled):
        return Meaning(Status.NO_EFFECT, "torch_autocast is off")
    return translated({"sharding.param_dtype": value}, "units compute in it")


_BUFFERS = no_effect("the engine sizes its own buffers")
_CHECKPOINTS = no_effect("it concerns DeepSpeed's checkpoints")
_TORCHS = no_effect("the optimizer is torch's")

_OFFLOAD: Table = {
    **each(
        _BUFFERS,
        "pin_memory buffer_count buffer_size max_in_cpu fast_init pipeline_read pipeline_write",
        "pipeline cpuadam_cores_perc super_offload",
    ),
    "ratio": lost("all of the state is offloaded", 1),
}

ZERO: Table = {
    "stage": stage,
    **{
        key: {"device": home, "nvme_path": nvme_path(key), **_OFFLOAD}
        for key in ("offload_optimizer", "offload_param")
    },
    **each(_old_offload, "cpu_offload cpu_offload_params cpu_offload_param"),
    "cpu_offload_use_pin_memory": _BUFFERS,
    "mics_shard_size": to("sharding.shard", "ranks that share one copy", -1, 0),
    "mics_hierarchical_params_gather": no_effect("the mesh has two axes"),
    "zero_hpz_partition_size": lost(
        "weights have no second copy inside a host; hybrid_shard is similar", 1
    ),
    **each(
        lost("weights are gathered in sharding.param_dtype", False),
        "zero_quantized_weights zero_quantized_nontrainable_weights",
    ),
    **each(
        lost("gradients are reduced in sharding.reduce_dtype", False),
        "zero_quantized_gradients zeropp_loco_param",
    ),
    "zenflow": not_yet("Leave it out"),
    **each(
        no_effect("the sizes of units and the prefetch depths replace buckets", _is_size),
        "reduce_bucket_size allgather_bucket_size prefetch_bucket_size",
        "param_persistence_threshold model_persistence_threshold max_live_parameters",
        "max_reuse_distance sub_group_size module_granularity_threshold",
    ),
    **each(
        no_effect("the plan decides how gradients are communicated"),
        "contiguous_gradients reduce_scatter allgather_partitions overlap_comm legacy_stage1",
        "use_multi_rank_bucket_allreduce round_robin_gradients grad_hooks allgather_sequential",
        "use_all_reduce_for_fetch_params memory_efficient_linear override_module_apply",
    ),
    **each(
        no_effect("a run always writes a Hugging Face folder to model/"),
        "gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save",
    ),
    **each(_CHECKPOINTS, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"),
    "ignore_unused_parameters": no_effect("unused parameters are known to the plan"),
    "leaf_module": no_effect("units of experts are found automatically"),
    "log_trace_cache_warnings": no_effect("there is no trace cache: the plan is the program"),
    "enable_sanity_checks": no_effect("ranks always compare plans and weights"),
    "save_muon_momentum_buffer_in_memory": no_effect("it concerns Muon"),
}

_WARMUP: Table = {
    "warmup_min_lr": lost("the warm-up begins at zero", 0, "auto"),
    "warmup_max_lr": to("training.learning_rate"),
    "warmup_num_steps": to("training.warmup_steps"),
    "warmup_type": lost("the warm-up is linear", "linear"),
    "total_num_steps": no_effect("training.max_steps decides"),
    "warmup_min_ratio": lost("the warm-up begins at zero", 0),
    "cos_min_ratio": lost("the cosine ends at zero", 0),
    "last_batch_iteration": no_effect("a resumed run knows its step"),
}

DEEPSPEED: Table = {
    "zero_optimization": {"": _zero, **ZERO},
    "train_batch_size": to("training.train_batch_size", "of all ranks in one update"),
    "train_micro_batch_size_per_gpu": to("training.per_device_train_batch_size"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "gradient_clipping": to("training.max_grad_norm"),
    "bf16": {
        "enabled": flag("sharding.param_dtype", "bfloat16"),
        "bf16_master_weights_and_grads": flag("sharding.master_dtype", "bfloat16"),
        "bf16_optimizer_states": lost("optimizer state has the masters' dtype", False),
        "immediate_grad_update": no_effect("each gradient is reduced when it is ready"),
        "check_overflow": no_effect("bf16 does not overflow where float32 does not"),
    },
    "fp16": {
        "enabled": flag("sharding.param_dtype", "float16"),
        "loss_scale": lost("the scale of the loss adapts itself", 0, "auto"),
        "fp16_master_weights_and_grads": lost("masters stay float32", False),
        **each(
            no_effect("torch's GradScaler chooses and adapts the scale of the loss"),
            "auto_cast initial_scale_power loss_scale_window hysteresis consecutive_hysteresis",
            "min_loss_scale",
        ),
    },
    "torch_autocast": {
        "enabled": no_effect("units compute in sharding.param_dtype, and masters stay float32"),
        "dtype": _autocast,
        "lower_precision_safe_modules": no_effect("all modules of a unit compute in one dtype"),
    },
    "data_types": {"grad_accum_dtype": lost("gradients are summed in float32", "fp32", "auto")},
    "tensor_parallel": AUTO_TP,
    "expert_parallel": AUTO_EP,
    "communication_data_type": to("sharding.reduce_dtype"),
    "seq_parallel_communication_data_type": no_effect("it concerns sequence parallelism"),
    "gradient_allreduce_op": to("sharding.grad_reduction"),
    "prescale_gradients": no_effect("gradients are divided as they are added, in reduce_dtype"),
    "gradient_predivide_factor": no_effect("gradients are divided as they are added"),
    "sparse_gradients": lost("gradients of embeddings are dense", False),
    "optimizer": {
        "type": _among("training.optim", _OPTIMIZERS, "Use AdamW or SGD"),
        "params": {
            "lr": to("training.learning_rate"),
            "betas": _betas,
            "eps": to("training.adam_epsilon"),
            "weight_decay": to("training.weight_decay"),
            "momentum": lost("sgd has no momentum", 0),
            **each(_TORCHS, "torch_adam fused"),
            "adam_w_mode": not_yet("Leave it out: weight decay is decoupled", True),
        },
        "legacy_fusion": _TORCHS,
    },
    "scheduler": {
        "type": _among(
            "training.lr_scheduler_type",
            _SCHEDULES,
            "Use WarmupLR, WarmupDecayLR or WarmupCosineLR",
        ),
        "params": _WARMUP,
    },
    "activation_checkpointing": no_effect(
        "it tunes deepspeed.checkpointing, which a model must call; ours is "
        "sharding.activation_checkpointing"
    ),
    "steps_per_print": no_effect("training.logging_steps decides what is printed"),
    "zero_allow_untested_optimizer": no_effect("every optimizer of torch is allowed"),
    "zero_force_ds_cpu_optimizer": no_effect("the optimizer is torch's, on the host too"),
    "wall_clock_breakdown": no_effect("metrics.jsonl has the parts of every step"),
    "memory_breakdown": no_effect("metrics.jsonl has the memory of every step"),
    "dump_state": no_effect("config.yaml and plan.json in the run's folder have it"),
    "managed_gradient_accumulation": no_effect("the loop accumulates gradients"),
    "dataloader_drop_last": no_effect("batches are always whole"),
    "disable_allgather": no_effect("the plan decides when weights are gathered"),
    **each(_CHECKPOINTS, "checkpoint load_universal_checkpoint"),
    "aio": no_effect("the engine sizes its own reads and writes"),
    "autotuning": lost("there is no autotuning; `fullshard plan` forecasts what fits", False),
    "compile": lost("the model runs without torch.compile", False),
    "eigenvalue": lost("there is no eigenvalue tool", False),
    "nebula": lost("there is no Nebula", False),
    **each(
        lost("training.report_to names trackers; metrics.jsonl has every step", False),
        "tensorboard wandb comet csv_monitor",
    ),
    **each(
        lost("metrics.jsonl has the time and throughput of every step", False),
        "comms_logger flops_profiler",
    ),
    **each(
        not_yet("Leave it out", False),
        "elasticity compression_training data_efficiency curriculum_learning amp moe pipeline",
        "progressive_layer_drop sparse_attention sequence_parallel hybrid_engine quantize_training",
    ),
}
