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
    """The meaning of a strategy.

    Attributes:
        shard_params: Between steps each rank of the shard axis holds only its part.
        reshard_after_forward: Gathered units release their slots after forward.
        hybrid: Without given sizes, shard within a host and replicate over hosts.
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
    """Returns the row of a strategy.

    Raises:
        ConfigError: The strategy is `auto`, which the search has to resolve first.
    """
    if strategy not in ROWS:
        raise ConfigError(
            f"strategy: expected one of {', '.join(ROWS)}; got '{strategy}', which "
            "needs a batch to choose from. Set one of them."
        )
    return ROWS[strategy]
