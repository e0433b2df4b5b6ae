"""Combinations of values that are allowed but known to be bad, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.config.schema import RunConfig, TrainingConfig
from fullshard.config.sharding import ShardConfig
from fullshard.config.values import (
    DType,
    GradSync,
    IntervalStrategy,
    LrSchedule,
    Strategy,
    WrapKind,
)

_DEEP = 4  # gathering more units ahead hides nothing more


def findings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The dotted key of each bad value, and what is bad about it or what to do."""
    is_sharded = config.sharding.strategy not in (Strategy.NO_SHARD, Strategy.AUTO)
    yield from _of_sharding(config.sharding, is_sharded=is_sharded)
    if config.launch.num_processes == 1 and is_sharded:
        yield (
            "launch.num_processes",
            "one rank has nothing to share its state with; use no_shard, or more processes",
        )
    yield from _of_training(config.training)
    positions = (config.model.config or {}).get("max_position_embeddings")
    if isinstance(positions, int) and positions < config.training.max_seq_length:
        yield (
            "training.max_seq_length",
            "the model has fewer positions (max_position_embeddings) than a sequence has tokens",
        )


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
