"""What is in the contract and not built yet: one table, whose rows later work deletes.

These values pass the schema, since they mean something; `check_supported` refuses them by name,
before any rank starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.schema import Offload, RunConfig, ShardConfig, TrainingConfig
from fullshard.config.values import (
    Backend,
    Home,
    IntervalStrategy,
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
        plans: `fullshard plan` knows it already; only a run does not.
    """

    key: str
    says: Callable[[Any], object]
    instead: str
    plans: bool = False


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
    NotYet("strategy", _among("strategy", Strategy.AUTO), "Name the strategy"),
    NotYet("offload", lambda c: _nvme(c.offload), "Use cpu", plans=True),
    NotYet(
        "activation_checkpointing", lambda c: _offloads(c.activation_checkpointing), "Use block"
    ),
)

TRAINING = (
    NotYet(
        "save_strategy",
        _among("save_strategy", IntervalStrategy.STEPS, IntervalStrategy.EPOCH),
        "Write save_strategy: no",
    ),
    NotYet("save_steps", lambda c: _if_saving(c, "save_steps"), "Write save_strategy: no"),
    NotYet(
        "save_total_limit", lambda c: _if_saving(c, "save_total_limit"), "Write save_strategy: no"
    ),
    NotYet("resume_from_checkpoint", _any("resume_from_checkpoint"), "Leave it out"),
)

RUN = (
    NotYet("backend", _among("backend", Backend.JAX), "Use torch"),
    NotYet("teacher", _any("teacher"), "Leave it out"),
    NotYet("student", _any("student"), "Write model"),
    NotYet("sft", _any("sft"), "Leave it out"),
    NotYet("distill", _any("distill"), "Leave it out"),
)


def check_supported(
    config: RunConfig | ShardConfig,
    *,
    planning: bool = False,
    launch: LaunchEnvironment | None = None,
) -> None:
    """Refuse by name what the contract has and this version lacks.

    Args:
        config: a whole configuration, or the sharding of a model of one's own.
        planning: for a plan alone, which may hold more than a run does yet.
        launch: how this process was launched, if it was. Several machines need a launcher of
            their own (torchrun, srun), which has set it.

    Raises:
        ConfigError: with every value that is not built yet.
    """
    if isinstance(config, ShardConfig):
        problems = _problems(SHARDING, config, "", planning=planning)
    else:
        problems = [
            *_problems(RUN, config, "", planning=planning),
            *_problems(SHARDING, config.sharding, "sharding", planning=planning),
            *_problems(TRAINING, config.training, "training", planning=planning),
        ]
        if config.sharding.transport is Transport.FAKE and not planning:
            advice = "It moves no data between ranks: it is for plans and tests"
            problems.append(Problem("sharding.transport", "a real transport", "'fake'", advice))
        if config.launch.num_machines > 1 and launch is None and not planning:
            says = f"{config.launch.num_machines} without a launcher is not yet supported"
            advice = "Start this command with torchrun or srun on every machine"
            problems.append(Problem("launch.num_machines", "", says, advice))
    if problems:
        raise ConfigProblems(problems)


def _problems(
    rows: Iterable[NotYet], config: object, prefix: str, *, planning: bool
) -> list[Problem]:
    return [
        Problem(join_key(prefix, row.key), "", f"{_named(value)} is not yet supported", row.instead)
        for row in rows
        if not (planning and row.plans) and (value := row.says(config)) is not None
    ]


def _named(value: object) -> str:
    """Words in quotes; what is no word by its kind."""
    if isinstance(value, Section):
        return "a mapping"
    return show(str(value)) if isinstance(value, str) else show(value)


def _nvme(offload: Offload | None) -> str | None:
    homes = (offload.parameters, offload.gradients, offload.optimizer) if offload else ()
    return "nvme" if Home.NVME in homes else None


def _offloads(recompute: Recompute) -> str | None:
    """Activations that wait on the host are a policy of XLA's."""
    return str(recompute) if recompute.kind is RecomputeKind.OFFLOAD else None


def _if_saving(config: TrainingConfig, key: str) -> object:
    """Settings of checkpoints mean nothing where save_strategy says that there are none."""
    return None if config.save_strategy is IntervalStrategy.NO else getattr(config, key)
