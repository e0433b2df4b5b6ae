"""What is in the contract and not built yet: one table, whose rows later work deletes.

These values pass the schema, since they mean something; `check_supported` refuses them by name,
before any rank starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.schema import DistillConfig, Offload, RunConfig, ShardConfig
from fullshard.config.values import (
    BY_OWNER,
    Backend,
    Command,
    DistillLoss,
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
        key: dotted key below the configuration that the table is for.
        says: a configuration's value where it is not built yet, None where it is.
        instead: what to do until it is.
        needs_batch: whole configurations have it; a model of one's own, without a batch, does not.
    """

    key: str
    says: Callable[[Any], object]
    instead: str
    needs_batch: bool = False


def _among(key: str, *later: object) -> Callable[[Any], object]:
    """These values of a field are later ones."""

    def says(config: object) -> object:
        value = getattr(config, key)
        return value if value in later else None

    return says


def _any(key: str) -> Callable[[Any], object]:
    """Every value of a field but null and an empty list is a later one."""

    def says(config: object) -> object:
        return getattr(config, key) or None

    return says


SHARDING = (
    NotYet("strategy", _among("strategy", Strategy.AUTO), "Name the strategy", needs_batch=True),
    NotYet(
        "activation_checkpointing", lambda c: _offloads(c.activation_checkpointing), "Use block"
    ),
)

# What the XLA engine has no counterpart of, beside what is not built for either.
XLA = (
    NotYet("strategy", _among("strategy", Strategy.AUTO), "Name the strategy"),
    NotYet("strategies", _any("strategies"), "Write one strategy"),
    NotYet("offload", _any("offload"), "Leave it out: activation_checkpointing: offload is there"),
    NotYet("ignore", _any("ignore"), "Leave it out"),
    NotYet("buffer_dtype", _any("buffer_dtype"), "Leave it out"),
    NotYet("output_dtype", _any("output_dtype"), "Leave it out"),
    NotYet(
        "grad_sync",
        _among("grad_sync", GradSync.LAST_MICRO_BATCH, GradSync.LAST_MICRO_BATCH_OUTER),
        "Use every_micro_batch",
    ),
    NotYet("param_dtype", _among("param_dtype", DType.FLOAT16), "Use bfloat16"),
    NotYet("transport", lambda c: c.transport if c.transport != "auto" else None, "Use auto"),
)

XLA_TRAINING = (
    NotYet("optim", _among("optim", *BY_OWNER), "Use adamw_torch or sgd, or backend: torch"),
    NotYet("ema_decay", lambda c: c.ema_decay, "Leave it out"),
    NotYet("max_skipped_steps", _any("max_skipped_steps"), "Leave it out"),
    NotYet(
        "per_device_train_batch_size",
        lambda c: "auto" if c.leaves_micro_batch else None,
        "Write a number",
    ),
)
XLA_DISTILL = (
    NotYet("teacher_offload", _any("teacher_offload"), "Leave it out, or use backend: torch"),
    *(
        NotYet(
            key,
            _any(key),
            "Give the student a dense configuration: mixtures of experts, of which students are "
            "cut, are torch's",
        )
        for key in ("experts", "layers")
    ),
)
XLA_LORA = NotYet("lora", _any("lora"), "Leave it out, or use backend: torch")


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
    rows = {Backend.TORCH: SHARDING, Backend.JAX: XLA}
    if isinstance(config, ShardConfig):
        problems = _problems(rows[backend], config, "")
    else:
        problems = [
            *_problems(
                [row for row in rows[config.backend] if not row.needs_batch],
                config.sharding,
                "sharding",
            ),
        ]
        if config.backend is Backend.JAX:
            problems += _problems(XLA_TRAINING, config.training, "training")
            problems += _problems([XLA_LORA], config, "")
        if config.training.optim in BY_OWNER and config.sharding.offload is not None:
            says = f"beside optim: {config.training.optim} is not yet supported"
            problems.append(Problem("sharding.offload", "", says, "Leave one of the two out"))
        problems += [] if planning else _unwritable(config.sharding.offload)
        if config.sharding.transport is Transport.FAKE and not planning:
            advice = "It moves no data between ranks: it is for plans and tests"
            problems.append(Problem("sharding.transport", "a real transport", "'fake'", advice))
        if config.launch.num_machines > 1 and launch is None and not planning:
            says = f"{config.launch.num_machines} without a launcher is not yet supported"
            advice = "Start this command with torchrun or srun on every machine"
            problems.append(Problem("launch.num_machines", "", says, advice))
    if problems:
        raise ConfigProblems(problems)


def _unwritable(offload: Offload | None) -> list[Problem]:
    folder = offload.folder if offload is not None else None
    if folder is None or (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        return []
    advice = "Make it on every machine, on a disk with room"
    return [Problem("sharding.offload.folder", "a folder to write to", show(folder), advice)]


def check_command(config: RunConfig, command: Command) -> None:
    """Refuse what another recipe would read: it would be without effect, in silence.

    Raises:
        ConfigError: with every such section.
    """
    problems: list[Problem] = []
    if config.backend is Backend.JAX:
        problems += _of_xla(config, command)
    if command is Command.TRAIN:
        asked = (
            config.sft.model_dump(exclude_none=True, exclude_defaults=True) if config.sft else {}
        )
        for key, value in asked.items():
            if value is not (key == "packing"):  # running text is packed, and all of it is learned
                problems.append(_of_other(f"sft.{key}", show(value), Command.SFT))
    if command in (Command.DISTILL, Command.CACHE):
        problems += _of_distillation(config, command)
    else:
        for key in ("teacher", "distill"):
            if getattr(config, key) is not None:
                problems.append(_of_other(key, "a mapping", Command.DISTILL))
    if problems:
        raise ConfigProblems(problems)


def _of_xla(config: RunConfig, command: Command) -> Iterator[Problem]:
    if command is Command.CACHE:
        says = "'jax' under `fullshard distill cache` is not yet supported"
        yield Problem("backend", "", says, "Use torch: backend: jax learns from what it leaves")
    if command is Command.DISTILL:
        settings = config.distill or DistillConfig()
        for row in XLA_DISTILL:
            if (value := row.says(settings)) is not None:
                says = f"{_named(value)} with backend: jax is not yet supported"
                yield Problem(f"distill.{row.key}", "", says, row.instead)
    elif "loss_chunk_size" in config.training.model_fields_set and config.training.loss_chunk_size:
        says = f"{config.training.loss_chunk_size} with backend: jax is not yet supported"
        yield Problem("training.loss_chunk_size", "", says, "Leave it out")
    sft = config.sft
    if sft is not None and "num_samples" in sft.model_fields_set and sft.num_samples:
        says = f"{sft.num_samples} with backend: jax is not yet supported"
        yield Problem("sft.num_samples", "", says, "Leave it out: no prompt is answered")


def _of_distillation(config: RunConfig, command: Command) -> Iterator[Problem]:
    settings = config.distill or DistillConfig()
    cached = settings.cache is not None and command is Command.DISTILL
    if config.teacher is None and not cached:
        advice = "Name a model folder, or distill.cache"
        yield Problem("teacher", "the model that is learned from", "none", advice)
    cuts = (settings.experts, settings.layers) != (None, None)
    if cuts and (config.model != config.teacher or cached):
        expected, advice = "a teacher, and no student: it is cut out of it", "Leave model out"
        yield Problem("distill.experts", expected, "another model or a cache", advice)
    if cached and settings.teacher_offload is not None:
        says, advice = show(settings.teacher_offload), "Leave it out: no teacher runs"
        yield Problem("distill.teacher_offload", "no distill.cache beside it", says, advice)
    if cached and settings.loss is not DistillLoss.FORWARD_KL:
        advice = "The others need logits that were not kept"
        yield Problem("distill.loss", "forward_kl with distill.cache", show(settings.loss), advice)


def _of_other(key: str, got: str, command: Command) -> Problem:
    return Problem(key, f"this in `fullshard {command}` alone", got, "Leave it out")


def _problems(rows: Iterable[NotYet], config: object, prefix: str) -> list[Problem]:
    return [
        Problem(join_key(prefix, row.key), "", f"{_named(value)} is not yet supported", row.instead)
        for row in rows
        if (value := row.says(config)) is not None
    ]


def _named(value: object) -> str:
    """Words in quotes; what is no word by its kind."""
    if isinstance(value, Section):
        return "a mapping"
    return show(str(value)) if isinstance(value, str) else show(value)


def _offloads(recompute: Recompute) -> str | None:
    """Activations that wait on the host are a policy of XLA's."""
    return str(recompute) if recompute.kind is RecomputeKind.OFFLOAD else None
