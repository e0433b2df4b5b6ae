"""Values that are valid but not supported by an engine yet, or known to cause trouble.

`check_supported` refuses the former before any rank starts. `findings` lists the latter for
`fullshard config lint`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.fields import Section
from fullshard.config.regular_files import packaged_table
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.sharding import Offload
from fullshard.config.values import (
    BY_OWNER,
    Backend,
    ConfigProblems,
    DistillLoss,
    DType,
    GradSync,
    IntervalStrategy,
    LrSchedule,
    Optimizer,
    Problem,
    Recompute,
    RecomputeKind,
    Strategy,
    TransportKind,
    WrapKind,
    join_key,
    show,
)

# Fields of a section: advice until they are supported, and the unsupported values (if none are
# listed, all but the default).
Rows = Mapping[str, tuple[object, ...]]

_DEEP = 4  # gathering more units ahead hides no more time

_NAMED: Rows = {"strategy": ("Name the strategy", Strategy.AUTO)}
_TORCH: Rows = {"activation_checkpointing": ("Use block", Recompute(RecomputeKind.OFFLOAD))}
_TRAINED: Rows = {  # no scaler unscales these; a teacher's weights may be in float16
    "master_dtype": ("Use float32 or bfloat16", DType.FLOAT16)
}
_OF_RUNS: Rows = {
    "context": ("Call fs.divide_sequences(model, N) before fs.shard, and leave it out",)
}
_XLA: Rows = {
    **_NAMED,
    "strategies": ("Write one strategy",),
    "offload": ("Use activation_checkpointing: offload",),
    **dict.fromkeys(
        ("ignore", "buffer_dtype", "output_dtype", "symmetric_memory"), ("Leave it out",)
    ),
    "grad_sync": (f"Use {GradSync.EVERY_MICRO_BATCH}",),
    **_TRAINED,
    **dict.fromkeys(("param_dtype", "reduce_dtype"), ("Use bfloat16", DType.FLOAT16)),
    "transport": ("Use auto",),
    "context": ("Use shard for these ranks, or backend: torch",),
}
_XLA_TRAINING: Rows = {
    "optim": ("Use adamw_torch or sgd, or backend: torch", *BY_OWNER),
    **dict.fromkeys(("ema_decay", "max_skipped_steps", "matmul_precision"), ("Leave it out",)),
    "per_device_train_batch_size": ("Write a number", 0),
}
_XLA_DECODER: Rows = {**_XLA, "fp32_modules": ("Leave it out, or use backend: torch",)}
_XLA_RUN: Rows = {"lora": ("Leave it out, or use backend: torch",)}


def check_supported(
    config: RunConfig | ShardConfig,
    *,
    planning: bool = False,
    launch: LaunchEnvironment | None = None,
    backend: Backend = Backend.TORCH,
) -> None:
    """Refuses values that an engine does not support yet.

    Args:
        config: a whole configuration, or the sharding of a user's model.
        planning: whether only a plan is made, which supports more than a run.
        launch: how this process was launched; None if fullshard starts the ranks, which works on
            one machine only.
        backend: the engine for a user's model.

    Raises:
        ConfigError: Lists every value that is not supported yet.
    """
    if isinstance(config, ShardConfig):
        rows = _XLA if backend is Backend.JAX else {**_NAMED, **_TORCH, **_OF_RUNS}
        problems = list(unsupported(config, rows))
    else:
        problems = list(_of_run(config))
        problems += [] if planning else _of_machine(config, launch)
    if problems:
        raise ConfigProblems(problems)


def unsupported(
    section: Section, rows: Rows, prefix: str = "", where: str = ""
) -> Iterator[Problem]:
    """The problems of a section's unsupported values.

    Args:
        section: the section.
        rows: its fields that are not fully supported.
        prefix: dotted key of the section.
        where: the condition, in words: `with backend: jax `.
    """
    for name, (instead, *values) in rows.items():
        value = getattr(section, name)
        if value in values if values else value != type(section).model_fields[name].default:
            shown = show(section.to_dict()[name])
            got = f"{shown} {where}is not yet supported"
            yield Problem(join_key(prefix, name), "", got, str(instead))


def _of_run(config: RunConfig) -> Iterator[Problem]:
    """Values that neither a plan nor a run supports."""
    if config.backend is Backend.JAX:
        yield from unsupported(config.sharding, _XLA_DECODER, "sharding")
        yield from unsupported(config.training, _XLA_TRAINING, "training")
        yield from unsupported(config, _XLA_RUN)
    else:
        yield from unsupported(config.sharding, {**_TORCH, **_TRAINED}, "sharding")
    if config.training.optim in BY_OWNER and config.sharding.offload is not None:
        got = f"together with optim: {config.training.optim} is not yet supported"
        yield Problem("sharding.offload", "", got, "Leave one of the two out")


def _of_machine(config: RunConfig, launch: LaunchEnvironment | None) -> Iterator[Problem]:
    """Values that this machine does not support."""
    folder = (config.sharding.offload or Offload()).folder
    if folder is not None and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        advice = "Create it on every machine, on a disk with enough space"
        yield Problem("sharding.offload.folder", "a folder to write to", show(folder), advice)
    if config.sharding.transport is TransportKind.FAKE:
        advice = "It moves no data between ranks; it is for plans and tests"
        yield Problem("sharding.transport", "a real transport", "'fake'", advice)
    if config.launch.num_machines > 1 and launch is None:
        got = f"{config.launch.num_machines} without a launcher is not yet supported"
        advice = (
            "On every machine, start this command with torchrun or srun, or as `fullshard launch "
            "--nnodes ... -m fullshard ...`"
        )
        yield Problem("launch.num_machines", "", got, advice)


# ---- keys that have no effect beside others ------------------------------------------------------

_NO, _STEPS, _FLAT = IntervalStrategy.NO, IntervalStrategy.STEPS, LrSchedule.CONSTANT
_WITHOUT_BETAS = (Optimizer.SGD, Optimizer.ADAFACTOR)
_WHOLE_IN_BACKWARD = (Strategy.NO_SHARD, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD_ZERO2)
_DIRECT = (TransportKind.DIRECT, TransportKind.SHARED)
_WIDE = {None, DType.FLOAT32, DType.FLOAT64}
_OF_UNITS = "wrap wrap_min_params forward_prefetch backward_prefetch poison reduction"
_BETAS, _WARMUP = "adam_beta1 adam_beta2 adam_epsilon", "warmup_steps warmup_ratio"
_MEETING = "main_process_ip main_process_port"


def _takes_one_micro_batch(config: RunConfig) -> bool:
    training = config.training
    is_derived = training.train_batch_size is not None or training.leaves_micro_batch
    return training.gradient_accumulation_steps == 1 and not is_derived


def _has_strategy(config: RunConfig, *strategies: Strategy) -> bool:
    """Whether all units have one of these strategies, and no model or state another one."""
    other = config.distill and config.distill.teacher_strategy
    others = config.sharding.strategies or config.sharding.offload or other
    return config.sharding.strategy in strategies and not others


def _dtypes(config: RunConfig) -> set[DType | None]:
    return {config.sharding.param_dtype, config.sharding.master_dtype}


# Section, keys that have no effect, the key that decides so (".key": of this section), and when.
IDLE: tuple[tuple[str, str, str, Callable[[Any], object]], ...] = (
    ("model", "config.dtype config.torch_dtype", "sharding.master_dtype", lambda _: True),
    ("model", "config.architectures", ".config.model_type", lambda _: True),
    ("sharding", _OF_UNITS, "backend", lambda c: c.backend is Backend.JAX),
    ("sharding", "forward_prefetch", ".strategy", lambda c: _has_strategy(c, Strategy.NO_SHARD)),
    ("sharding", "backward_prefetch", ".strategy", lambda c: _has_strategy(c, *_WHOLE_IN_BACKWARD)),
    ("sharding", "grad_sync", "training.gradient_accumulation_steps", _takes_one_micro_batch),
    ("sharding", "reduction", ".transport", lambda c: c.sharding.transport in _DIRECT),
    ("sharding", "fp32_modules", ".param_dtype", lambda c: _dtypes(c) <= _WIDE),
    ("sharding", "grad_reduction", "a run", lambda _: True),
    ("sharding", "wrap_min_params", ".wrap", lambda c: c.sharding.wrap is not WrapKind.SIZE),
    ("training", _BETAS, ".optim", lambda c: c.training.optim in _WITHOUT_BETAS),
    ("training", _WARMUP, ".lr_scheduler_type", lambda c: c.training.lr_scheduler_type is _FLAT),
    ("training", "warmup_ratio", ".warmup_steps", lambda c: c.training.warmup_steps),
    ("training", "warmup_steps", ".warmup_ratio", lambda c: not c.training.warmup_steps),
    ("training", "save_steps", ".save_strategy", lambda c: c.training.saves is not _STEPS),
    ("training", "save_total_limit", ".save_strategy", lambda c: c.training.saves is _NO),
    ("training", "eval_steps", ".eval_strategy", lambda c: c.training.evaluates is not _STEPS),
    ("training", "num_train_epochs", ".max_steps", lambda c: c.training.max_steps > 0),
    ("training", "max_steps", ".num_train_epochs", lambda c: c.training.max_steps < 1),
    ("training", "project", ".report_to", lambda c: not c.training.report_to),
    ("training", "logging_dir", ".report_to", lambda c: "tensorboard" not in c.training.report_to),
    (
        "training",
        "loss_chunk_size",
        "distill.chunk_size",
        lambda c: c.distill and c.distill.chunk_size,
    ),
    ("data", "shuffle_buffer", ".streaming", lambda c: not c.data.streaming),
    ("data", "vocab_size", ".tokenizer", lambda c: c.data.tokenizer),
    ("sft", "sample_tokens", ".num_samples", lambda c: not c.sft.num_samples),
    ("sft", "sample_tokens", "backend", lambda c: c.backend is Backend.JAX),
    ("distill", "temperature", ".loss", lambda c: c.distill.loss is DistillLoss.HIDDEN),
    ("distill", "beta", ".loss", lambda c: c.distill.loss is not DistillLoss.JSD),
    ("launch", _MEETING, ".num_machines", lambda c: c.launch.num_machines == 1),
)


def idle(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The dotted key of each value that has no effect beside others, also of defaults, and why."""
    for section, keys, decider, is_idle in IDLE:
        if getattr(config, section) is not None and is_idle(config):
            by = f"{section}{decider}" if decider.startswith(".") else decider
            yield from ((f"{section}.{key}", f"{by} decides") for key in keys.split())


# ---- valid combinations that are known to cause trouble ------------------------------------------


def _is_sharded(config: RunConfig) -> bool:
    return config.sharding.strategy not in (Strategy.NO_SHARD, Strategy.AUTO)


_LAST = GradSync.LAST_MICRO_BATCH

# When a key is reported; findings.yaml has the reasons.
FINDINGS: Mapping[str, Callable[[RunConfig], object]] = {
    "sharding.wrap": lambda c: c.sharding.wrap is WrapKind.NONE and _is_sharded(c),
    "sharding.offload": lambda c: c.sharding.offload and c.sharding.strategy is Strategy.NO_SHARD,
    "sharding.master_dtype": lambda c: c.sharding.master_dtype is DType.BFLOAT16,
    "sharding.reduce_dtype": lambda c: c.sharding.reduce_dtype is DType.FLOAT16,
    "sharding.grad_sync": lambda c: c.sharding.grad_sync is _LAST and _is_sharded(c),
    "sharding.forward_prefetch": lambda c: c.sharding.forward_prefetch >= _DEEP and _is_sharded(c),
    "sharding.poison": lambda c: c.sharding.poison,
    "launch.num_processes": lambda c: c.launch.world_size == 1 and _is_sharded(c),
    "training.warmup_steps": lambda c: 1 <= c.training.max_steps <= c.training.warmup_steps,
    "training.learning_rate": lambda c: c.training.learning_rate == 0,
}


def findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The dotted key of each such value, with the reason or advice."""
    for key, why in packaged_table("fullshard.config", "findings.yaml").items():
        if FINDINGS[key](config):
            yield key, why
