"""Hidden shares of handmade spans, and the trace file for Chrome."""

import json
from itertools import pairwise

import pytest
from benchmarks.timeline import (
    LANES,
    Entry,
    OnWire,
    Slice,
    Timeline,
    chrome_trace,
    hidden_share,
    slices_of,
)

from fullshard.observe.hang import EventRing
from fullshard.planner.schedule import Event, EventKind

GATHER, FORWARD, RELEASE = EventKind.GATHER, EventKind.FORWARD, EventKind.RELEASE
BACKWARD, REDUCE = EventKind.BACKWARD, EventKind.REDUCE
ACCUMULATE, SETTLE = EventKind.ACCUMULATE, EventKind.SETTLE

# Unit 1 is gathered while nothing computes (0 to 100), unit 2 while unit 1 does (100 to 200).
STEP = [
    Entry(GATHER, 1, 64, 0, 2),
    Entry(GATHER, 2, 64, 2, 4),
    Entry(FORWARD, 1, 0, 4, 100),
    Entry(RELEASE, 1, 0, 190, 190),
    Entry(FORWARD, 2, 0, 190, 210),
    Entry(BACKWARD, 2, 0, 300, 301),
    Entry(REDUCE, 2, 64, 400, 402),
    Entry(BACKWARD, 1, 0, 410, 410),
    Entry(ACCUMULATE, 2, 0, 600, 605),
    Entry(SETTLE, -1, 0, 605, 650),
]
WIRES = [
    OnWire(1, 1, 101),
    OnWire(3, 101, 201),
    OnWire(401, 401, 501),
    OnWire(606, 606, 646),
]


def travels(slices):
    return {(p.what, p.unit): p for p in slices if p.lane != "compute"}


def test_a_message_is_exposed_for_as_long_as_its_wait_and_its_wire_overlap():
    found = travels(slices_of(STEP, WIRES))
    assert found[GATHER, 1].waited_ns == 100 - 4
    assert found[GATHER, 2].waited_ns == 201 - 190  # the rest of the wait is not due to the wire
    assert found[REDUCE, 2].waited_ns == 0  # it had arrived long before its wait
    assert found[SETTLE, -1].waited_ns == 40
    assert [p.during for p in found.values()] == ["forward", "forward", "backward", "backward"]


def test_the_hidden_share_is_one_minus_the_waited_share():
    slices = slices_of(STEP, WIRES)
    assert hidden_share(slices) == pytest.approx(1 - (96 + 11 + 0 + 40) / (100 + 100 + 100 + 40))
    gathers = [p for p in slices if p.lane == "gather"]
    assert hidden_share(gathers) == pytest.approx(1 - (96 + 11) / 200)
    assert hidden_share([p for p in slices if p.lane == "compute"]) is None


def test_without_wire_times_a_message_is_in_flight_until_its_wait_ends():
    found = travels(slices_of(STEP))
    assert (found[GATHER, 1].start_ns, found[GATHER, 1].stop_ns) == (2, 100)
    assert (found[GATHER, 2].start_ns, found[GATHER, 2].stop_ns) == (100, 210)  # one wire
    assert found[REDUCE, 2].stop_ns == 605
    assert (SETTLE, -1) not in found  # it gives no bytes


def test_events_without_a_wait_or_a_message_have_no_slice():
    assert not travels(slices_of([Entry(GATHER, 1, 64, 0, 2), Entry(FORWARD, 2, 0, 3, 4)]))
    assert not travels(slices_of([Entry(GATHER, 1, 0, 0, 2), Entry(FORWARD, 1, 0, 3, 4)]))


def test_compute_fills_the_time_between_events_under_the_unit_entered_last():
    pieces = [p for p in slices_of(STEP, WIRES) if p.lane == "compute"]
    found = [(p.what, p.unit, p.start_ns, p.stop_ns) for p in pieces]
    assert found == [
        ("wait", 1, 4, 100),
        ("forward", 1, 100, 190),
        ("wait", 2, 190, 210),
        ("forward", 2, 210, 300),
        ("wait", 2, 300, 301),
        ("backward", 2, 301, 400),
        ("backward", 2, 402, 410),
        ("wait", 1, 410, 410),
        ("backward", 1, 410, 600),
        ("wait", 2, 600, 605),
    ]


def test_the_wait_for_other_ranks_before_a_forward_is_a_separate_box():
    step = [Entry(EventKind.PUBLISH, -1, 0, 0, 30), *(e for e in STEP if e.start_ns >= 30)]
    slices = slices_of(step)
    first = slices[0]
    assert (first.lane, first.what, first.start_ns, first.stop_ns) == ("compute", "publish", 0, 30)
    named = [e["name"] for e in chrome_trace([slices], ["(root)", "a", "b"], {})["traceEvents"]]
    assert "publish the model" in named


def test_boxes_of_a_lane_do_not_cross():
    for messages in (WIRES, None):
        slices = slices_of(STEP, messages)
        for lane in LANES:
            boxes = sorted((p.start_ns, p.stop_ns) for p in slices if p.lane == lane)
            assert boxes
            assert all(a[1] <= b[0] for a, b in pairwise(boxes))


def test_the_trace_is_json_with_one_process_per_rank_and_one_thread_per_lane():
    slices = slices_of(STEP, WIRES)
    later = [Slice("compute", -1, "forward", "forward", 1000, 3000)]
    trace = chrome_trace([slices, later], ["(root)", "a", "b"], {"hidden": 0.5})
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert trace["otherData"] == {"hidden": 0.5}
    names = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(names) + len(boxes) == len(trace["traceEvents"])
    named = {(e["pid"], e["tid"], e["args"]["name"]) for e in names if e["name"] == "thread_name"}
    assert named == {(pid, tid, lane) for pid in (0, 1) for tid, lane in enumerate(LANES)}
    assert len(boxes) == len(slices) + 1
    assert min(e["ts"] for e in boxes) == 0
    (gather,) = [e for e in boxes if e["cat"] == "gather" and e["name"] == "b"]
    assert (gather["ts"], gather["dur"]) == (0.1, 0.1)  # microseconds
    assert gather["args"] == {"bytes": 64, "waited_us": 0.011}
    assert boxes[-1]["name"] == "the model"
    assert boxes[-1]["pid"] == 1
    assert (boxes[-1]["ts"], boxes[-1]["dur"]) == (0.999, 2.0)


def test_a_timeline_forwards_to_its_recorder_and_times_nested_spills():
    ring = EventRing()
    timeline = Timeline(ring)
    reduce, spill = Event(REDUCE, 1, 64), Event(EventKind.SPILL, 1)
    timeline.begin(reduce, 0)
    timeline.record(spill, 0)
    timeline.record(reduce, 0)
    assert ring.events() == (spill, reduce)
    inside, around = timeline.entries
    assert (inside.kind, around.kind, around.num_bytes) == ("spill", "reduce", 64)
    assert around.start_ns <= inside.start_ns == inside.stop_ns <= around.stop_ns
