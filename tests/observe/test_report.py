"""The report: one page from a run's files, whatever of them there is."""

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.errors import ConfigError
from fullshard.observe.chart import (
    Axes,
    Series,
    area_chart,
    line_chart,
    mean_of_windows,
    ticks,
)
from fullshard.observe.metrics import EvalRow, MetricsWriter, SaveRow, StepRow, keep_rows, read_rows
from fullshard.observe.report import write_report


def step_row(step, **changes):
    fields = {
        "step": step,
        "epoch": step / 10,
        "loss": 6.0 - step / 10,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens_per_s": 1000.0,
        "samples_per_s": 10.0,
        "step_time_s": 0.5,
        "data_s": 0.1,
        "compute_s": 0.3,
        "comm_s": 0.1,
        "memory_bytes": 100 * 2**20,
        "memory_peak_bytes": 200 * 2**20,
    }
    return StepRow(**{**fields, **changes})


@pytest.fixture
def run(tmp_path):
    """A run's folder with everything in it."""
    record = {
        "command": "train",
        "status": "finished",
        "began": "2026-01-01T00:00:00+00:00",
        "error": None,
        "measured": {"eval_loss": 3.25, "baseline_loss": 3.5, "wall_s": 12.0},
        "environment": {"python": "3.11.7"},
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 21):
        writer.write(step_row(step))
    writer.write(EvalRow(20, 3.25))
    writer.close()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    plan = fs.plan(model, wrap=["Sequential"], world_size=2)
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "config.yaml").write_text("seed: 3  # <origin>\n")
    (tmp_path / "sample.txt").write_text("if a < b & c:\n")
    return tmp_path


class Checker(HTMLParser):
    """Notes what a browser would load, and tags that are left open."""

    def __init__(self):
        super().__init__()
        self.loads, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """A tag that closes itself."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(run):
    page = write_report(run).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert "url(" not in page
    assert "@import" not in page
    return page


def test_report_shows_loss_baseline_plan_environment_and_sample(run):
    page = page_of(run)
    for text in ("3.2500", "interpolated bigram: 3.5000", "3.11.7", "12 s", "200.0 MiB"):
        assert text in page
    assert 'class="good"' in page
    assert page.count("<svg") == 7
    assert "Linear" in page or "Sequential" in page
    assert "prefers-color-scheme: dark" in page


def test_what_was_planned_stands_beside_what_was_measured(run):
    record = json.loads((run / "run.json").read_text())
    expected = {"expected_peak_bytes": 150 << 20, "expected_tokens_per_s": 1250.0}
    record["planned"] = expected | {"expected_step_time_s": 0.4, "expected_wait_s": 0.05}
    (run / "run.json").write_text(json.dumps(record))
    before = page_of(run)
    for what, planned, measured in (
        ("memory per rank", "150.0 MiB", "200.0 MiB"),
        ("step time", "400 ms", "500 ms"),
        ("tokens per second", "1,250", "1,000"),
        ("exposed communication", "50 ms", "100 ms"),
    ):
        cells = "".join(f'<td class="num">{value}</td>' for value in (planned, measured))
        assert f"<td>{what}</td>{cells}" in before
    assert before.count("</i>planned</span>") == 2  # throughput and communication
    assert "Pause of training" not in before
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(SaveRow(10, 0.25))
    writer.close()
    page = page_of(run)
    assert page.count("<svg") == before.count("<svg") + 1
    assert "<title>checkpoint: 250 at 10</title>" in page


def test_text_of_the_run_is_escaped(run):
    page = page_of(run)
    assert "if a &lt; b &amp; c:" in page
    assert "&lt;origin&gt;" in page


def test_report_can_be_drawn_again(run):
    assert page_of(run) == page_of(run)


def test_failed_run_without_steps_has_a_report_with_the_reason(run):
    record = json.loads((run / "run.json").read_text())
    error = {"type": "DataError", "message": "no <text>", "rank": None}
    record |= {"status": "failed", "error": error, "measured": {}}
    (run / "run.json").write_text(json.dumps(record))
    for name in ("metrics.jsonl", "plan.json", "sample.txt", "config.yaml"):
        (run / name).unlink()
    page = page_of(run)
    assert "DataError" in page
    assert "no &lt;text&gt;" in page
    assert "<svg" not in page


def test_baseline_that_was_not_beaten_is_shown_as_such(run):
    record = json.loads((run / "run.json").read_text())
    record["measured"]["eval_loss"] = 3.75
    (run / "run.json").write_text(json.dumps(record))
    assert 'class="bad"' in page_of(run)


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a run's folder with run\.json"):
        write_report(tmp_path)


def test_metrics_that_were_cut_off_by_a_crash_are_read_up_to_there(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    rows = list(read_rows(run / "metrics.jsonl"))
    assert len(rows) == 21
    assert rows[-1] == {"step": 20, "eval_loss": 3.25}
    page_of(run)


def test_torn_rows_are_left_out_and_said_when_a_run_goes_on(run, caplog):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    torn = [b'{"step": 2, "lo\n', b"\xff\x00\n", b"[1, 2]\n", b'{"step": 3, "loss": 1.0}\n']
    path.write_bytes(b"".join([*lines[:3], *torn, *lines[3:], b"[" * 100_000 + b"\n"]))
    step, evaluation = keep_rows(path, 20)
    assert (step.step, evaluation.step) == (20, 20)
    assert len(list(read_rows(path))) == 21
    assert f"{path}: left out 5 torn line(s)" in caplog.text
    page_of(run)


def test_row_that_is_not_finite_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        writer.write(step_row(1, loss=float("nan")))
    writer.close()


def points(svg, tag):
    root = ElementTree.fromstring(svg.partition("</svg>")[0] + "</svg>")
    return [
        [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]
        for element in root.iter(tag)
    ]


def test_line_goes_through_its_points_on_common_scales():
    axes = Axes("x", "y", from_zero=True)
    first, second = Series("a", [0, 1, 2], [0, 1, 2], 1), Series("b", [0, 2], [2, 0], 2)
    (a, b) = points(line_chart([first, second], axes), "polyline")
    assert a[0] == pytest.approx((b[0][0], b[1][1]), abs=0.1)
    assert a[2] == pytest.approx((b[1][0], b[0][1]), abs=0.1)
    assert a[1][1] == pytest.approx((a[0][1] + a[2][1]) / 2, abs=0.1)
    assert a[0][1] > a[2][1]  # y grows downwards on a page


def test_areas_are_stacked():
    axes = Axes("x", "y", from_zero=True)
    series = [Series("a", [0, 1], [1, 1], 1), Series("b", [0, 1], [1, 3], 2)]
    lower, upper = points(area_chart(series, axes), "polygon")
    assert upper[2:] == lower[1::-1]  # the floor of one is the ceiling of the other
    heights = [lower[2][1] - lower[1][1], upper[2][1] - upper[1][1]]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.3)


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0, 0.0], [-3.0, 2.0]])
def test_flat_and_single_points_can_be_drawn(values):
    svg = line_chart([Series("a", list(range(len(values))), values, 1)], Axes("x", "y"))
    assert "nan" not in svg


def test_nothing_is_drawn_of_nothing():
    assert line_chart([Series("a", [], [], 1)], Axes("x", "y")) == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.9, 6.3, [3, 4, 5, 6]), (0, 0.003, None)],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    found = ticks(low, high)
    assert expected is None or found == pytest.approx(expected)
    assert all(low <= tick <= high for tick in found)
    assert 3 <= len(found) <= 7


def test_long_series_become_means_of_windows():
    assert mean_of_windows(list(range(10)), 5) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert len(mean_of_windows([1.0] * 1001, 600)) <= 600
