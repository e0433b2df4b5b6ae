"""The report: one page from the existing files of a run."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.observe.chart import Chart, Line, drawn, duration, table_of, thinned
from fullshard.observe.metrics import (
    EvalRow,
    MetricsWriter,
    SampleRow,
    SaveRow,
    StepRow,
    keep_rows,
    read_machine,
    read_rows,
    sampled,
)
from fullshard.observe.report import page_of, settings_of, write_report


def step_row(step: int, **changes) -> StepRow:
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
    """Returns the folder of a run with all files."""
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
    """Records what a browser would load, and unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [v for name, v in attrs if name in ("src", "href") and v != "data:,"]
        if tag not in ("meta", "br", "input", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Handles a self-closing tag."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def written(*runs, target=None) -> str:
    """Returns the page of runs without scripts, which need nothing else."""
    page = write_report(*runs, target=target).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert "default-src 'none'" in page  # the policy with which the browser blocks the network
    html = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "url(" not in html
    assert "@import" not in html
    return html


def data_of(page: str) -> dict:
    """Returns the data of the page's charts."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def lines_of(page: str) -> dict[str, list[str]]:
    """Returns names of lines by the titles of their charts."""
    return {one["title"]: [i["name"] for i in one["lines"]] for one in data_of(page)["charts"]}


def test_report_shows_loss_baseline_plan_environment_and_sample(run):
    page = written(run)
    for text in ("3.2500", "interpolated bigram: 3.5000", "3.11.7", "12 s", "200.0 MiB"):
        assert text in page
    assert 'class="good"' in page
    assert len(lines_of(page)) == 7
    assert lines_of(page)["Loss"] == ["training", "held out", "interpolated bigram, held out"]
    assert data_of(page)["tables"]["steps"]["loss"][:2] == [5.9, 5.8]
    assert "Linear" in page or "Sequential" in page
    assert "prefers-color-scheme: dark" in page


def test_planned_and_measured_values_are_side_by_side(run):
    record = json.loads((run / "run.json").read_text())
    expected = {"expected_peak_bytes": 200 << 20, "expected_tokens_per_s": 1250.0}
    expected["library_bytes"] = 50 << 20  # torch's allocator does not measure it
    record["planned"] = expected | {"expected_step_time_s": 0.4, "expected_wait_s": 0.05}
    (run / "run.json").write_text(json.dumps(record))
    before = written(run)
    for what, *values in (
        ("peak memory per rank", "150.0 MiB", "200.0 MiB", "1.33"),
        ("step time", "400 ms", "500 ms", "1.25"),
        ("tokens per second", "1,250", "1,000", "0.80"),
        ("exposed communication", "50 ms", "100 ms", "2.00"),
    ):
        cells = "".join(f'<td class="num">{value}</td>' for value in values)
        assert f"<td>{what}</td>{cells}" in before
    lines = lines_of(before)
    assert "Pause of training per checkpoint" not in lines
    for title in ("Time per step", "Throughput of all ranks", "Exposed communication per step"):
        assert lines[title][-1] == "planned"
    assert lines["Memory of the largest rank"][-1] == "planned peak"
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(SaveRow(10, 0.25))
    writer.close()
    page = written(run)
    assert lines_of(page)["Pause of training per checkpoint"] == ["checkpoint"]
    assert data_of(page)["tables"]["saves"] == {"step": [10], "save_s": [0.25]}


def test_memory_of_a_process_is_planned_in_the_same_terms(run):
    """On a CPU the whole process is measured, so its memory before the model is planned too."""
    record = json.loads((run / "run.json").read_text())
    record["planned"] = {
        "expected_peak_bytes": 150 << 20,
        "measures_process": True,
        "process_bytes": 40 << 20,
    }
    (run / "run.json").write_text(json.dumps(record))
    page = written(run)
    assert 'peak memory per rank, libraries included</td><td class="num">190.0 MiB' in page
    (chart,) = (one for one in data_of(page)["charts"] if one["title"].startswith("Memory"))
    assert chart["lines"][-1]["level"] == 190


def test_text_of_the_run_is_escaped(run):
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(SampleRow(10, "<i>once", "upon</pre><script>alert(1)</script>"))
    writer.close()
    (run / "config.yaml").write_text(
        "training:\n  run_name: '</script><b>x'  # command line\nseed: 3  # <origin>\n"
    )
    page = written(run)
    assert "if a &lt; b &amp; c:" in page
    assert "&lt;origin&gt;" in page
    assert "<b>&lt;i&gt;once</b>upon&lt;/pre&gt;&lt;script&gt;" in page
    other = run / "other"
    other.mkdir()
    (other / "run.json").write_text((run / "run.json").read_text())
    both = written(run, other, target=run / "both.html")
    assert "</script><b>x" not in both
    assert "&lt;/script&gt;&lt;b&gt;x" in both
    assert data_of(both)["charts"][0]["lines"][0]["name"] == "</script><b>x"


def test_report_can_be_drawn_again(run):
    assert written(run) == written(run)


def test_settings_that_were_set_come_before_defaults(run):
    text = "model:\n  config: {a: [1, 2]}   # a.yaml:3\ndata:\n  path: null  # default\n"
    text += 'training:\n  learning_rate: 1e-4   # command line\n  project: "a # b"  # default\n'
    assert settings_of(text) == [
        ("model.config", "{a: [1, 2]}", "a.yaml:3"),
        ("data.path", "null", "default"),
        ("training.learning_rate", "1e-4", "command line"),
        ("training.project", '"a # b"', "default"),
    ]
    (run / "config.yaml").write_text(text)
    page = written(run)
    assert page.index("training.learning_rate") < page.index("data.path")
    for broken in ("a: [", "- 1", "", "a: b: c"):
        assert settings_of(broken) == []


def test_the_starting_command_and_machine_usage_are_shown(run):
    record = json.loads((run / "run.json").read_text())
    record["started_by"] = {
        "command_line": "fullshard train a.yaml max_steps=5",
        "folder": "/somewhere",
        "git commit": "0123456789abcdef, with changes",
    }
    (run / "run.json").write_text(json.dumps(record))
    row = {"time": 1000.0, "cpu_percent": 50.0, "memory_bytes": 2**31, "gpu0_watts": 300.0}
    row |= {f"gpu{i}_{what}": 70.0 for i in (0, 1) for what in ("percent", "watts")}
    (run / "machine-0.jsonl").write_text(json.dumps(row) + '\n{"time": 10')
    page = written(run)
    for text in ("fullshard train a.yaml max_steps=5", "/somewhere", "0123456789abcdef, with"):
        assert text in page
    lines = lines_of(page)
    assert lines["Processor utilization of the machine"] == ["in use"]
    assert lines["GPU utilization"] == ["GPU 0", "GPU 1"]
    (run / "machine-1.jsonl").write_text('{"time": 1001.0, "cpu_percent": 1.0}\n')
    lines = lines_of(written(run))
    assert lines["Processor utilization of the machine"] == ["node 0, in use", "node 1, in use"]
    assert lines["GPU utilization"] == ["node 0, GPU 0", "node 0, GPU 1"]


def test_the_last_sample_of_a_machine_is_read_if_it_is_whole(tmp_path):
    """A file may be copied without its last newline."""
    (tmp_path / "machine-0.jsonl").write_text('{"time": 1.0}\n{"time": 2.0}')
    assert read_machine(tmp_path) == {"0": [{"time": 1.0}, {"time": 2.0}]}


def test_the_shortest_run_has_a_sample_of_its_machine(tmp_path):
    with sampled(tmp_path, 3):
        pass
    [row] = read_machine(tmp_path)["3"]
    assert 0 < row["memory_bytes"] < row["memory_total_bytes"]


def test_runs_are_compared_by_curves_results_and_settings(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("run.json", "config.yaml"):
        (other / name).write_text((run / name).read_text())
    (other / "config.yaml").write_text("seed: 4  # default\n")
    writer = MetricsWriter(other / "metrics.jsonl")
    writer.write(step_row(1, loss=7.5))
    writer.write(step_row(2, loss=None, grad_norm=None))
    writer.close()
    page = written(run, other, target=other / "both.html")
    assert lines_of(page)["Loss: training"] == [run.name, other.name]
    assert lines_of(page)["Loss: held out"] == [run.name]
    assert data_of(page)["tables"]["1 steps"]["loss"] == [7.5, None]
    row = '<th scope="row">training loss, nats per token</th><td class="num">4.0000</td>'
    assert row + '<td class="num">7.5000</td>' in page
    assert re.search(r'seed</th><td class="value">3</td><td class="value">4</td>', page)
    assert lines_of(page_of([run, run]))["Loss: training"] == [f"{run.name} ({run})"] * 2


def test_failed_run_without_steps_has_a_report_with_the_reason(run):
    record = json.loads((run / "run.json").read_text())
    error = {"type": "DataError", "message": "no <text>", "rank": None}
    record |= {"status": "failed", "error": error, "measured": {}}
    (run / "run.json").write_text(json.dumps(record))
    for name in ("metrics.jsonl", "plan.json", "sample.txt", "config.yaml"):
        (run / name).unlink()
    page = written(run)
    assert "DataError" in page
    assert "no &lt;text&gt;" in page
    assert data_of(page)["charts"] == []


def test_a_baseline_that_was_not_beaten_is_marked(run):
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(EvalRow(20, 3.75))
    writer.close()
    assert 'class="bad"' in written(run)


def test_metrics_cut_off_by_a_crash_are_read_up_to_the_cut(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    rows = list(read_rows(run / "metrics.jsonl"))
    assert len(rows) == 21
    assert rows[-1] == {"step": 20, "eval_loss": 3.25}
    written(run)


def test_torn_rows_are_skipped_and_reported_when_a_run_resumes(run, caplog):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    torn = [b'{"step": 2, "lo\n', b"\xff\x00\n", b"[1, 2]\n", b'{"step": 3, "loss": 1.0}\n']
    path.write_bytes(b"".join([*lines[:3], *torn, *lines[3:], b"[" * 100_000 + b"\n"]))
    step, evaluation = keep_rows(path, 20)
    assert (step.step, evaluation.step) == (20, 20)
    assert len(list(read_rows(path))) == 21
    assert f"{path}: left out 5 line(s) that are torn or of another version" in caplog.text
    written(run)


def test_a_page_leaves_out_numbers_that_no_browser_reads(run, caplog):
    path, machine = run / "metrics.jsonl", run / "machine-0.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file, machine.open("a") as other:
        for word in ("1e999", "NaN", "-Infinity"):
            file.write(json.dumps({**first, "loss": "?"}).replace('"?"', word) + "\n")
            other.write(f'{{"time": 9.0, "cpu_percent": {word}}}\n')
    page = written(run)
    assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", page.partition('id="data">')[2]))
    data_of(page)
    assert f"{path}: left out 3 line(s)" in caplog.text


def test_a_page_reports_skipped_rows_of_another_version(run, caplog):
    path = run / "metrics.jsonl"
    written(run)
    assert caplog.text == ""
    rows = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps({**row, "later": 1}) + "\n" for row in rows))
    written(run)
    assert f"{path}: left out 21 line(s) that are torn or of another version" in caplog.text


def test_row_that_is_not_finite_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        writer.write(step_row(1, loss=float("nan")))
    writer.close()


def test_skipped_steps_are_gaps_that_the_page_names(run):
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(step_row(21, loss=None, grad_norm=None))
    writer.write(step_row(22))
    writer.close()
    page = written(run)
    assert "1 update(s) were skipped because numbers were not finite: step 21" in page
    assert data_of(page)["tables"]["steps"]["loss"][-2:] == [None, 3.8]
    assert "4.7000" not in page
    assert "3.8000" in page


@pytest.mark.parametrize(
    ("num_rows", "kept"), [(0, 0), (1, 1), (10_000, 10_000), (10_001, 10_001 // 4)]
)
def test_a_chart_has_all_of_ten_thousand_points_and_the_extremes_of_more(num_rows, kept):
    values = [float(step % 7) for step in range(num_rows)]
    if num_rows > 5000:
        values[5000] = 1e9
    table = thinned({"step": list(range(num_rows)), "loss": values})
    assert kept <= len(table["step"]) <= 10_000
    assert num_rows <= 5000 or 1e9 in table["loss"]
    assert table["step"] == sorted(set(table["step"]))
    assert not num_rows or table["step"][-1] == num_rows - 1


def test_numbers_that_are_not_finite_become_gaps():
    rows = [{"x": 1, "y": float("nan")}, {"x": 2, "y": float("inf")}, {"y": 1 / 3, "z": "text"}]
    table = table_of(rows)
    assert table_of([{"time": 1795644184.675}]) == {"time": [1795644184.675]}
    assert table == {"x": [1, 2, None], "y": [None, None, 0.333333], "z": [None] * 3}


def test_charts_without_a_point_are_left_out():
    tables = {"steps": {"step": [1, 2], "loss": [None, None], "rate": [1.0, 2.0]}}
    loss = Chart("loss", "", [Line("loss", "steps", "loss"), Line("level", level=1.0)])
    lines = [Line("rate", "steps", "rate"), Line("none", "other", "rate"), Line("level", level=2.0)]
    assert drawn(tables, [loss])["charts"] == []
    (found,) = drawn(tables, [Chart("rate", "", lines)])["charts"]
    assert [line["name"] for line in found["lines"]] == ["rate", "level"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (725, "12 min 05 s"), (11220, "3 h 07 min")],
)
def test_durations_have_units(seconds, text):
    assert duration(seconds) == text
