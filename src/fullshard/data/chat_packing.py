"""Examples into rows, and the rows of a step to ranks.

    best fit, decreasing        longest first, each into the row with the least room that holds it
    row      [ example 4       ][ example 0 ][ ex. 7 ]..    what is left over is padding
    places   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 0 1 2 3 4 0    begin anew with each example

Both are functions of their arguments alone, so every run and rank finds the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from fullshard.data.order import Indices


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Examples by row.

    Args:
        lengths: Tokens of each example, at most `capacity`.
        capacity: Tokens of a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for example in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[example]
        at = bisect_left(room, (length, 0))
        if at == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(example)
        if left > length:
            insort(room, (left - length, row))
    return rows


def dealt(chosen: Indices, lengths: Indices) -> Indices:
    """The same rows, so dealt out that ranks wait little for each other.

    Rows of like length come into one micro-batch, where they need little padding; the rank that
    has the longest of one micro-batch has the shortest of the next.

    Args:
        chosen: (accumulation, world_size, per_device) rows of a step; -1 are empty places.
        lengths: Lengths of every row, in tokens.
    """
    flat = chosen.reshape(-1)
    sizes = np.where(flat < 0, -1, lengths[np.maximum(flat, 0)])
    sorted_rows = flat[np.argsort(-sizes, kind="stable")].reshape(chosen.shape)
    sorted_rows[1::2] = sorted_rows[1::2, ::-1]
    return sorted_rows
