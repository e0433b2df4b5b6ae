"""TrainingArguments one by one: python arguments_job.py ddp|sharded FOLDER [NAME ...].

Each case trains a small model for a few steps on the ranks that the script was started with, and
writes FOLDER/MODE/NAME.json: the log, metrics, names of files and the error, if any. The weights
lie in FOLDER/MODE/NAME/final. By hand, all cases:

    fullshard launch --nproc-per-node 2 tests/integrations/arguments_job.py ddp FOLDER
    fullshard launch --nproc-per-node 2 tests/integrations/arguments_job.py sharded FOLDER
    python tests/integrations/arguments_job.py compare FOLDER
"""

import concurrent.futures
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

NOT_COMPARED = ("runtime", "_per_second", "preparation_time", "_mem_", "init_mem")
OPTIMIZER_FILES = ("optimizer.pt", "scheduler.pt", "fullshard")

# Arguments of each case beside COMMON; what begins with "_" is for the script below.
COMMON = {
    "use_cpu": True, "dataloader_pin_memory": False, "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1,
    "max_grad_norm": 0.3, "seed": 3, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
    "lr_scheduler_type": "linear", "weight_decay": 0.1, "ddp_timeout": 300,
}  # fmt: skip
SAVING = {"save_strategy": "steps", "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {**SAVING, **EVALUATING, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=2"}
CASES: dict[str, dict[str, Any]] = {
    "common": {},
    "output_dir": {},
    "per_device_train_batch_size": {"per_device_train_batch_size": 2},
    "num_train_epochs": {"max_steps": -1, "num_train_epochs": 1.25},
    "max_steps": {"max_steps": 3},
    "learning_rate": {"learning_rate": 1e-3},
    **{
        f"lr_scheduler_type={kind}": {"lr_scheduler_type": kind, **more}
        for kind, more in {
            "cosine": {}, "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "polynomial": {}, "constant": {}, "constant_with_warmup": {"warmup_steps": 2},
            "inverse_sqrt": {"warmup_steps": 2}, "reduce_lr_on_plateau": EVALUATING,
            "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
            "warmup_stable_decay": {"warmup_steps": 1,
                                    "lr_scheduler_kwargs": {"num_decay_steps": 2}},
            "greedy": EVALUATING,
        }.items()
    },
    "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial",
                            "lr_scheduler_kwargs": {"power": 2.0}},
    "warmup_steps": {"warmup_steps": 2},
    "warmup_steps=0.5": {"warmup_steps": 0.5},
    **{
        f"optim={kind}": {"optim": kind}
        for kind in (
            "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
            "adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix",
            "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit",
            "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
            "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb",
            "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "lomo", "adalomo", "grokadamw",
            "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw",
        )
    },
    **{
        f"optim={kind}": {"optim": kind, **LOW_RANK}
        for kind in (
            "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw",
            "apollo_adamw_layerwise",
        )
    },
    "optim_args": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
    "optim_target_modules": {"optim": "galore_adamw", **LOW_RANK},
    "weight_decay": {"weight_decay": 0.5},
    "adam_beta1": {"adam_beta1": 0.5},
    "adam_beta2": {"adam_beta2": 0.9},
    "adam_epsilon": {"adam_epsilon": 1e-3},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "max_grad_norm=0": {"max_grad_norm": 0},
    "label_smoothing_factor": {"label_smoothing_factor": 0.2},
    "bf16": {"bf16": True, "_dtype": "float32"},
    "fp16": {"fp16": True, "_dtype": "float32"},
    "bf16_full_eval": {"bf16_full_eval": True, "_dtype": "float32", **EVALUATING},
    "bf16_full_eval, evaluate alone": {"bf16_full_eval": True, "_dtype": "float32",
                                       "_only": "eval"},
    "fp16_full_eval": {"fp16_full_eval": True, "_dtype": "float32", **EVALUATING},
    "tf32": {"tf32": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "activation_checkpointing_kwargs": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    "activation_checkpointing_kwargs offload": {
        "activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True},
    },
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "gradient_checkpointing_kwargs": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "torch_compile": {"torch_compile": True, "_dtype": "float32"},
    "torch_compile_backend": {"torch_compile_backend": "aot_eager"},
    "torch_compile_mode": {"torch_compile_mode": "default", "torch_compile_backend": "eager"},
    "use_cache": {"use_cache": True, **EVALUATING},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 1},
    "auto_find_batch_size": {"auto_find_batch_size": True, "_most_rows": 2},
    "logging_strategy": {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1.0},
    "logging_steps": {"logging_steps": 2},
    "logging_first_step": {"logging_steps": 3, "logging_first_step": True},
    "log_on_each_node": {"log_on_each_node": False},
    "logging_nan_inf_filter": {"logging_nan_inf_filter": False},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "all"},
    "include_num_input_tokens_seen=non_padding": {"include_num_input_tokens_seen": "non_padding"},
    "log_level": {"log_level": "error"},
    "log_level_replica": {"log_level_replica": "error"},
    "disable_tqdm": {"disable_tqdm": False},
    "report_to": {"report_to": ["tensorboard"]},
    "run_name": {"run_name": "a"},
    "project": {"project": "a"},
    "trackio_space_id": {"trackio_space_id": "a"},
    "trackio_bucket_id": {"trackio_bucket_id": "a"},
    "trackio_static_space_id": {"trackio_static_space_id": "a"},
    "eval_strategy": {"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1.0},
    "eval_steps": EVALUATING,
    "eval_delay": {**EVALUATING, "eval_steps": 1, "eval_delay": 2},
    "per_device_eval_batch_size": {"per_device_eval_batch_size": 3},
    "prediction_loss_only": {"prediction_loss_only": True},
    "eval_on_start": {**EVALUATING, "eval_on_start": True},
    "eval_do_concat_batches": {"eval_do_concat_batches": False},
    "eval_use_gather_object": {"eval_use_gather_object": True},
    "eval_accumulation_steps": {"eval_accumulation_steps": 1},
    "include_for_metrics": {"include_for_metrics": ["inputs", "loss"]},
    "batch_eval_metrics": {"batch_eval_metrics": True},
    "save_only_model": {**SAVING, "save_only_model": True},
    "save_only_model, best": {**BEST, "save_only_model": True},
    "save_strategy": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1.0},
    "save_strategy=best": {"save_strategy": "best", **EVALUATING, "metric_for_best_model": "loss"},
    "save_steps": SAVING,
    "save_on_each_node": {**SAVING, "save_on_each_node": True},
    "save_total_limit": {**SAVING, "save_steps": 1, "save_total_limit": 2},
    "save_total_limit=1": {**BEST, "save_steps": 2, "save_total_limit": 1, "learning_rate": 0.3},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "push_to_hub": {"push_to_hub": True, "hub_model_id": "me/tiny", **SAVING},
    "hub_token": {"push_to_hub": True, "hub_model_id": "me/tiny", "hub_token": "none"},
    "hub_private_repo": {"push_to_hub": True, "hub_model_id": "me/tiny", "hub_private_repo": True},
    "hub_model_id": {"push_to_hub": True, "hub_model_id": "me/other"},
    "hub_strategy": {"push_to_hub": True, "hub_model_id": "me/tiny", "hub_strategy": "checkpoint",
                     **SAVING},
    "hub_always_push": {"push_to_hub": True, "hub_model_id": "me/tiny", "hub_always_push": True,
                        **SAVING},
    "hub_revision": {"push_to_hub": True, "hub_model_id": "me/tiny", "hub_revision": "other"},
    "load_best_model_at_end": {**BEST, "learning_rate": 0.3},
    "metric_for_best_model": {**BEST, "metric_for_best_model": "accuracy"},
    "greater_is_better": {**BEST, "metric_for_best_model": "accuracy", "greater_is_better": False},
    "ignore_data_skip": {**SAVING, "ignore_data_skip": True, "_resume": True},
    "restore_callback_states_from_checkpoint": {
        **BEST, "restore_callback_states_from_checkpoint": True, "_resume": True, "_stop": True},
    "full_determinism": {"full_determinism": True},
    "seed": {"seed": 11},
    "data_seed": {"data_seed": 5},
    "accelerator_config split_batches": {"accelerator_config": {"split_batches": True}},
    "accelerator_config dispatch_batches": {"accelerator_config": {"dispatch_batches": True},
                                            "_iterable": True},
    "accelerator_config use_seedable_sampler": {
        "accelerator_config": {"use_seedable_sampler": False}},
    "accelerator_config non_blocking": {"accelerator_config": {"non_blocking": True}},
    "accelerator_config sync_each_batch": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "gradient_accumulation_steps": 2},
    "accelerator_config num_steps": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "parallelism_config": {"_parallelism": {"dp_shard_size": 2}},
    "parallelism_config tp": {"_parallelism": {"tp_size": 2}},
    "parallelism_config cp": {"_parallelism": {"cp_size": 2}},
    "dataloader_drop_last": {"dataloader_drop_last": True, "max_steps": -1,
                             "num_train_epochs": 1.0},
    "dataloader_num_workers": {"dataloader_num_workers": 1},
    "dataloader_pin_memory": {"dataloader_pin_memory": True},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1,
                                      "dataloader_persistent_workers": True},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    "dataloader_multiprocessing_context": {"dataloader_num_workers": 1,
                                           "dataloader_multiprocessing_context": "fork"},
    "dataloader_in_order": {"dataloader_num_workers": 1, "dataloader_in_order": False},
    "remove_unused_columns": {"remove_unused_columns": False},
    "label_names": {"label_names": ["labels"]},
    "train_sampling_strategy=sequential": {"train_sampling_strategy": "sequential"},
    "train_sampling_strategy=group_by_length": {"train_sampling_strategy": "group_by_length"},
    "length_column_name": {"train_sampling_strategy": "group_by_length",
                           "length_column_name": "how_long"},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": True, "_unused": True},
    "ddp_bucket_cap_mb": {"ddp_bucket_cap_mb": 1},
    "ddp_broadcast_buffers": {"ddp_broadcast_buffers": True},
    "ddp_static_graph": {"ddp_static_graph": True},
    "ddp_backend": {"ddp_backend": "gloo"},
    "ddp_timeout": {"ddp_timeout": 50},
    "fsdp": {"fsdp": True, "_ours": True},
    "fsdp_config": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}, "_ours": True},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "debug": {"debug": "underflow_overflow"},
    "skip_memory_metrics": {"skip_memory_metrics": False},
    "do_train": {"do_train": True},
    "do_eval": {"do_eval": True},
    "do_predict": {"do_predict": True},
    "resume_from_checkpoint": {**SAVING, "_resume": True},
    "resume_from_checkpoint, accumulation": {**SAVING, "_resume": True,
                                             "gradient_accumulation_steps": 2},
    "resume_from_checkpoint, fp16": {**SAVING, "_resume": True, "fp16": True,
                                     "_dtype": "float32"},
    "resume_from_checkpoint, adafactor": {**SAVING, "_resume": True, "optim": "adafactor"},
    "resume_from_checkpoint, schedule": {**SAVING, **EVALUATING, "_resume": True,
                                         "lr_scheduler_type": "reduce_lr_on_plateau"},
    "local_rank": {},
    "packed rows (DataCollatorWithFlattening)": {"_packed": True},
    "sortish_sampler": {"sortish_sampler": True, "_t5": True},
    "predict_with_generate": {"predict_with_generate": True, "_t5": True, **EVALUATING},
    "generation_max_length": {"predict_with_generate": True, "generation_max_length": 6,
                              "_t5": True},
    "generation_num_beams": {"predict_with_generate": True, "generation_num_beams": 2,
                             "_t5": True},
    "generation_config": {"predict_with_generate": True, "_t5": True, "_generation": True},
    # Last: they change classes of transformers.
    "use_liger_kernel": {"use_liger_kernel": True},
    "liger_kernel_config": {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}},
}  # fmt: skip


class Stop(transformers.EarlyStoppingCallback):
    """A callback with a state in checkpoints."""


class Seen(TrainerCallback):
    """The names of the callbacks that were called, each once, in order."""

    def __init__(self):
        self.names = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in self.names:
            self.names.append(name)
        return super().__getattribute__(name)


class Hub:
    """Stands for the hub, which no test may call: what would be sent there, in order."""

    def __init__(self):
        self.sent = []

    def create_repo(self, name, **more):
        self.sent.append(["create", name, more["private"]])
        return types.SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id, folder_path, revision, commit_message, **more):
        names = sorted(path.name for path in Path(folder_path).iterdir())
        unlike = (
            *OPTIMIZER_FILES,
            "checkpoint-",
            "rng_state_1",
        )  # rank 0 waits for no other's file
        kept = [name for name in names if not name.startswith(unlike)]
        self.sent.append([repo_id, commit_message, revision, more.get("path_in_repo"), kept])
        done = concurrent.futures.Future()
        done.set_result(None)
        return done


def t5():
    """Its answers end at different lengths."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(vocab_size=96, **sizes, dropout_rate=0.0, **tokens)
    found = transformers.T5ForConditionalGeneration(config).double()
    with torch.no_grad():
        for param in found.parameters():
            param.mul_(3)
    found.generation_config.eos_token_id = list(range(1, 24))
    return found


def model(case):
    torch.manual_seed(0)
    if case.get("_t5"):
        return t5()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=96, **sizes, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    kind = Narrow if "_most_rows" in case else LlamaForCausalLM
    found = kind(config).to(getattr(torch, case.get("_dtype", "float64")))
    if case.get("_unused"):
        found.spare = nn.Linear(8, 8, dtype=torch.float64)
    return found


class Narrow(LlamaForCausalLM):
    """Runs out of memory with more rows than two, as a device would."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **more):
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.")
        return super().forward(input_ids, attention_mask, labels=labels, **more)


def rows(case):
    """Ragged labels; 41 of them, so that the last batch is short."""
    generator = torch.Generator().manual_seed(1)
    for at in range(41):
        tokens = torch.randint(3, 96, (16,), generator=generator).tolist()
        yield {
            "input_ids": tokens, "attention_mask": [1] * (16 - at % 3) + [0] * (at % 3),
            "labels": [-100] * (at % 7) + tokens[at % 7 :], "how_long": 16 - at % 5,
        }  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, case):
        self.case = case

    def __iter__(self):
        return rows(self.case)


def collate(batch):
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.tensor([row[name] for row in batch]) for name in names}


def accuracy(seen, compute_result=True):
    predictions, labels = seen.predictions, seen.label_ids
    if not isinstance(predictions, list):
        predictions, labels = [predictions], [labels]
    right = all_of_them = 0
    for scores, wanted in zip(predictions, labels, strict=True):
        scores, wanted = torch.as_tensor(scores), torch.as_tensor(wanted)
        known = wanted[:, 1:] != -100
        right += int(((scores[:, :-1].argmax(-1) == wanted[:, 1:]) & known).sum())
        all_of_them += int(known.sum())
    more = {"inputs": float(torch.as_tensor(seen.inputs).sum())} if seen.inputs is not None else {}
    if seen.losses is not None and not compute_result:
        more["losses"] = float(torch.as_tensor(seen.losses).sum())
    return {"accuracy": right / all_of_them, "labels": all_of_them, **more}


def lengths(seen):
    return {"lengths": [int((row > 0).sum()) for row in seen.predictions]}


def metrics_of(case):
    if case.get("predict_with_generate"):
        return lengths
    return None if case.get("_packed") or case.get("_t5") else accuracy


def trainer_of(mode, case):
    kind = transformers.Seq2SeqTrainer if case.get("_t5") else transformers.Trainer
    if mode == "ddp":
        return kind
    from fullshard.integrations.transformers import sharded

    return sharded(kind)


def settings(case, folder, mode):
    given = {k: v for k, v in case.items() if not k.startswith("_")}
    if mode == "ddp" and case.get("_ours"):
        given = {}
    if "_parallelism" in case:
        from accelerate import ParallelismConfig

        given["parallelism_config"] = ParallelismConfig(**case["_parallelism"])
    if case.get("_generation"):
        given["generation_config"] = transformers.GenerationConfig(
            max_length=5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=[1, 2, 3]
        )
    kind = transformers.Seq2SeqTrainingArguments if case.get("_t5") else TrainingArguments
    return kind(output_dir=str(folder), **{**COMMON, **given})


def train(mode, case, folder, resume=None):
    data = list(rows(case))
    seen, hub = Seen(), Hub()
    transformers.trainer.hf_api = lambda: hub
    if case.get("_packed"):
        data = [{name: row[name] for name in ("input_ids", "labels")} for row in data]
    packed = transformers.DataCollatorWithFlattening()
    trainer = trainer_of(mode, case)(
        model=model(case), args=settings(case, folder, mode),
        train_dataset=Stream(case) if case.get("_iterable") else data, eval_dataset=data[:13],
        compute_metrics=metrics_of(case),
        data_collator=packed if case.get("_packed") else collate,
        callbacks=[seen, *([Stop(3)] if case.get("_stop") else [])],
    )  # fmt: skip
    if case.get("_only") != "eval":
        trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    history = trainer.state.log_history
    trainer.save_model(str(folder / "final"))
    return {
        "history": [clean(row) for row in history],
        "metrics": clean(metrics),
        "parameters": trainer.get_num_trainable_parameters(),
        "tokens": trainer.state.num_input_tokens_seen,
        "best": trainer.state.best_metric,
        "callbacks": seen.names,
        "hub": hub.sent,
    }


def clean(row):
    kept = {k: v for k, v in row.items() if not any(word in k for word in NOT_COMPARED)}
    return {k: float(v) if isinstance(v, int | float) else v for k, v in kept.items()}


def files_of(folder):
    """Names in the folder of a run; those of the optimizer's state differ."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kept = [name for name in found if not any(part in name for part in OPTIMIZER_FILES)]
    return sorted(name for name in kept if "runs/" not in name and "events.out" not in name)


def run(mode, folder, name):
    case = CASES[name]
    torch._dynamo.reset()
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        found["run"] = train(mode, case, folder)
        if case.get("_resume"):
            found["resumed"] = train(mode, case, folder, str(folder / "checkpoint-2"))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        if os.environ.get("TRACE"):
            raise
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def slug(name):
    return "".join(c if c.isalnum() else "-" for c in name)


def main(mode, folder, names):
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    for name in names or CASES:
        if name not in CASES:
            continue
        found = run(mode, folder / mode / slug(name), name)
        torch.distributed.barrier()
        found["files"] = files_of(folder / mode / slug(name))
        if os.environ["RANK"] == "0":
            (folder / mode).mkdir(parents=True, exist_ok=True)
            (folder / mode / f"{slug(name)}.json").write_text(json.dumps(found))
            print(name, found.get("error", "")[:150], found["seconds"], file=sys.stderr, flush=True)


# ---- comparing


def difference(one, other):
    """The largest relative difference of two results of one structure; None: not alike."""
    if type(one) is not type(other):
        return None
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return None
        return worst(difference(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        if len(one) != len(other):
            return None
        return worst(map(difference, one, other))
    if isinstance(one, float):
        if one == other or (one != one and other != other):
            return 0.0
        return abs(one - other) / max(abs(one), abs(other))
    return 0.0 if one == other else None


def worst(found):
    found = list(found)
    return None if None in found else max(found, default=0.0)


def weights_of(folder):
    file = folder / "final" / "model.safetensors"
    return load_file(file) if file.exists() else {}


def compare(folder, name):
    """(verdict, largest difference of logs and metrics, of weights) of a case."""
    theirs, ours = (
        json.loads((folder / mode / f"{slug(name)}.json").read_text())
        for mode in ("ddp", "sharded")
    )
    if "error" in theirs or "error" in ours:
        if theirs.get("error") == ours.get("error"):
            return f"the same error: {ours['error']}", None, None
        return f"DDP {theirs.get('error', 'trains')} | ours {ours.get('error', 'trains')}", 9, 9
    for one in (theirs, ours):
        one.pop("seconds")
    logs = worst([difference(theirs[k], ours[k]) for k in ("run", "resumed") if k in theirs])
    mine, wanted = (weights_of(folder / mode / slug(name)) for mode in ("sharded", "ddp"))
    weights = None
    if mine.keys() == wanted.keys():
        weights = worst(float((mine[k].double() - wanted[k].double()).abs().max()) for k in wanted)
    verdict = "ran"
    if theirs["files"] != ours["files"]:
        odd = set(theirs["files"]) ^ set(ours["files"])
        verdict = f"files differ: {sorted(odd)[:4]}"
    return verdict, logs, weights


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        for case in sys.argv[3:] or CASES:
            verdict, logs, weights = compare(Path(sys.argv[2]), case)
            print(f"{case:50} {logs!s:24.24} {weights!s:24.24} {verdict[:400]}")
    else:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
