"""`fullshard bench comm`, `benchmarks.host` and `benchmarks.scale`: rows and refusals."""

import json
import xml.etree.ElementTree as ET

import pytest
from benchmarks import scale

from fullshard.bench.comm import resolve
from fullshard.bench.measurement import Neighbours, Page
from fullshard.errors import ConfigError
from support import forked


def run(name, *arguments):
    command = ["fullshard", "bench", name] if name == "comm" else [f"benchmarks.{name}"]
    return forked.module(*command, *arguments)


def found_by(tmp_path, name, *arguments):
    """Returns the rows of a command and checks that the command stores the same."""
    done = run(name, "--rounds", "3", "--json", "--out", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stderr
    assert ("bench comm: about " in done.stderr) is (name == "comm")
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == found
    page = (tmp_path / f"{name}.md").read_text()
    assert f"{name} --rounds 3" in page
    assert ("LOADED" in page) is found["rows"][0]["loaded"]
    return found["rows"]


@pytest.mark.slow
def test_comm_has_a_row_for_each_transport_size_and_way(tmp_path):
    transports = ("--transport", "direct", "--transport", "c10d")
    rows = found_by(tmp_path, "comm", "--ranks", "2", "--mib", "1", "--mib", "2", *transports)
    assert [(row["num_bytes"] >> 20, row["name"], row["operation"]) for row in rows] == [
        (mib, name, operation)
        for mib in (1, 2)
        for name, operation in (
            ("copy", "copy"),
            ("direct", "fetch"),
            ("direct", "reduce"),
            ("c10d", "fetch"),
            ("c10d", "reduce"),
        )
    ]
    assert all(row["time_s"] > 0 and row["num_rounds"] == 3 for row in rows)
    ratios = [row["ratio_to_copy"] for row in rows]
    assert ratios[0] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert all(ratio["low"] <= ratio["value"] <= ratio["high"] for ratio in ratios)


@pytest.mark.slow
def test_host_has_both_engines_both_ways_and_the_goal_of_each_unit(tmp_path):
    rows = found_by(tmp_path, "host", "--world", "8")
    assert {(row["name"], row["pass"]) for row in rows} == {
        (name, way) for name in ("fullshard", "fsdp2") for way in ("forward", "backward")
    }
    goals = {row["num_parameters"]: row["goal_us"] for row in rows}
    assert goals == {2: 60, 9: 95, 12: 110, 48: 290}
    assert all(row["within_goal"] == (row["host_us"]["value"] <= row["goal_us"]) for row in rows)


@pytest.mark.slow
def test_scale_has_the_costs_of_each_world_and_plots(tmp_path):
    every = found_by(tmp_path, "scale", "--world", "8", "--world", "64")
    rows = [row for row in every if "time_us" in row]
    assert [(row["name"], row["world_size"]) for row in rows] == [
        (name, world) for name in ("planning", "bookkeeping") for world in (8, 64)
    ]
    assert rows[0]["ratio_to_first"]["value"] == rows[2]["ratio_to_first"]["value"] == 1.0
    drawing = ET.parse(tmp_path / "scale.svg").iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(drawing)) == 4
    counts = {(row["name"], row["world_size"]): row["count"] for row in every if "count" in row}
    assert [counts["groups", 8], counts["groups", 64]] == [3, 3]
    assert [counts["groups, hybrid", 8], counts["groups, hybrid", 64]] == [3, 4]
    assert counts["order agreement", 8] == counts["order agreement", 64] == [1, 48]
    assert counts["record", 64] < counts["record", 8] < counts["manifest", 8]
    assert counts["manifest", 64] == counts["resume", 64] > counts["manifest", 8]
    drawing = ET.parse(tmp_path / "scale_saves.svg").iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(drawing)) == 8


def test_the_buffers_of_scale_are_equally_long_in_every_world():
    config = scale.ShardConfig.of(None, wrap=["Block"])
    model = scale.Stack([scale.Block(scale.NUM_LINEARS, scale.WIDTH, bias=False)] * 2)
    spec = scale.spec_of(model)
    worlds = (*scale.WORLDS, scale.LARGEST)
    plans = [scale.make_plan(spec, config, scale.Topology(world)) for world in worlds]
    assert {unit.padding for plan in plans for unit in plan.units} == {0}


def test_a_transport_that_cannot_be_built_is_absent_with_the_reason():
    with pytest.raises(ConfigError, match="expected shared; the engine takes direct here") as why:
        resolve("shared", 1)
    told = ("comm", "Transports", "", [], ["by"], [], [], Neighbours())
    page = Page(*told, absent={"shared": str(why.value)})
    assert page.to_dict()["absent"] == ["shared"]
    assert f"Absent: shared. {why.value}" in page.to_markdown()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("comm", "--transport", "fake"), "expected one of c10d, direct, shared, got 'fake'"),
        (("comm", "--mib", "10000000"), "expected at most"),
        (("comm", "--ranks", "1"), "--ranks"),
        (("comm", "--out", "/proc/results"), "--out: expected a file in a writable folder"),
        (("host", "--world", "1"), "--world"),
        (("scale", "--world", "8", "--world", "12"), "got 12. The nearest is 8"),
    ],
)
def test_impossible_measurements_are_refused_at_once(arguments, expected):
    done = run(*arguments)
    assert done.returncode in (2, 3)
    assert expected in done.stderr
