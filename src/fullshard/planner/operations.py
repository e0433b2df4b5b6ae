"""What a micro-batch computes, as an engine traced it: kinds and sizes of operations, by unit.

kind                  size                      by which rates are told apart
matmul nn, nt, tn     rows, inner, columns      which factor is read transposed
attention, ...        queries x keys, width     of one head
everything else       (bytes,)                  read and written
view                  ()                        nothing but the host's time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fullshard.config.sharding import ShardConfig
from fullshard.planner.plan import Plan

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
