"""Strategies as data: a new strategy adds a row, never a branch.

    strategy              shard_params  reshard_after_forward  mesh (replicate, shard)
    full_shard            yes           yes                    (1, W)          ZeRO-3
    shard_grad_op         yes           no                     (1, W)          ZeRO-2
    no_shard              no            no                     (W, 1)          DDP
    hybrid_shard          yes           yes                    (hosts, local)  HSDP
    hybrid_shard_zero2    yes           no                     (hosts, local)

Reduction follows from the mesh: reduce-scatter on the shard axis if it is larger than 1, all-reduce
on the replicate axis if it is larger than 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.config.values import Strategy
from fullshard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """What a strategy means.

    Attributes:
        shard_params: At rest each rank of the shard axis holds its part only.
        reshard_after_forward: Gathered units give their slot back after forward.
        hybrid: Without sizes, shard within a host and replicate over hosts.
    """

    shard_params: bool
    reshard_after_forward: bool
    hybrid: bool = False


ROWS = {
    Strategy.FULL_SHARD: StrategyRow(shard_params=True, reshard_after_forward=True),
    Strategy.SHARD_GRAD_OP: StrategyRow(shard_params=True, reshard_after_forward=False),
    Strategy.NO_SHARD: StrategyRow(shard_params=False, reshard_after_forward=False),
    Strategy.HYBRID_SHARD: StrategyRow(shard_params=True, reshard_after_forward=True, hybrid=True),
    Strategy.HYBRID_SHARD_ZERO2: StrategyRow(
        shard_params=True, reshard_after_forward=False, hybrid=True
    ),
}


def row_of(strategy: Strategy) -> StrategyRow:
    """The strategy's row.

    Raises:
        ConfigError: `auto`, which needs the planner's search.
    """
    if strategy not in ROWS:
        raise ConfigError(
            f"strategy: expected one of {', '.join(ROWS)}; got '{strategy}', which is not yet "
            "supported. Name the strategy."
        )
    return ROWS[strategy]
