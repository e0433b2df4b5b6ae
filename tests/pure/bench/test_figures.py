"""Figures of benchmarks show the measurements to scale."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.overlap import draw_trace
from benchmarks.ratios import draw_ratios

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(text):
    return ElementTree.fromstring(text)


def words_of(tree):
    return [element.text or "" for element in tree.iter(f"{SVG}text")]


def test_a_trace_has_a_lane_per_rank_and_kind_and_a_bar_per_event():
    trace = json.loads((RESULTS / "overlap_trace.json").read_text())
    tree = drawn(draw_trace(trace))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    titles = [title.text for title in tree.iter(f"{SVG}title")]
    num_keys = 5
    assert len(titles) == len(events) + num_keys
    assert {"rank 0, compute", "rank 1, gather", "rank 1, reduce"} <= set(words_of(tree))
    last = max(events, key=lambda event: event["ts"] + event["dur"])
    right = max(
        float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in tree.iter(f"{SVG}rect")
    )
    assert right == pytest.approx(950, abs=1), last["name"]


def row(name, value):
    ratio = {"value": value, "low": value - 0.05, "high": value + 0.05}
    return {"case": "29M", "name": name, "ratio_to_fsdp2": ratio}


def test_ratios_are_bars_to_scale_and_the_floor_is_a_line():
    rows = [row("fullshard", 0.5), row("fsdp2", 1.0), row("floor", 0.4)]
    tree = drawn(draw_ratios(rows, "fsdp2", "fullshard", "floor"))
    widths = {bar.get("class"): float(bar.get("width", 0)) for bar in tree.iter(f"{SVG}rect")}
    assert widths["other"] == pytest.approx(2 * widths["ours"], rel=1e-3)
    assert {"29M", "fullshard", "fsdp2", "0.500"} <= set(words_of(tree))
    assert "floor" not in words_of(tree)
    (line,) = (path for path in tree.iter(f"{SVG}path") if path.get("class") == "floor")
    at = float(line.get("d", "").removeprefix("M").split()[0])
    assert at - 150 == pytest.approx(0.8 * widths["ours"], rel=1e-2)


def test_without_the_reference_no_figure_is_drawn():
    assert draw_ratios([{**row("fullshard", 1.0), "ratio_to_fsdp2": None}], "a", "b", "c") == ""
