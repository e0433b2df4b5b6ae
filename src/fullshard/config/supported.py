"""Values that the contract has and an engine does not support yet: a table for each engine.

These values pass the schema, because they have a meaning; `check_supported` refuses them by name
before any rank starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.config.schema import Offload, RunConfig, ShardConfig
from fullshard.config.section import Section
from fullshard.config.values import (
    BY_OWNER,
    Backend,
    DType,
    GradSync,
    Recompute,
    RecomputeKind,
    Strategy,
    Transport,
)

# key -> what to do until it is supported, and the values that are not (none: all but the default).
_Rows = Mapping[str, tuple[object, ...]]
_NAMED: _Rows = {"sharding.strategy": ("Name the strategy", Strategy.AUTO)}
_TORCH: _Rows = {
    "sharding.activation_checkpointing": ("Use block", Recompute(RecomputeKind.OFFLOAD)),
}
_XLA: _Rows = {
    **_NAMED,
    "sharding.strategies": ("Write one strategy",),
    "sharding.offload": ("Leave it out: activation_checkpointing: offload is there",),
    "sharding.ignore": ("Leave it out",),
    "sharding.buffer_dtype": ("Leave it out",),
    "sharding.output_dtype": ("Leave it out",),
    "sharding.grad_sync": (f"Use {GradSync.EVERY_MICRO_BATCH}",),
    "sharding.param_dtype": ("Use bfloat16", DType.FLOAT16),
    "sharding.transport": ("Use auto",),
    "training.optim": ("Use adamw_torch or sgd, or backend: torch", *BY_OWNER),
    "training.ema_decay": ("Leave it out",),
    "training.max_skipped_steps": ("Leave it out",),
    "training.matmul_precision": ("Leave it out",),
    "training.per_device_train_batch_size": ("Write a number", 0),
    "lora": ("Leave it out, or use backend: torch",),
}


def check_supported(
    config: RunConfig | ShardConfig,
    *,
    planning: bool = False,
    launch: LaunchEnvironment | None = None,
    backend: Backend = Backend.TORCH,
) -> None:
    """Refuse by name what the contract has and an engine does not support yet.

    Args:
        config: a whole configuration, or the sharding of the user's own model.
        planning: only a plan is made, which supports more than a run.
        launch: how this process was launched; None if fullshard starts the ranks, which it cannot
            do on several machines.
        backend: the engine for the user's own model.

    Raises:
        ConfigError: with every value that is not supported yet.
    """
    if isinstance(config, ShardConfig):
        on_xla, alone = backend is Backend.JAX, _NAMED
    else:
        on_xla, alone = config.backend is Backend.JAX, {}
    problems = list(_refused(config, _XLA if on_xla else {**alone, **_TORCH}))
    if isinstance(config, RunConfig):
        problems += _of_owners(config)
        problems += [] if planning else _of_machine(config, launch)
    if problems:
        raise ConfigProblems(problems)


def _refused(config: RunConfig | ShardConfig, rows: _Rows) -> Iterator[Problem]:
    for key, (instead, *values) in rows.items():
        holder, _, name = key.rpartition(".")
        section: Section = config
        if isinstance(config, RunConfig):
            section = getattr(config, holder) if holder else config
        elif holder != "sharding":
            continue
        value = getattr(section, name)
        if value in values if values else value != type(section).model_fields[name].default:
            shown = show(section.to_dict()[name])
            where = key if isinstance(config, RunConfig) else name
            yield Problem(where, "", f"{shown} is not yet supported", str(instead))


def _of_owners(config: RunConfig) -> Iterator[Problem]:
    if config.training.optim in BY_OWNER and config.sharding.offload is not None:
        got = f"beside optim: {config.training.optim} is not yet supported"
        yield Problem("sharding.offload", "", got, "Leave one of the two out")


def _of_machine(config: RunConfig, launch: LaunchEnvironment | None) -> Iterator[Problem]:
    """What a run needs from the machine that it starts on."""
    folder = (config.sharding.offload or Offload()).folder
    if folder is not None and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        advice = "Create it on every machine, on a disk with enough space"
        yield Problem("sharding.offload.folder", "a folder to write to", show(folder), advice)
    if config.sharding.transport is Transport.FAKE:
        advice = "It moves no data between ranks: it is for plans and tests"
        yield Problem("sharding.transport", "a real transport", "'fake'", advice)
    if config.launch.num_machines > 1 and launch is None:
        got = f"{config.launch.num_machines} without a launcher is not yet supported"
        advice = "Start this command with torchrun or srun on every machine"
        yield Problem("launch.num_machines", "", got, advice)
