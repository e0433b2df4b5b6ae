"""Strategies and numbers of ranks that behaviours are tested on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


def marked(
    cases: Iterable[tuple[Any, ...]],
    is_fast: Callable[..., bool],
    mark: pytest.MarkDecorator = pytest.mark.slow,
) -> list[Any]:
    """Parameters of a grid; the few that show each mechanism are left unmarked."""
    return [pytest.param(*case, marks=() if is_fast(*case) else mark) for case in cases]


# Three ranks cut inside parameters in other places than two; one strategy shows that each time.
RANKED = marked(
    itertools.product(STRATEGIES, (2, 3)),
    lambda strategy, ranks: ranks == 2 or strategy == "full_shard",
)
# Where a behaviour does not depend on the cuts, two ranks show it.
PAIRED = marked(itertools.product(STRATEGIES, (2, 3)), lambda _, ranks: ranks == 2)
