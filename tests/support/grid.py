"""Strategies and numbers of ranks for parametrized tests."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
DEPTHS = ((0, 0), (1, 1), (2, 2))  # depths of prefetch in forward and backward


def prefetching(strategy: str, depths: Iterable[tuple[int, int]] = DEPTHS) -> list[dict[str, Any]]:
    """Returns the settings of a strategy with each prefetch depth."""
    return [
        {"strategy": strategy, "forward_prefetch": f, "backward_prefetch": b} for f, b in depths
    ]


def in_turn(
    cases: Iterable[Any], strategy: str, depths: Iterable[tuple[int, int]] = DEPTHS
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields every case with one depth; the strategies together try each case with each depth."""
    settings = prefetching(strategy, depths)
    for at, case in enumerate(cases, STRATEGIES.index(strategy)):
        yield case, settings[at % len(settings)]


def marked(
    cases: Iterable[tuple[Any, ...]],
    is_fast: Callable[..., bool],
    mark: pytest.MarkDecorator = pytest.mark.slow,
) -> list[Any]:
    """Returns parameters of a grid; those for which `is_fast` is true get no mark."""
    return [pytest.param(*case, marks=() if is_fast(*case) else mark) for case in cases]


def chequered(first: Iterable[Any], second: Iterable[Any], every: int = 2) -> list[Any]:
    """Returns all pairs; one of `every` is unmarked, the others are marked long.

    With 2, half of the pairs of each member are short; with the length of `second`, one pair of
    each member of `first`.
    """
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [
        pytest.param(one, two, marks=() if (at + beside) % every == 0 else pytest.mark.long)
        for (at, one), (beside, two) in pairs
    ]


# Three ranks cut parameters at different places than two; one strategy suffices.
RANKED = marked(
    itertools.product(STRATEGIES, (2, 3)),
    lambda strategy, ranks: ranks == 2 or strategy == "full_shard",
)
# For behaviour that does not depend on the cuts, two ranks suffice.
PAIRED = marked(itertools.product(STRATEGIES, (2, 3)), lambda _, ranks: ranks == 2)
