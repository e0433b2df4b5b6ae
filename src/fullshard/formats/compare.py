"""Compares two sources tensor by tensor, with one tensor of each in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from fullshard.formats.source import CHECKPOINT, Entry, OptimizerSource, Source

CHUNK = 1 << 22  # elements compared at a time, to bound the memory of wider copies


class Verdict(StrEnum):
    """How two tensors of one name compare."""

    SAME = "same"
    ROUNDED = "same but for rounding to the other's dtype"
    DIFFERENT = "different values"
    SHAPE = "different shapes"
    ONLY_A = "only in A"
    ONLY_B = "only in B"


@dataclass(frozen=True, slots=True)
class Row:
    """Result for one name.

    Attributes:
        name: Name of the tensor; PARAMETER/STATE for an optimizer's state.
        verdict: The result.
        max_abs: Largest absolute difference; None if the tensors cannot be subtracted.
        about: Dtypes and shapes, if they differ.
    """

    name: str
    verdict: Verdict
    max_abs: float | None = None
    about: str = ""


def compare(a: Source, b: Source) -> Iterator[Row]:
    """Yields one row for each tensor of either source."""
    yield from _pairs(a.tensors, b.tensors, {**a.tied, **b.tied})
    one, other = a.optimizer, b.optimizer
    if one is not None and other is not None:
        yield from _pairs(_states(one), _states(other), {})
    elif (one is not None or other is not None) and a.what == b.what == CHECKPOINT:
        yield Row("optimizer", Verdict.ONLY_B if one is None else Verdict.ONLY_A)


def _pairs(
    a: Mapping[str, Entry], b: Mapping[str, Entry], tied: Mapping[str, str]
) -> Iterator[Row]:
    for name, entry in a.items():
        other = b.get(name) or b.get(tied.get(name, name))
        yield Row(name, Verdict.ONLY_A) if other is None else _compared(name, entry, other)
    for name in b:
        if name not in a and tied.get(name) not in a:
            yield Row(name, Verdict.ONLY_B)


def _compared(name: str, a: Entry, b: Entry) -> Row:
    if a.shape != b.shape:
        return Row(name, Verdict.SHAPE, None, f"{a.shape} and {b.shape}")
    one, other = a.read(), b.read()
    worst = _max_abs(one, other)
    if one.dtype is other.dtype:
        return Row(name, Verdict.DIFFERENT if worst > 0 else Verdict.SAME, worst)
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    rounded = _max_abs(one.to(narrow), other.to(narrow)) == 0
    verdict = Verdict.ROUNDED if rounded else Verdict.DIFFERENT
    return Row(name, verdict, worst, f"{one.dtype} and {other.dtype}")


def _max_abs(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; NaN equals NaN, and differs infinitely from a number."""
    worst = 0.0
    for x, y in zip(one.reshape(-1).split(CHUNK), other.reshape(-1).split(CHUNK), strict=True):
        left, right = x.double(), y.double()
        gap = (left - right).abs()
        gap[(left == right) | (left.isnan() & right.isnan())] = 0.0
        worst = max(worst, gap.nan_to_num(nan=math.inf).max().item() if gap.numel() else 0.0)
    return worst


def _states(optimizer: OptimizerSource) -> dict[str, Entry]:
    """States by PARAMETER/STATE, numbers too."""
    numbers = {
        f"{param}/{state}": Entry.of(torch.tensor(float(value), dtype=torch.float64))
        for param, values in optimizer.scalars.items()
        for state, value in values.items()
    }
    states = {"/".join(names): entry for names, entry in optimizer.tensors.items()}
    return {**states, **optimizer.own, **numbers}
