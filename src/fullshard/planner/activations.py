"""What a micro-batch holds while it is computed, as an engine traced it: numbers alone.

Batches of other sizes follow from two traces. Every tensor's bytes are a + c * b of the samples b,
and operations come in the same order, so each moment is a line through two moments; the most of
all lines is the peak, which may be at another moment than either trace's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from fullshard.config.sharding import ShardConfig
from fullshard.planner.plan import Plan


class Kind(StrEnum):
    """What a tensor is made for; the order is that of a `Moment`'s fields."""

    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    GRADIENTS = "gradients on their way"


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes alive at once.

    Attributes:
        activations: Made by the model's forward, its inputs too.
        logits: The model's outputs, and what the loss made of them.
        gradients: Made by backward, what it recomputes too.
    """

    activations: float
    logits: float
    gradients: float

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.gradients

    def rows(self) -> dict[str, float]:
        """Bytes by the name of the row."""
        return dict(zip(Kind, (self.activations, self.logits, self.gradients), strict=True))


@dataclass(frozen=True, slots=True)
class Peaks:
    """The moments at which most is alive.

    Attributes:
        forward: Until backward begins: of forward and the loss.
        whole: The peak of the whole micro-batch.
    """

    forward: Moment
    whole: Moment


# Traces a micro-batch of so many samples, of a step of this plan and configuration (whose recompute
# counts); None where that cannot be traced.
TraceOf = Callable[[Plan, ShardConfig, float], Peaks | None]


def peak(moments: Iterable[Moment]) -> Moment:
    """The moment at which most is alive."""
    return max(moments, key=lambda moment: moment.total, default=Moment(0, 0, 0))


def peaks(moments: Sequence[Moment]) -> Peaks:
    """Of all moments in their order."""
    return Peaks(peak(takewhile(lambda moment: not moment.gradients, moments)), peak(moments))


def between(first: Peaks, second: Peaks, at: tuple[float, float], wanted: float) -> Peaks:
    """As `along`, of both moments."""
    return Peaks(
        along(first.forward, second.forward, at, wanted),
        along(first.whole, second.whole, at, wanted),
    )


def along(first: Moment, second: Moment, at: tuple[float, float], wanted: float) -> Moment:
    """On the line through two moments.

    Args:
        first: At `at[0]`.
        second: At `at[1]`, another number.
        at: Samples, blocks, whatever the bytes are linear in.
        wanted: Where.
    """
    share = (wanted - at[0]) / (at[1] - at[0])

    def line(a: float, b: float) -> float:
        return a + share * (b - a)

    return Moment(
        line(first.activations, second.activations),
        line(first.logits, second.logits),
        line(first.gradients, second.gradients),
    )


def peaks_between(
    first: Sequence[Moment], second: Sequence[Moment], at: tuple[float, float], wanted: float
) -> Peaks | None:
    """The peaks of another number of samples; None where the two traces do not run alike.

    Args:
        first: All moments of `at[0]` samples.
        second: All moments of `at[1]` samples.
        at: Two numbers that differ.
        wanted: Samples.
    """
    if len(first) != len(second):
        return None
    return peaks([along(a, b, at, wanted) for a, b in zip(first, second, strict=True)])
