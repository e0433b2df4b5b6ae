"""Medians, paired ratios and their bootstrap intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from statistics import median

NUM_RESAMPLES = 2000
TAIL = 0.025  # on each side: a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A statistic of the measured rounds and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Returns the three numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the times of the slowest rank by operation and round.

    Args:
        ranks: Each rank's times by operation and round.
    """
    return {
        name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def bootstrap(num_rounds: int, statistic: Callable[[Sequence[int]], float]) -> Estimate:
    """Estimates a statistic of paired rounds by the percentile bootstrap.

    Rounds are drawn as a whole, so that a disturbance of a round affects both sides of a ratio.

    Args:
        num_rounds: Number of measured rounds.
        statistic: Maps indices of rounds (with repetition) to a number.
    """
    draw = random.Random(0)
    everything = range(num_rounds)
    values = sorted(statistic(draw.choices(everything, k=num_rounds)) for _ in range(NUM_RESAMPLES))
    cut = int(TAIL * NUM_RESAMPLES)
    return Estimate(statistic(everything), values[cut], values[-1 - cut])


def median_of(values: Sequence[float]) -> Estimate:
    """Estimates the median of the rounds."""
    return bootstrap(len(values), lambda rounds: median(values[i] for i in rounds))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Estimates the median over the rounds of `ours / theirs`."""
    return median_of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def removed_share(
    ours: Sequence[float], theirs: Sequence[float], floor: Sequence[float]
) -> Estimate | None:
    """Estimates the share of their overhead above the floor that ours removes: 1 is all.

    Returns None if their median is not above the floor's, because there is no overhead to remove.
    """
    if median(theirs) <= median(floor):
        return None

    def statistic(rounds: Sequence[int]) -> float:
        base = median(floor[i] for i in rounds)
        overhead = median(theirs[i] for i in rounds) - base
        # A resample may contain only rounds without overhead, whose share is undefined.
        return 1 - (median(ours[i] for i in rounds) - base) / overhead if overhead > 0 else 0.0

    return bootstrap(len(ours), statistic)


def largest_difference(losses: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Returns every engine's largest relative difference of a loss to the reference's.

    The difference is NaN if any of the losses is NaN.
    """
    expected = losses[reference]
    found = {}
    for name, values in losses.items():
        pairs = zip(values, expected, strict=True)
        differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        # max() ignores a NaN that does not come first; a sum does not.
        found[name] = max(differences) if isfinite(sum(differences)) else nan
    return found
