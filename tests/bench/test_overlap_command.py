"""`python -m benchmarks.overlap`: its rows and its trace, without checking times."""

import json

import pytest
from benchmarks.overlap import Step
from benchmarks.timeline import LANES, Slice

from support import forked

SHARES = (
    "hidden",
    "hidden_forward",
    "hidden_backward",
    "hidden_backward_gathers",
    "hidden_backward_reductions",
)


@pytest.mark.slow
def test_overlap_has_a_row_a_depth_and_a_trace_of_both_ranks(tmp_path):
    found = forked.result("benchmarks.overlap", "--layers", "4", "--rounds", "3", "--out", tmp_path)
    assert [row["prefetch_depth"] for row in found["rows"]] == [0, 1, 2]
    for row in found["rows"]:
        assert all(0 <= row[share] <= 1 for share in SHARES)
        assert row["wire_s"] > 0
        assert row["step_s"] > 0
    assert "`python -m benchmarks.overlap --layers 4" in (tmp_path / "overlap.md").read_text()
    text = (tmp_path / "overlap_trace.json").read_text()
    assert len(text) < 1e6
    trace = json.loads(text)
    assert trace["otherData"].keys() == {
        "prefetch_depth",
        "hidden",
        "hidden_forward",
        "hidden_backward",
    }
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(box["pid"], box["tid"]) for box in boxes} == {
        (rank, lane) for rank in (0, 1) for lane in range(len(LANES))
    }
    for lane, what in enumerate(LANES[1:], start=1):
        gone = [box["name"] for box in boxes if (box["pid"], box["tid"]) == (0, lane)]
        assert set(gone) >= {f"blocks.{i}" for i in range(4)}, what


def piece(lane, what, start_ns, stop_ns, waited_ns=0):
    return Slice(lane, 1, what, "backward", start_ns, stop_ns, 0, waited_ns)


def test_compute_is_compared_with_the_busier_wire():
    one = (
        piece("compute", "backward", 0, 300),
        piece("gather", "gather", 0, 50),
        piece("reduce", "reduce", 0, 90),
        piece("reduce", "settle", 90, 100),
    )
    assert Step(1.0, (one, one)).compute_per_wire("backward") == pytest.approx(3.0)
    assert [p.what for p in Step(1.0, (one,)).wire("reduce", "settle")] == ["reduce", "settle"]
