"""Combinations that are allowed and known to be bad, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fullshard.config.schema import RunConfig
from fullshard.config.values import (
    DType,
    GradSync,
    IntervalStrategy,
    LrSchedule,
    Strategy,
    WrapKind,
)

_SHARDED = (
    Strategy.FULL_SHARD,
    Strategy.SHARD_GRAD_OP,
    Strategy.HYBRID_SHARD,
    Strategy.HYBRID_SHARD_ZERO2,
)
_LOW = (DType.BFLOAT16, DType.FLOAT16)
_DEEP = 4  # units gathered ahead; more are held than hide anything


@dataclass(frozen=True)
class Advice:
    """One row.

    Args:
        key: that is to be changed, dotted.
        found: whether a configuration has it.
        why: what is bad about it, and what to do.
    """

    key: str
    found: Callable[[RunConfig], bool]
    why: str


def _free(config: RunConfig, key: str) -> Any:
    return (config.model.config or {}).get(key)


def _warmup_is_all(config: RunConfig) -> bool:
    training = config.training
    return 1 <= training.max_steps <= training.warmup_steps


def _too_long(config: RunConfig) -> bool:
    positions = _free(config, "max_position_embeddings")
    return isinstance(positions, int) and positions < config.training.max_seq_length


def _holds_gradients(config: RunConfig) -> bool:
    sharding = config.sharding
    later = sharding.grad_sync is GradSync.LAST_MICRO_BATCH
    return later and sharding.strategy in _SHARDED


ADVICE = (
    Advice(
        "sharding.wrap",
        lambda c: c.sharding.wrap is WrapKind.NONE and c.sharding.strategy in _SHARDED,
        "the whole model is one unit, so every step gathers all of it at once and parameters "
        "take as much memory as without sharding; use auto",
    ),
    Advice(
        "sharding.offload",
        lambda c: c.sharding.offload is not None and c.sharding.strategy is Strategy.NO_SHARD,
        "every rank of a host keeps a whole copy of the state there; use full_shard",
    ),
    Advice(
        "sharding.master_dtype",
        lambda c: c.sharding.master_dtype in _LOW,
        "updates much smaller than a weight are rounded away; leave masters at float32",
    ),
    Advice(
        "sharding.reduce_dtype",
        lambda c: c.sharding.reduce_dtype is DType.FLOAT16,
        "sums over ranks overflow at 65504; use bfloat16 or float32",
    ),
    Advice(
        "sharding.grad_sync",
        _holds_gradients,
        "unsharded gradients of the whole model are held from the first micro-batch to the last; "
        "use every_micro_batch unless the network is the bottleneck",
    ),
    Advice(
        "sharding.forward_prefetch",
        lambda c: c.sharding.forward_prefetch >= _DEEP and c.sharding.strategy in _SHARDED,
        "every unit gathered ahead is held in memory; 1 or 2 hide what can be hidden",
    ),
    Advice(
        "sharding.poison",
        lambda c: c.sharding.poison,
        "every released slot is overwritten, which is for tests; leave it out",
    ),
    Advice(
        "launch.num_processes",
        lambda c: c.launch.num_processes == 1 and c.sharding.strategy in _SHARDED,
        "one rank has nothing to share its state with; use no_shard, or more processes",
    ),
    Advice(
        "training.warmup_steps",
        _warmup_is_all,
        "the warm-up ends after the last step, so the learning rate never gets there",
    ),
    Advice(
        "training.lr_scheduler_type",
        lambda c: (
            c.training.lr_scheduler_type is LrSchedule.CONSTANT
            and bool(c.training.warmup_steps or c.training.warmup_ratio)
        ),
        "constant has no warm-up, though one is given; use constant_with_warmup",
    ),
    Advice(
        "training.eval_steps",
        lambda c: (
            c.training.eval_steps is not None and c.training.eval_strategy is IntervalStrategy.NO
        ),
        "eval_strategy says no, so nothing is evaluated; leave one of the two out",
    ),
    Advice(
        "training.max_seq_length",
        _too_long,
        "the model has fewer positions (max_position_embeddings) than a sequence has tokens",
    ),
    Advice(
        "training.learning_rate",
        lambda c: c.training.learning_rate == 0,
        "nothing is learnt at 0",
    ),
)


def findings(config: RunConfig) -> Iterator[Advice]:
    """The rows that a configuration is in."""
    return (advice for advice in ADVICE if advice.found(config))
