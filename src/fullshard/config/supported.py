"""Values that are valid but not supported by an engine yet, or known to cause trouble.

`check_supported` refuses the former before any rank starts. `findings` lists the latter for
`fullshard config lint`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.fields import Section
from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.sharding import Offload
from fullshard.config.training import TrainingConfig
from fullshard.config.values import (
    BY_OWNER,
    Backend,
    DType,
    GradSync,
    IntervalStrategy,
    LrSchedule,
    Recompute,
    RecomputeKind,
    Strategy,
    Transport,
    WrapKind,
)

# Fields of a section: advice until they are supported, and the unsupported values (if none are
# listed, all but the default).
Rows = Mapping[str, tuple[object, ...]]

_DEEP = 4  # gathering more units ahead hides no more time

_NAMED: Rows = {"strategy": ("Name the strategy", Strategy.AUTO)}
_TORCH: Rows = {"activation_checkpointing": ("Use block", Recompute(RecomputeKind.OFFLOAD))}
_OF_RUNS: Rows = {
    "context": ("Call fs.divide_sequences(model, N) before fs.shard, and leave it out",)
}
_XLA: Rows = {
    **_NAMED,
    "strategies": ("Write one strategy",),
    "offload": ("Leave it out: activation_checkpointing: offload is there",),
    **dict.fromkeys(
        ("ignore", "buffer_dtype", "output_dtype", "symmetric_memory"), ("Leave it out",)
    ),
    "grad_sync": (f"Use {GradSync.EVERY_MICRO_BATCH}",),
    "param_dtype": ("Use bfloat16", DType.FLOAT16),
    "transport": ("Use auto",),
    "context": ("Use shard for these ranks, or backend: torch",),
}
_XLA_TRAINING: Rows = {
    "optim": ("Use adamw_torch or sgd, or backend: torch", *BY_OWNER),
    **dict.fromkeys(("ema_decay", "max_skipped_steps", "matmul_precision"), ("Leave it out",)),
    "per_device_train_batch_size": ("Write a number", 0),
}
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
        yield from unsupported(config.sharding, _XLA, "sharding")
        yield from unsupported(config.training, _XLA_TRAINING, "training")
        yield from unsupported(config, _XLA_RUN)
    else:
        yield from unsupported(config.sharding, _TORCH, "sharding")
    if config.training.optim in BY_OWNER and config.sharding.offload is not None:
        got = f"together with optim: {config.training.optim} is not yet supported"
        yield Problem("sharding.offload", "", got, "Leave one of the two out")


def _of_machine(config: RunConfig, launch: LaunchEnvironment | None) -> Iterator[Problem]:
    """Values that this machine does not support."""
    folder = (config.sharding.offload or Offload()).folder
    if folder is not None and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        advice = "Create it on every machine, on a disk with enough space"
        yield Problem("sharding.offload.folder", "a folder to write to", show(folder), advice)
    if config.sharding.transport is Transport.FAKE:
        advice = "It moves no data between ranks: it is for plans and tests"
        yield Problem("sharding.transport", "a real transport", "'fake'", advice)
    if config.launch.num_machines > 1 and launch is None:
        got = f"{config.launch.num_machines} without a launcher is not yet supported"
        advice = (
            "On every machine, start this command with torchrun or srun, or as `fullshard launch "
            "--nnodes ... -m fullshard ...`"
        )
        yield Problem("launch.num_machines", "", got, advice)


# ---- valid combinations that are known to cause trouble
# -------------------------------------------


def findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The dotted key of each such value, with the reason or advice."""
    is_sharded = config.sharding.strategy not in (Strategy.NO_SHARD, Strategy.AUTO)
    yield from _of_sharding(config.sharding, is_sharded=is_sharded)
    if config.launch.world_size == 1 and is_sharded:
        yield (
            "launch.num_processes",
            "one rank has nothing to share its state with; use no_shard, or more processes",
        )
    if config.launch.num_machines == 1 and config.launch.main_process_port is not None:
        yield (
            "launch.main_process_port",
            "the ranks of one machine meet at a free port, so it has no effect; leave it out",
        )
    yield from _of_training(config.training)


def _of_sharding(sharding: ShardConfig, *, is_sharded: bool) -> Iterator[tuple[str, str]]:
    if sharding.wrap is WrapKind.NONE and is_sharded:
        yield (
            "sharding.wrap",
            "the whole model is one unit, so every step gathers all of it at once and parameters "
            "take as much memory as without sharding; use auto",
        )
    if sharding.offload is not None and sharding.strategy is Strategy.NO_SHARD:
        yield (
            "sharding.offload",
            "every rank of a host keeps a whole copy of the state there; use full_shard",
        )
    if sharding.master_dtype in (DType.BFLOAT16, DType.FLOAT16):
        yield (
            "sharding.master_dtype",
            "updates much smaller than a weight are rounded away; leave masters at float32",
        )
    if sharding.reduce_dtype is DType.FLOAT16:
        yield (
            "sharding.reduce_dtype",
            "sums over ranks overflow at 65504; use bfloat16 or float32",
        )
    if sharding.grad_sync is GradSync.LAST_MICRO_BATCH and is_sharded:
        yield (
            "sharding.grad_sync",
            "unsharded gradients of the whole model are held from the first micro-batch to the "
            "last; use every_micro_batch unless the network is the bottleneck",
        )
    if sharding.forward_prefetch >= _DEEP and is_sharded:
        yield (
            "sharding.forward_prefetch",
            "every unit gathered ahead is held in memory; 1 or 2 hide what can be hidden",
        )
    if sharding.poison:
        yield (
            "sharding.poison",
            "every released slot is overwritten, which is for tests; leave it out",
        )


def _of_training(training: TrainingConfig) -> Iterator[tuple[str, str]]:
    if 1 <= training.max_steps <= training.warmup_steps:
        yield (
            "training.warmup_steps",
            "the warm-up ends after the last step, so the learning rate never gets there",
        )
    has_warmup = bool(training.warmup_steps or training.warmup_ratio)
    if training.lr_scheduler_type is LrSchedule.CONSTANT and has_warmup:
        yield (
            "training.lr_scheduler_type",
            "constant has no warm-up, though one is given; use constant_with_warmup",
        )
    if training.eval_steps is not None and training.eval_strategy is IntervalStrategy.NO:
        yield (
            "training.eval_steps",
            "eval_strategy says no, so nothing is evaluated; leave one of the two out",
        )
    if training.learning_rate == 0:
        yield "training.learning_rate", "nothing is learnt at 0"
