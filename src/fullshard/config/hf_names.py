"""Hugging Face's names that may stand under `training:` and mean nothing, or not yet: one table.

Three generations are here: transformers 4.40, transformers 5.x, and TRL's SFTConfig. A name that is
not built yet takes the values that ask for what happens anyway, so that a file which spells out
defaults works; any other value is an error that says "not yet". A name without effect takes any
value, since no result depends on it. `config explain` has a line for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.config.dialects.rules import Rule, each, lost, no_effect, not_yet

_COMPILE = "the model runs without torch.compile"
_DEVICES = "CUDA_VISIBLE_DEVICES= hides accelerators, and is what decides"
_KERNELS = "the model's own kernels run"
_LATER = "Leave it out"
_UPDATES = "units are updated after backward, with the same result"
_REENTRANT = lost("recompute is never reentrant; its values are the same", {"use_reentrant": False})

NOT_YET: Mapping[str, Rule] = {
    **each(
        """
        auto_find_batch_size full_determinism bf16_full_eval fp16_full_eval use_ipex jit_mode_eval
        use_cache activation_offloading eval_on_start eval_use_gather_object do_predict
        include_inputs_for_metrics batch_eval_metrics predict_with_generate load_best_model_at_end
        save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip push_to_hub
        restore_callback_states_from_checkpoint hub_always_push sortish_sampler padding_free
        tpu_metrics_debug evaluate_during_training split_batches
        """,
        not_yet(_LATER, False),
    ),
    **each(
        """
        optim_target_modules neftune_noise_alpha torchdynamo eval_accumulation_steps optim_args
        metric_for_best_model greater_is_better generation_max_length generation_num_beams
        generation_config push_to_hub_model_id push_to_hub_organization push_to_hub_token hub_token
        hub_private_repo hub_model_id hub_revision dataloader_multiprocessing_context
        dispatch_batches label_names pad_to_multiple_of pad_token eos_token parallelism_config
        xpu_backend tpu_num_cores lr_scheduler_kwargs dataset_kwargs model_init_kwargs debug
        include_for_metrics sharded_ddp mp_parameters dataloader_drop_last shuffle_dataset
        num_of_sequences chars_per_token
        """,
        not_yet(_LATER, None),
    ),
    **each("do_train", not_yet(_LATER, True)),
    # eval_strategy decides, in Hugging Face's Trainer too
    **each("do_eval include_tokens_per_second prediction_loss_only", not_yet(_LATER, True, False)),
    **each("average_tokens_across_devices eval_do_concat_batches", not_yet(_LATER, True)),
    **each("dataloader_in_order eval_packing", not_yet(_LATER, True)),
    **each("fp16_backend half_precision_backend", not_yet(_LATER, "auto")),
    "fp16_opt_level": not_yet(_LATER, "O1"),
    "label_smoothing_factor": not_yet(_LATER, 0),
    "eval_delay": not_yet(_LATER, 0),
    "past_index": not_yet(_LATER, -1),
    "logging_strategy": not_yet(_LATER, "steps"),
    "include_num_input_tokens_seen": not_yet(_LATER, "no", False),
    "hub_strategy": not_yet(_LATER, "every_save"),
    "length_column_name": not_yet(_LATER, "length"),
    "train_sampling_strategy": not_yet(_LATER, "random"),
    "packing_strategy": not_yet(_LATER, "bfd"),
    "loss_type": not_yet(_LATER, "nll"),
    "ray_scope": not_yet(_LATER, "last"),
    # What we have under another name.
    "data_seed": not_yet("Write seed", None),
    "adafactor": not_yet("Write optim: adafactor", False),
    "per_gpu_train_batch_size": not_yet("Write per_device_train_batch_size", None),
    "per_gpu_eval_batch_size": not_yet("Write per_device_eval_batch_size", None),
    "fsdp": not_yet("Write sharding.strategy", False),
    "fsdp_config": not_yet("Write its keys under sharding", None),
    "fsdp_min_num_params": not_yet("Write sharding.wrap: size and sharding.wrap_min_params", 0),
    "fsdp_transformer_layer_cls_to_wrap": not_yet("Write sharding.wrap with the class names", None),
    "deepspeed": not_yet(
        "Write sharding.strategy: zero2 is shard_grad_op, zero3 is full_shard", None
    ),
}

WITHOUT_EFFECT: Mapping[str, Rule] = {
    "overwrite_output_dir": no_effect(
        "an older finished run in output_dir is moved aside, never overwritten"
    ),
    **each("use_cpu no_cuda", lost(_DEVICES, False)),
    "use_mps_device": lost("Apple's GPUs are not used", False),
    "skip_memory_metrics": no_effect("metrics.jsonl has the memory of every step"),
    **each("optimizer_in_backward optimizer_in_bwd", lost(_UPDATES, False)),
    "torch_compile": lost(_COMPILE, False),
    **each("torch_compile_backend torch_compile_mode", lost(_COMPILE, None)),
    "use_liger_kernel": lost(_KERNELS, False),
    "liger_kernel_config": lost(_KERNELS, None),
    **each("gradient_checkpointing_kwargs activation_checkpointing_kwargs", _REENTRANT),
    "torch_empty_cache_steps": lost("the plan's buffers are never given back", None),
    # ---- logging ----
    **each(
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        lost("trackio shows its own machine's runs", None),
    ),
    "logging_first_step": no_effect("the first step is always printed"),
    "logging_nan_inf_filter": lost("a loss that is no number ends the run", False),
    "log_on_each_node": no_effect("rank 0 prints, and every rank has a log"),
    **each(
        "log_level log_level_replica disable_tqdm",
        no_effect("the loop prints a line a step, on rank 0"),
    ),
    # ---- data and saving ----
    "save_safetensors": lost("weights are always safetensors", True),
    **each(
        """
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor
        """,
        no_effect("batches are cut from an array of tokens: there is nothing for workers to do"),
    ),
    "group_by_length": no_effect("the examples of a step are dealt out by their length"),
    "remove_unused_columns": no_effect("only the column of the text is read"),
    **each(
        "dataset_num_proc dataset_batch_size",
        no_effect("data is read once, before the ranks start"),
    ),
    # ---- processes ----
    "accelerator_config": lost("every rank reads its own part of each batch", {}),
    "ddp_backend": no_effect("the device decides: nccl or gloo"),
    **each(
        """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
        """,
        no_effect("units take the place of DDP's buckets"),
    ),
    "local_rank": no_effect("the launcher says it"),
}
