"""Copies of a step, counted outside the engine, are those that the layout requires."""

from dataclasses import replace

import pytest
from benchmarks import copies
from benchmarks.copies_rank import measure

from fullshard.bench.step import find_case
from support.ranks import on_ranks

SMALL_SUMS_BYTES = 16_384  # touched bits and squared norms, the only other copies of a step


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@on_ranks(2)
def test_no_byte_is_copied_beyond_the_arithmetic(compute):
    case = replace(find_case("tiny"), layers=4, compute=compute)  # more blocks than slots
    job = copies.Job(case, ("fullshard", "fullshard-direct", "fsdp2"))
    rows = copies.rows_of(case, measure(job))
    shared, direct, fsdp2 = rows
    for row in (shared, direct):
        beyond = row["copied_bytes"] - row["arithmetic_bytes"]
        assert 0 <= beyond <= SMALL_SUMS_BYTES, row
        assert row["copied_bytes"] < fsdp2["copied_bytes"]
    assert shared["received_bytes"] == 0 < direct["received_bytes"]
    # A home copies weights at most once per step, to cast them; parts are placed twice.
    assert shared["arithmetic_bytes"] < direct["arithmetic_bytes"]
