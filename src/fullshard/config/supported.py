"""What is in the contract and not built yet: one table, whose rows later work deletes.

These values pass the schema, since they mean something; `check_supported` refuses them by name,
before any rank starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.schema import Offload, RunConfig, ShardConfig
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


@dataclasses.dataclass(frozen=True)
class NotYet:
    """One row.

    Args:
        key: a field of the section that the table is for.
        instead: what to do until it is built.
        later: values that are not built yet; none named: all but the default.
    """

    key: str
    instead: str
    later: tuple[object, ...] = ()

    def problems(self, section: Section, prefix: str, where: str = "") -> Iterator[Problem]:
        """The problem of a section whose value is a later one; `where` it is not built."""
        value = getattr(section, self.key)
        default = type(section).model_fields[self.key].default
        if value in self.later if self.later else value != default:
            shown = show(section.to_dict()[self.key])
            key = join_key(prefix, self.key)
            yield Problem(key, "", f"{shown} {where}is not yet supported", self.instead)


_NAMED = NotYet("strategy", "Name the strategy", (Strategy.AUTO,))
_TORCH = (NotYet("activation_checkpointing", "Use block", (Recompute(RecomputeKind.OFFLOAD),)),)

# What the XLA engine has no counterpart of.
_XLA = (
    _NAMED,
    NotYet("strategies", "Write one strategy"),
    NotYet("offload", "Leave it out: activation_checkpointing: offload is there"),
    *(NotYet(key, "Leave it out") for key in ("ignore", "buffer_dtype", "output_dtype")),
    NotYet("grad_sync", f"Use {GradSync.EVERY_MICRO_BATCH}"),
    NotYet("param_dtype", "Use bfloat16", (DType.FLOAT16,)),
    NotYet("transport", "Use auto"),
)
_XLA_TRAINING = (
    NotYet("optim", "Use adamw_torch or sgd, or backend: torch", BY_OWNER),
    *(NotYet(key, "Leave it out") for key in ("ema_decay", "max_skipped_steps")),
    NotYet("matmul_precision", "Leave it out"),
    NotYet("per_device_train_batch_size", "Write a number", (0,)),
)
_XLA_LORA = NotYet("lora", "Leave it out, or use backend: torch")


def check_supported(
    config: RunConfig | ShardConfig,
    *,
    planning: bool = False,
    launch: LaunchEnvironment | None = None,
    backend: Backend = Backend.TORCH,
) -> None:
    """Refuse by name what the contract has and this version lacks.

    Args:
        config: a whole configuration, or the sharding of a model of one's own.
        planning: for a plan alone, which may hold more than a run does yet.
        launch: how this process was launched, if it was. Several machines need a launcher of
            their own (torchrun, srun), which has set it.
        backend: that runs the sharding of a model of one's own.

    Raises:
        ConfigError: with every value that is not built yet.
    """
    if isinstance(config, ShardConfig):
        rows = _XLA if backend is Backend.JAX else (_NAMED, *_TORCH)
        problems = [problem for row in rows for problem in row.problems(config, "")]
    else:
        problems = list(_of_run(config))
        problems += [] if planning else _of_machine(config, launch)
    if problems:
        raise ConfigProblems(problems)


def _of_run(config: RunConfig) -> Iterator[Problem]:
    """What neither a plan nor a run can have."""
    on_xla = config.backend is Backend.JAX
    for row in _XLA if on_xla else _TORCH:
        yield from row.problems(config.sharding, "sharding")
    for row in _XLA_TRAINING if on_xla else ():
        yield from row.problems(config.training, "training")
    if on_xla:
        yield from _XLA_LORA.problems(config, "")
    if config.training.optim in BY_OWNER and config.sharding.offload is not None:
        says = f"beside optim: {config.training.optim} is not yet supported"
        yield Problem("sharding.offload", "", says, "Leave one of the two out")


def _of_machine(config: RunConfig, launch: LaunchEnvironment | None) -> Iterator[Problem]:
    """What a run needs of the machine that it starts on."""
    folder = (config.sharding.offload or Offload()).folder
    if folder is not None and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        advice = "Make it on every machine, on a disk with room"
        yield Problem("sharding.offload.folder", "a folder to write to", show(folder), advice)
    if config.sharding.transport is Transport.FAKE:
        advice = "It moves no data between ranks: it is for plans and tests"
        yield Problem("sharding.transport", "a real transport", "'fake'", advice)
    if config.launch.num_machines > 1 and launch is None:
        says = f"{config.launch.num_machines} without a launcher is not yet supported"
        advice = "Start this command with torchrun or srun on every machine"
        yield Problem("launch.num_machines", "", says, advice)
