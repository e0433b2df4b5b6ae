"""axolotl's YAML: model, data, training and fsdp_config or deepspeed in one file."""

from __future__ import annotations

from typing import cast

from fullshard.config.dialects.accelerate import FSDP, VERSION
from fullshard.config.dialects.mesh import axes
from fullshard.config.dialects.rules import (
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    each,
    is_auto,
    is_empty,
    is_neutral,
    lost,
    mapping_of,
    no_effect,
    not_yet,
    refused,
    to,
    translated,
    unless,
)
from fullshard.config.dialects.trainer import FLAT, lora_keys
from fullshard.config.fields import Rejected, means_same, to_number


def _times_an_epoch(kind: str) -> Rule:
    """Converts `evals_per_epoch: 2` to a fraction of all steps."""

    @unless(0)
    def rule(value: object, said: Said) -> Meaning:
        if kind == "save" and value == 1:
            return translated({"training.save_strategy": "epoch"})
        times, all_epochs = to_number(value), to_number(said.get("num_epochs")) or 1
        if times is None or times <= 0:
            raise Rejected("a number > 0")
        share = min(1 / (times * all_epochs), 0.999)
        return translated({f"training.{kind}_steps": share}, "as a share of all steps")

    return rule


def _precision(name: str) -> Rule:
    @unless(False)
    def rule(value: object, _: Said) -> Meaning:
        if is_auto(value):
            return translated({f"training.{name}": True}, "axolotl checks the GPU; here it is on")
        return translated({f"training.{name}": value})

    return rule


@unless()
def _datasets(value: object, _: Said) -> Meaning:
    members = cast("list[object]", value) if isinstance(value, list) else [value]
    entry = mapping_of(members[0])
    if is_empty(entry.get("path")):
        raise Rejected("a list of mappings with path")
    why = "as plain text" + (", the first of the list" if len(members) > 1 else "")
    if entry.get("type") not in (None, "completion", "pretrain"):
        why += "; `fullshard sft` reads conversations, by their columns"
    values: dict[str, object] = {"data.path": entry["path"]}
    for name in ("field", "text_column"):
        if not is_empty(entry.get(name)):
            values["data.text_column"] = entry[name]
    return translated(values, why)


@unless("", False)
def _adapter(value: object, said: Said) -> Meaning:
    """Reads axolotl's adapter type."""
    if means_same(value, "lora"):
        return translated({"lora.r": 16 if is_empty(said.get("lora_r")) else said["lora_r"]})
    raise refused(value, "Write lora, or leave it out")


def _packing(value: object, _: Said) -> Meaning:
    if is_neutral(value, (False,)):
        return Meaning(Status.NO_EFFECT, "plain text is always packed, conversations are not")
    return translated({"sft.packing": value})


# The Trainer's names that axolotl shares.
_SHARED = """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm max_steps
    warmup_steps warmup_ratio logging_steps eval_steps eval_strategy evaluation_strategy save_steps
    save_strategy save_total_limit save_only_model save_safetensors seed output_dir ddp_timeout
    ddp_find_unused_parameters gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs activation_offloading group_by_length torch_compile
    label_smoothing_factor neftune_noise_alpha hub_model_id hub_strategy remove_unused_columns
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor report_to run_name
    auto_find_batch_size load_best_model_at_end resume_from_checkpoint
"""

AXOLOTL: Table = {
    **{name: FLAT[name] for name in _SHARED.split()},
    "base_model": to("model.name_or_path"),
    "base_model_config": no_effect("config.json of base_model is read"),
    "tokenizer_config": to("data.tokenizer"),
    "model_type": no_effect("config.json of base_model says it"),
    "tokenizer_type": no_effect("the tokenizer's own files say it"),
    "processor_type": not_yet("Only text is trained on"),
    "trust_remote_code": to("model.trust_remote_code"),
    "reinit_weights": lost("give model.config for random weights", False),
    "micro_batch_size": to("training.per_device_train_batch_size"),
    "eval_batch_size": to("training.per_device_eval_batch_size"),
    "batch_size": not_yet("Write gradient_accumulation_steps"),
    "num_epochs": to("training.num_train_epochs"),
    "sequence_len": to("training.max_seq_length"),
    "optimizer": to("training.optim"),
    "lr_scheduler": to("training.lr_scheduler_type"),
    "cosine_min_lr_ratio": lost("the cosine ends at zero", 0),
    "val_set_size": to("data.validation_fraction"),
    "evals_per_epoch": _times_an_epoch("eval"),
    "saves_per_epoch": _times_an_epoch("save"),
    **each(_precision("bf16"), "bf16 bfloat16"),
    **each(_precision("fp16"), "fp16 float16"),
    "tf32": _precision("tf32"),
    **each(_datasets, "datasets pretraining_dataset"),
    "test_datasets": lost("data.validation_fraction holds text out"),
    "dataset_prepared_path": no_effect("tokens lie in the run's folder"),
    "dataset_processes": no_effect("data is read once"),
    "shuffle_merged_datasets": no_effect("training.seed orders the data", None),
    "skip_prepare_dataset": no_effect("data is always prepared"),
    "fsdp_version": VERSION,
    "fsdp_config": FSDP,
    "fsdp": FLAT["fsdp"],
    "deepspeed": FLAT["deepspeed"],
    **axes("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "expert_parallel_size"),
    **each(to("sharding.context", "", 1), "context_parallel_size sequence_parallel_degree"),
    "sample_packing": _packing,
    "eval_sample_packing": no_effect("held-out data is packed as the rest is"),
    "pad_to_sequence_len": no_effect("every sequence has all its tokens"),
    "train_on_inputs": lost("every token counts in the loss", True),
    "unfrozen_parameters": not_yet("Write freeze with the names of the others"),
    **each(
        lost("data is trained on as plain text", False),
        "special_tokens tokens eot_tokens chat_template chat_template_jinja",
        "default_system_message resize_token_embeddings_to_32x",
    ),
    **each(
        lost("the model's own kernels run", False, "sdpa", "eager"),
        "attn_implementation flash_attention sdp_attention xformers_attention flex_attention",
        "eager_attention use_kernels plugins liger_rope liger_rms_norm liger_rms_norm_gated",
        "liger_glu_activation liger_layer_norm liger_cross_entropy",
        "liger_fused_linear_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
    ),
    **each(
        lost("write report_to and project for a tracker", False),
        "wandb_project wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id",
        "wandb_mode use_wandb use_mlflow use_comet use_tensorboard mlflow_tracking_uri",
        "mlflow_experiment_name",
    ),
    **each(
        not_yet("Leave it out", False),
        "load_in_8bit load_in_4bit gptq qat rl trl lora_model_dir lora_modules_to_save",
        "lora_target_parameters",
    ),
    "adapter": _adapter,
    **lora_keys(lambda said: means_same(said.get("adapter"), "lora"), "adapter is not lora"),
    "lora_target_linear": no_effect("all linear layers, unless lora_target_modules names some"),
    "lora_fan_in_fan_out": no_effect("the layer's own layout decides"),
    "strict": no_effect("every key is checked"),
    "debug": no_effect("ranks always compare their collectives"),
    "early_stopping_patience": to("training.early_stopping_patience"),
    **each(
        lost("a run that diverges ends with exit code 9"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    "low_cpu_mem_usage": no_effect("every rank reads only its own part of the weights"),
    "save_first_step": lost("steps are saved as save_strategy says", False),
    "push_dataset_to_hub": not_yet("Leave it out"),
}
