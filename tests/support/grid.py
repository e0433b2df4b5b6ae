"""Strategies and numbers of ranks that behaviours are tested on."""

from __future__ import annotations

import itertools

import pytest

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
# Three ranks cut inside parameters in other places than two; one strategy shows that each time.
RANKED = [
    pytest.param(
        strategy, ranks, marks=pytest.mark.slow if ranks == 3 and strategy != "full_shard" else ()
    )
    for strategy, ranks in itertools.product(STRATEGIES, (2, 3))
]
# Where a behaviour does not depend on the cuts, two ranks show it.
PAIRED = [
    pytest.param(strategy, ranks, marks=pytest.mark.slow if ranks == 3 else ())
    for ranks, strategy in itertools.product((2, 3), STRATEGIES)
]
