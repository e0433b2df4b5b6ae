"""The results of tracing a micro-batch: memory over time, and operations.

Batches of other sizes follow from two traces. The bytes of every tensor are linear in the number of
samples, and operations come in the same order, so each moment is on a line through two moments. The
largest of all lines is the peak, which may be at another moment than in either trace.

The speed of an operation depends on its kind and size:

kind                  size                      meaning
matmul nn, nt, tn     rows, inner, columns      the letters show which factor is transposed
attention, ...        queries x keys, width     one head
everything else       (bytes,)                  bytes read and written
view                  ()                        costs only time of the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from fullshard.config.sharding import ShardConfig
from fullshard.planner.plan import Plan


class TensorKind(StrEnum):
    """Kinds of temporary tensors, in the order of a `Moment`'s fields."""

    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    GRADIENTS = "gradients in flight"


class Moment(NamedTuple):
    """Bytes of temporary tensors at one moment.

    Attributes:
        activations: Inputs, and tensors allocated in the model's forward.
        logits: Outputs of the model, and tensors allocated by the loss.
        gradients: Tensors allocated in backward, recomputed ones included.
    """

    activations: float
    logits: float
    gradients: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.activations + self.logits + self.gradients

    def rows(self) -> dict[str, float]:
        """Returns bytes by the name of the memory row."""
        return dict(zip(TensorKind, self, strict=True))


@dataclass(frozen=True, slots=True)
class Peaks:
    """The moments with the most bytes.

    Attributes:
        forward: Peak of forward and loss.
        whole: Peak of the whole micro-batch.
    """

    forward: Moment
    whole: Moment


# Traces the memory of a micro-batch, given the plan, the configuration (for its recompute) and the
# number of samples; None if the model cannot be traced.
TraceOf = Callable[[Plan, ShardConfig, float], Peaks | None]


def peak(moments: Iterable[Moment]) -> Moment:
    """Returns the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total, default=Moment(0, 0, 0))


def peaks(moments: Sequence[Moment]) -> Peaks:
    """Returns the peaks of consecutive moments."""
    return Peaks(peak(takewhile(lambda moment: not moment.gradients, moments)), peak(moments))


def between(first: Peaks, second: Peaks, at: tuple[float, float], wanted: float) -> Peaks:
    """Returns `along` for both peaks."""
    return Peaks(
        along(first.forward, second.forward, at, wanted),
        along(first.whole, second.whole, at, wanted),
    )


def along(first: Moment, second: Moment, at: tuple[float, float], wanted: float) -> Moment:
    """Returns a moment on the line through two moments.

    Args:
        first: The moment at `at[0]`.
        second: The moment at `at[1]`.
        at: Two different numbers of samples or blocks, in which bytes are linear.
        wanted: The number of samples or blocks of the result.
    """
    share = (wanted - at[0]) / (at[1] - at[0])
    return Moment(*(a + share * (b - a) for a, b in zip(first, second, strict=True)))


def peaks_between(
    first: Sequence[Moment], second: Sequence[Moment], at: tuple[float, float], wanted: float
) -> Peaks | None:
    """Returns the peaks for another number of samples; None if the traces differ in length.

    Args:
        first: All moments with `at[0]` samples.
        second: All moments with `at[1]` samples.
        at: Two different numbers of samples.
        wanted: The number of samples of the result.
    """
    if len(first) != len(second):
        return None
    return peaks([along(a, b, at, wanted) for a, b in zip(first, second, strict=True)])


# ---- operations ----------------------------------------------------------------------------------

VIEW = "view"
MATMUL = "matmul"
ATTENTION = "attention"
ROWS = "rows"  # suffix of a kind: the operands are short rows, not contiguous as a whole
SHORT_ROW = 128  # elements


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel.

    Attributes:
        kind: Kind of the operation, as in a calibration's tables.
        dtype: Dtype of the computation.
        size: Size, as in the table above.
        times: Number of operations of this size in the kernel: matrices of a batch, heads.
    """

    kind: str
    dtype: str
    size: tuple[int, ...]
    times: int = 1


@dataclass(frozen=True)
class UnitWork:
    """The number of times that a unit runs each operation in a micro-batch."""

    forward: Mapping[Operation, int]
    backward: Mapping[Operation, int]


# Work by unit name.
Work = Mapping[str, UnitWork]

# Traces the operations of a micro-batch; the arguments are those of `TraceOf`.
WorkOf = Callable[[Plan, ShardConfig, float], Work | None]
