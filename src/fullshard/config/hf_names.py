"""Hugging Face's names that may stand under `training:` and mean nothing yet.

Three generations are here: transformers 4.40, transformers 5.x, and TRL's SFTConfig. A name of
NOT_YET has the values that ask for what happens anyway; these are accepted, so that a file which
spells out defaults works, and any other value is an error that says "not yet". A name of
WITHOUT_EFFECT takes any value, since no result depends on it. Neither is a silent hole:
`config explain` has a line for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEVICES = "CUDA_VISIBLE_DEVICES= hides accelerators, and is what decides"
_COMPILE = "the model runs without torch.compile"
_REENTRANT = "recompute is never reentrant; its values are the same"
_WORKERS = "batches are cut from an array of tokens: there is nothing for workers to do"
_BUCKETS = "units take the place of DDP's buckets"

# name -> values that are the behaviour of our loop
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    # ---- what runs ----
    "do_train": (True, None),
    "do_eval": (True, False, None),  # eval_strategy decides, in Hugging Face's Trainer too
    "do_predict": (False, None),
    "evaluate_during_training": (False, None),
    "auto_find_batch_size": (False,),
    "full_determinism": (False,),
    "data_seed": (None,),
    "debug": ("", None),
    # ---- learning rate, optimizer, regularisation ----
    "lr_scheduler_kwargs": (None, {}),
    "optim_args": (None, ""),
    "optim_target_modules": (None,),
    "adafactor": (False,),
    "average_tokens_across_devices": (True,),
    "label_smoothing_factor": (0,),
    "neftune_noise_alpha": (None,),
    # ---- precision, compilation, kernels ----
    "fp16_opt_level": ("O1",),
    "fp16_backend": ("auto",),
    "half_precision_backend": ("auto",),
    "bf16_full_eval": (False,),
    "fp16_full_eval": (False,),
    "use_ipex": (False,),
    "jit_mode_eval": (False,),
    "torchdynamo": (None,),
    "use_cache": (False,),
    "activation_offloading": (False,),
    # ---- logging ----
    "logging_strategy": ("steps",),
    "include_num_input_tokens_seen": ("no", False),
    "include_tokens_per_second": (True, False),
    # ---- evaluation ----
    "eval_delay": (0, None),
    "eval_on_start": (False,),
    "eval_accumulation_steps": (None,),
    "eval_do_concat_batches": (True,),
    "eval_use_gather_object": (False,),
    "eval_packing": (None, True),
    "prediction_loss_only": (True, False),
    "include_for_metrics": ([],),
    "include_inputs_for_metrics": (False,),
    "batch_eval_metrics": (False,),
    "metric_for_best_model": (None,),
    "greater_is_better": (None,),
    "predict_with_generate": (False,),
    "generation_max_length": (None,),
    "generation_num_beams": (None,),
    "generation_config": (None,),
    # ---- saving ----
    "load_best_model_at_end": (False,),
    "save_only_model": (False,),
    "save_on_each_node": (False,),
    "enable_jit_checkpoint": (False,),
    "ignore_data_skip": (False,),
    "restore_callback_states_from_checkpoint": (False,),
    "push_to_hub": (False,),
    "push_to_hub_model_id": (None,),
    "push_to_hub_organization": (None,),
    "push_to_hub_token": (None,),
    "hub_token": (None,),
    "hub_private_repo": (None,),
    "hub_model_id": (None,),
    "hub_strategy": ("every_save",),
    "hub_always_push": (False,),
    "hub_revision": (None,),
    # ---- data ----
    "dataloader_drop_last": (),
    "dataloader_multiprocessing_context": (None,),
    "dataloader_in_order": (True,),
    "dispatch_batches": (None,),
    "split_batches": (None, False),
    "label_names": (None,),
    "length_column_name": ("length",),
    "sortish_sampler": (False,),
    "train_sampling_strategy": ("random",),
    "past_index": (-1,),
    "packing_strategy": ("bfd", None),
    "padding_free": (False,),
    "pad_to_multiple_of": (None,),
    "pad_token": (None,),
    "eos_token": (None,),
    "loss_type": (None, "nll"),
    "shuffle_dataset": (),
    "dataset_kwargs": (None, {}),
    "num_of_sequences": (),
    "chars_per_token": (),
    "model_init_kwargs": (None, {}),
    # ---- launch and sharding ----
    "fsdp": (None, "", False, []),
    "fsdp_config": (None, {}),
    "fsdp_min_num_params": (0,),
    "fsdp_transformer_layer_cls_to_wrap": (None,),
    "sharded_ddp": (None, "", []),
    "deepspeed": (None,),
    "parallelism_config": (None,),
    "xpu_backend": (None,),
    "tpu_num_cores": (None,),
    "tpu_metrics_debug": (False,),
    "mp_parameters": ("",),
    "ray_scope": ("last",),
    "per_gpu_train_batch_size": (None,),
    "per_gpu_eval_batch_size": (None,),
}

# name -> why any value of it is accepted, then the values that ask for what happens anyway; where
# there are such values, all others are wishes that are not fulfilled. `config explain` says so.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "overwrite_output_dir": (
        "an older finished run in output_dir is moved aside, never overwritten",
    ),
    "use_cpu": (_DEVICES, False),
    "no_cuda": (_DEVICES, False),
    "use_mps_device": ("Apple's GPUs are not used", False),
    "skip_memory_metrics": ("metrics.jsonl has the memory of every step",),
    "optimizer_in_backward": ("units are updated after backward, with the same result", False),
    "optimizer_in_bwd": ("units are updated after backward, with the same result", False),
    # ---- how the model computes ----
    "tf32": ("matrix products of float32 follow torch's own setting", False),
    "torch_compile": (_COMPILE, False),
    "torch_compile_backend": (_COMPILE, None),
    "torch_compile_mode": (_COMPILE, None),
    "use_liger_kernel": ("the model's own kernels run", False),
    "liger_kernel_config": ("the model's own kernels run", None),
    "gradient_checkpointing_kwargs": (_REENTRANT, {"use_reentrant": False}),
    "activation_checkpointing_kwargs": (_REENTRANT, {"use_reentrant": False}),
    "torch_empty_cache_steps": ("the plan's buffers are never given back", None),
    # ---- logging ----
    "trackio_space_id": ("trackio shows its own machine's runs", None),
    "trackio_bucket_id": ("trackio shows its own machine's runs", None),
    "trackio_static_space_id": ("trackio shows its own machine's runs", None),
    "logging_first_step": ("the first step is always printed",),
    "logging_nan_inf_filter": ("a loss that is no number ends the run", False),
    "log_on_each_node": ("rank 0 prints, and every rank has a log",),
    "log_level": ("the loop prints a line a step, on rank 0",),
    "log_level_replica": ("the loop prints a line a step, on rank 0",),
    "disable_tqdm": ("the loop prints a line a step, on rank 0",),
    # ---- data and saving ----
    "save_safetensors": ("weights are always safetensors", True),
    "dataloader_num_workers": (_WORKERS,),
    "dataloader_pin_memory": (_WORKERS,),
    "dataloader_persistent_workers": (_WORKERS,),
    "dataloader_prefetch_factor": (_WORKERS,),
    "group_by_length": ("the examples of a step are dealt out by their length",),
    "remove_unused_columns": ("only the column of the text is read",),
    "dataset_num_proc": ("data is read once, before the ranks start",),
    "dataset_batch_size": ("data is read once, before the ranks start",),
    # ---- processes ----
    "accelerator_config": ("every rank reads its own part of each batch", {}),
    "ddp_backend": ("the device decides: nccl or gloo",),
    "ddp_find_unused_parameters": (_BUCKETS,),
    "ddp_bucket_cap_mb": (_BUCKETS,),
    "ddp_broadcast_buffers": (_BUCKETS,),
    "ddp_static_graph": (_BUCKETS,),
    "local_rank": ("the launcher says it",),
}

# What to write instead, where we have it under another name.
INSTEAD: Mapping[str, str] = {
    "fsdp": "Write sharding.strategy",
    "fsdp_config": "Write its keys under sharding",
    "fsdp_min_num_params": "Write sharding.wrap: size and sharding.wrap_min_params",
    "fsdp_transformer_layer_cls_to_wrap": "Write sharding.wrap with the class names",
    "deepspeed": "Write sharding.strategy: zero2 is shard_grad_op, zero3 is full_shard",
    "per_gpu_train_batch_size": "Write per_device_train_batch_size",
    "per_gpu_eval_batch_size": "Write per_device_eval_batch_size",
    "adafactor": "Write optim: adafactor",
    "dataloader_drop_last": "Leave it out",
    "data_seed": "Write seed",
}

# Words of Hugging Face for a choice of ours, which none of our words means.
LATER_SCHEDULES = frozenset(
    {
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "greedy",
    }
)
# What optimizers ask of a rank that it does not have, by a part of their names.
_WHOLE = "it needs whole matrices; of these adafactor and muon are there"
_BLOCKS = "it scales blocks of a tensor together; of these adamw_bnb_8bit is there"
OPTIMIZERS_ASK: Mapping[str, str] = {
    "8bit": _BLOCKS,
    "4bit": _BLOCKS,
    "adafactor": _WHOLE,
    "galore": _WHOLE,
    "apollo": _WHOLE,
}
LATER_OPTIMIZERS = frozenset(
    {
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "adamw_apex_fused",
        "adamw_anyprecision",
        "adamw_torch_4bit",
        "adamw_torch_8bit",
        "ademamix",
        "adagrad",
        "ademamix_8bit",
        "lion_8bit",
        "lion_32bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "paged_ademamix_32bit",
        "paged_ademamix_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "rmsprop",
        "rmsprop_bnb",
        "rmsprop_bnb_8bit",
        "rmsprop_bnb_32bit",
        "galore_adamw",
        "galore_adamw_8bit",
        "galore_adafactor",
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "galore_adafactor_layerwise",
        "lomo",
        "adalomo",
        "grokadamw",
        "schedule_free_radam",
        "schedule_free_adamw",
        "schedule_free_sgd",
        "apollo_adamw",
        "apollo_adamw_layerwise",
        "stable_adamw",
    }
)
