"""Strategies and numbers of ranks that behaviours are tested on."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
DEPTHS = ((0, 0), (1, 1), (2, 2))  # of prefetch in forward and backward


def prefetching(strategy: str, depths: Iterable[tuple[int, int]] = DEPTHS) -> list[dict[str, Any]]:
    """Settings of a strategy with each prefetch depth."""
    return [
        {"strategy": strategy, "forward_prefetch": f, "backward_prefetch": b} for f, b in depths
    ]


def in_turn(
    cases: Iterable[Any], strategy: str, depths: Iterable[tuple[int, int]] = DEPTHS
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every case with one depth: over the strategies each case is tried with each depth."""
    settings = prefetching(strategy, depths)
    for at, case in enumerate(cases, STRATEGIES.index(strategy)):
        yield case, settings[at % len(settings)]


def marked(
    cases: Iterable[tuple[Any, ...]],
    is_fast: Callable[..., bool],
    mark: pytest.MarkDecorator = pytest.mark.slow,
) -> list[Any]:
    """Parameters of a grid; the few that show each mechanism are left unmarked."""
    return [pytest.param(*case, marks=() if is_fast(*case) else mark) for case in cases]


def chequered(first: Iterable[Any], second: Iterable[Any], every: int = 2) -> list[Any]:
    """All pairs; one of `every` is short, the others are marked long.

    With 2 each member is in half of its pairs; with the length of `second`, each of `first` in one.
    """
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [
        pytest.param(one, two, marks=() if (at + beside) % every == 0 else pytest.mark.long)
        for (at, one), (beside, two) in pairs
    ]


# Three ranks cut inside parameters in other places than two; one strategy shows that each time.
RANKED = marked(
    itertools.product(STRATEGIES, (2, 3)),
    lambda strategy, ranks: ranks == 2 or strategy == "full_shard",
)
# Where a behaviour does not depend on the cuts, two ranks show it.
PAIRED = marked(itertools.product(STRATEGIES, (2, 3)), lambda _, ranks: ranks == 2)
