"""What an engine's trace of a micro-batch says: the bytes that it holds, the operations it does.

Batches of other sizes follow from two traces. Every tensor's bytes are a + c * b of the samples b,
and operations come in the same order, so each moment is a line through two moments; the most of
all lines is the peak, which may be at another moment than either trace's.

An operation is told by its kind and size:

kind                  size                      by which rates are told apart
matmul nn, nt, tn     rows, inner, columns      which factor is read transposed
attention, ...        queries x keys, width     of one head
everything else       (bytes,)                  read and written
view                  ()                        nothing but the host's time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from fullshard.config.sharding import ShardConfig
from fullshard.planner.plan import Plan


class Kind(StrEnum):
    """What a tensor is made for; the order is that of a `Moment`'s fields."""

    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    GRADIENTS = "gradients on their way"


class Moment(NamedTuple):
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
        return dict(zip(Kind, self, strict=True))


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
    return Moment(*(a + share * (b - a) for a, b in zip(first, second, strict=True)))


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


# ---- operations ----------------------------------------------------------------------------------

VIEW = "view"
MATMUL = "matmul"
ATTENTION = "attention"
ROWS = "rows"  # of a kind: what lies together in memory are short rows, not all of it
SHORT_ROW = 128  # elements


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel.

    Attributes:
        kind: What it does, in the words of a calibration's tables.
        dtype: It computes in.
        size: As the table above has it.
        times: How many of the size it does at once: matrices of a batch, heads.
    """

    kind: str
    dtype: str
    size: tuple[int, ...]
    times: int = 1


@dataclass(frozen=True)
class UnitWork:
    """How often a unit does each operation in a micro-batch."""

    forward: Mapping[Operation, int]
    backward: Mapping[Operation, int]


# By the unit's name.
Work = Mapping[str, UnitWork]

# Traces a micro-batch of so many samples of a plan and a configuration (whose recompute counts);
# None where that cannot be traced.
WorkOf = Callable[[Plan, ShardConfig, float], Work | None]
