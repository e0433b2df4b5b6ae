"""Hugging Face names that are not fields here, or that set another key.

    NAMES    names below `training` that are without effect, lost, or not supported yet
    MOVES    keys that set another key: `training.bf16` sets a dtype of `sharding`
    RIVALS   pairs of keys with the same meaning

Other names of a field of the same section are in that section's `ALIASES`. The names are those of
transformers 4.40, transformers 5.x and TRL's SFTConfig. A name that is not supported yet accepts
values that request the existing behaviour, so a file with all defaults works. `config explain` has
a line for each name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from fullshard.config.dialects.rules import Rule, each, lost, no_effect, not_yet
from fullshard.config.fields import to_flag

_COMPILE = "the model runs without torch.compile"
_DEVICES = "CUDA_VISIBLE_DEVICES decides; an empty value hides all accelerators"
_KERNELS = "the model's own kernels run"
_later = partial(not_yet, "Leave it out")
_UPDATES = "units are updated after backward, with the same result"
_REENTRANT = lost("recompute is never reentrant, with the same values", {"use_reentrant": False})

NAMES: Mapping[str, Rule] = {
    # Not supported yet, unless the value requests the existing behaviour.
    **each(
        _later(False),
        "auto_find_batch_size full_determinism bf16_full_eval fp16_full_eval use_ipex",
        "jit_mode_eval use_cache activation_offloading eval_on_start eval_use_gather_object",
        "do_predict include_inputs_for_metrics batch_eval_metrics predict_with_generate",
        "load_best_model_at_end save_only_model save_on_each_node enable_jit_checkpoint",
        "ignore_data_skip push_to_hub restore_callback_states_from_checkpoint hub_always_push",
        "sortish_sampler padding_free tpu_metrics_debug evaluate_during_training split_batches",
    ),
    **each(
        _later(None),
        "optim_target_modules neftune_noise_alpha torchdynamo eval_accumulation_steps optim_args",
        "metric_for_best_model greater_is_better generation_max_length generation_num_beams",
        "generation_config push_to_hub_model_id push_to_hub_organization push_to_hub_token",
        "hub_token hub_private_repo hub_model_id hub_revision dataloader_multiprocessing_context",
        "dispatch_batches label_names pad_to_multiple_of pad_token eos_token",
        "xpu_backend tpu_num_cores lr_scheduler_kwargs dataset_kwargs model_init_kwargs debug",
        "include_for_metrics sharded_ddp mp_parameters shuffle_dataset num_of_sequences",
        "chars_per_token",
    ),
    **each(_later(True), "do_train"),
    # eval_strategy decides, as in Hugging Face's Trainer
    **each(_later(True, False), "do_eval include_tokens_per_second prediction_loss_only"),
    **each(_later(True), "average_tokens_across_devices eval_do_concat_batches"),
    **each(_later(True), "dataloader_in_order eval_packing"),
    **each(_later("auto"), "fp16_backend half_precision_backend"),
    "fp16_opt_level": _later("O1"),
    "label_smoothing_factor": _later(0),
    "eval_delay": _later(0),
    "past_index": _later(-1),
    "logging_strategy": _later("steps"),
    "include_num_input_tokens_seen": _later("no", False),
    "hub_strategy": _later("every_save"),
    "length_column_name": _later("length"),
    "train_sampling_strategy": _later("random"),
    "packing_strategy": _later("bfd"),
    "loss_type": _later("nll"),
    "ray_scope": _later("last"),
    # Supported under another name.
    "data_seed": not_yet("Write seed", None),
    "adafactor": not_yet("Write optim: adafactor", False),
    "per_gpu_train_batch_size": not_yet("Write per_device_train_batch_size", None),
    "per_gpu_eval_batch_size": not_yet("Write per_device_eval_batch_size", None),
    # Known names whose meaning is in dialects/trainer.py.
    **each(
        _later(),
        "fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed",
        "parallelism_config",
    ),
    # No effect for any value.
    "overwrite_output_dir": no_effect(
        "an older finished run in output_dir is moved aside, never overwritten"
    ),
    **each(lost(_DEVICES, False), "use_cpu no_cuda"),
    "use_mps_device": lost("Apple's GPUs are not used", False),
    "skip_memory_metrics": no_effect("metrics.jsonl has the memory of every step"),
    **each(lost(_UPDATES, False), "optimizer_in_backward optimizer_in_bwd"),
    "torch_compile": lost(_COMPILE, False),
    **each(lost(_COMPILE, None), "torch_compile_backend torch_compile_mode"),
    "use_liger_kernel": lost(_KERNELS, False),
    "liger_kernel_config": lost(_KERNELS, None),
    **each(_REENTRANT, "gradient_checkpointing_kwargs activation_checkpointing_kwargs"),
    "torch_empty_cache_steps": lost("the plan's buffers are never freed", None),
    # ---- logging ----
    **each(
        lost("trackio shows the runs of its own machine", None),
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    "logging_first_step": no_effect("the first step is always printed"),
    "logging_nan_inf_filter": lost("a loss that is not finite ends the run", False),
    "log_on_each_node": no_effect("rank 0 prints, and every rank has a log"),
    **each(
        no_effect("rank 0 prints one line per step"), "log_level log_level_replica disable_tqdm"
    ),
    # ---- data and saving ----
    "save_safetensors": lost("weights are always safetensors", True),
    **each(
        no_effect("one process per rank makes batches ahead, pinned on GPUs"),
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers",
        "dataloader_prefetch_factor",
    ),
    "dataloader_drop_last": no_effect("batches are always whole"),
    "group_by_length": no_effect("the examples of a step are distributed by length"),
    "remove_unused_columns": no_effect("only the text column is read"),
    **each(
        no_effect("data is read once, before the ranks start"),
        "dataset_num_proc dataset_batch_size",
    ),
    # ---- processes ----
    "accelerator_config": lost("every rank reads its own part of each batch", {}),
    "ddp_backend": no_effect("the device decides: nccl or gloo"),
    **each(
        no_effect("units replace DDP's buckets"),
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    ),
    "local_rank": no_effect("the launcher sets it"),
}


@dataclass(frozen=True)
class Move:
    """A key that sets another key of ours.

    Args:
        source: dotted key as written.
        target: dotted key that it sets.
        on: the target's value for true, if the source is also a flag of its own section.
        off: the target's value for false; empty: any value other than `on`.
    """

    source: str
    target: str
    on: str = ""
    off: str = ""

    @property
    def stays(self) -> bool:
        """Whether the source is also a field of its section."""
        return bool(self.on)

    def implied(self, said: object) -> object:
        """The target's value for a value of the source; None if it sets none."""
        if not self.on:
            return said
        return self.on if said is not None and to_flag(said) else None


SFT_NAMES = ("packing", "completion_only_loss", "assistant_only_loss", "chat_template_path")
_RECOMPUTE = "sharding.activation_checkpointing"

MOVES = (
    Move("strategy", "sharding.strategy"),
    Move("training.ddp_timeout", "launch.timeout"),
    Move("training.dataset_text_field", "data.text_column"),
    Move("training.activation_checkpointing", _RECOMPUTE),
    *(Move(f"training.{name}", f"sft.{name}") for name in SFT_NAMES),
    Move("training.tf32", "training.matmul_precision", on="high", off="highest"),
    Move("training.bf16", "sharding.param_dtype", on="bfloat16"),
    Move("training.fp16", "sharding.param_dtype", on="float16"),
    Move("training.gradient_checkpointing", _RECOMPUTE, on="block", off="none"),
)

# Names below `training` that set another key.
MOVED = {
    move.source.removeprefix("training."): move
    for move in MOVES
    if move.source.startswith("training.")
}

# Pairs of keys with the same meaning: one on the command line replaces the other in the file.
RIVALS = (
    *((move.source, move.target) for move in MOVES if move.stays),
    ("launch.num_processes", "launch.nproc_per_node"),
    ("model.name_or_path", "model.config"),
    ("teacher.name_or_path", "teacher.config"),
    ("training.bf16", "training.fp16"),
    ("training.num_train_epochs", "training.max_steps"),
    ("training.train_batch_size", "training.per_device_train_batch_size"),
    ("training.warmup_ratio", "training.warmup_steps"),
)
