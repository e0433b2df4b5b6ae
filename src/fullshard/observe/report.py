"""Pages that need no network: `report.html` about a run, a comparison of runs, a plan's page.

The report is drawn from the files in the run's folder: run.json, metrics.jsonl, saves.jsonl,
machine-N.jsonl, samples.jsonl, plan.json, config.yaml and sample.txt. Missing files are left out,
so a failed run has a report too, and it can be drawn again at any time, also while the run goes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from fullshard.config.regular_files import did_you_mean_path
from fullshard.errors import ConfigError, FullshardError, untrusted
from fullshard.observe.chart import (
    Chart,
    Line,
    Table,
    drawn,
    duration,
    layout,
    render,
    table_of,
    write_page,
)
from fullshard.observe.metrics import SAMPLES, SAVES, read_machine, read_rows
from fullshard.outlook.player import Bar, Lane, held_over_time
from fullshard.outlook.predict import Outlook
from fullshard.outlook.search import Study
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.planner.text import check_version, human_bytes, like_neighbours
from fullshard.planner.tracing import TensorKind

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The files of one run's folder, as the page shows them."""

    folder: Path
    record: Row
    steps: list[Row]
    evaluations: list[Row]
    saves: list[Row]
    samples: list[Row]
    machine: dict[str, list[Row]]
    settings: list[tuple[str, str, str]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads a run's folder.

        Raises:
            ConfigError: The folder does not contain a run.
        """
        record = read_record(folder)
        rows = list(read_rows(folder / "metrics.jsonl"))
        return cls(
            folder,
            record,
            [row for row in rows if "loss" in row],
            [row for row in rows if "eval_loss" in row],
            list(read_rows(folder / SAVES)),
            list(read_rows(folder / SAMPLES)),
            read_machine(folder),
            settings_of(_text(folder / "config.yaml")),
        )

    @property
    def name(self) -> str:
        """training.run_name, or the folder's name."""
        named = {key: value for key, value, _ in self.settings}.get("training.run_name", "null")
        return self.folder.resolve().name if named == "null" else named.strip("'\"")

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was skipped because the loss or its gradients were not finite."""
        return [
            row["step"] for row in self.steps if row["loss"] is None or row["grad_norm"] is None
        ]

    @property
    def late(self) -> list[Row]:
        """The second half of the steps, when caches are warm."""
        return self.steps[len(self.steps) // 2 :]

    @property
    def planned(self) -> Row:
        """The forecast in the measured quantities: of a CPU's process, or of a GPU's tensors."""
        planned = dict(self.record.get("planned", {}))
        process = planned.get("process_bytes") if planned.get("measures_process") else 0
        if planned.get("expected_peak_bytes") is not None:
            planned["expected_peak_bytes"] += (process or 0) - (planned.get("library_bytes") or 0)
        return planned

    @property
    def progress(self) -> tuple[int, int | None, float | None]:
        """Finished steps, steps of the run, and seconds left while it goes."""
        done = self.steps[-1]["step"] if self.steps else 0
        every = self.planned.get("num_steps")
        if every is None or self.record["status"] != "running" or not self.late:
            return done, every, None
        return done, every, (every - done) * median(row["step_time_s"] for row in self.late)

    def facts(self) -> list[tuple[str, Any]]:
        """How the run was started, and on what."""
        process, resume = (self.record.get(name) or {} for name in ("process", "resume"))
        started = dict(self.record.get("started_by") or {})
        found = {
            "name": self.name,
            "command line": started.pop("command_line", None),
            "in": started.pop("folder", None),
            **started,
            "host": process.get("host"),
            "ranks": self.planned.get("world_size"),
            "parameters": f"{self.planned.get('num_parameters', 0):,}",
            "resumed from": resume.get("path"),
        }
        return [(name, value) for name, value in found.items() if value not in (None, "0")]

    def tables(self, prefix: str = "") -> dict[str, Table]:
        """The numbers of the charts."""
        parts = {"steps": self.steps, "evaluations": self.evaluations, "saves": self.saves}
        parts |= {f"machine {node}": rows for node, rows in self.machine.items()}
        return {prefix + name: table_of(rows) for name, rows in parts.items()}


def write_report(*folders: Path, target: Path | None = None) -> Path:
    """Writes the page of a run into its folder, or a page that compares several runs.

    Args:
        *folders: Folders of runs.
        target: File to write; None: report.html in the folder of the only run.

    Raises:
        ConfigError: A folder does not contain a run, or the file cannot be written.
    """
    target, page = target or folders[0] / "report.html", page_of(folders)
    return write_page(target, page)


def page_of(folders: Sequence[Path], *, live: bool = False) -> str:
    """The page of a run, or the comparison of several.

    Args:
        folders: Folders of runs.
        live: The page asks its server for itself again and again.
    """
    runs = [Run.read(folder) for folder in folders]
    names, expected = ", ".join(map(str, folders)), "files as a run writes them"
    with untrusted(
        f"RUN_DIR: '{names}'", expected, ConfigError, "Check run.json, or pass another folder."
    ):
        if len(runs) > 1:
            return render("compare.html.j2", **compared(runs), live=live)
        return render("report.html.j2", **gather(runs[0]), live=live)


def gather(run: Run) -> dict[str, Any]:
    """Everything that the page of a run shows."""
    plan = _plan(run.folder / "plan.json")
    units = plan.units if isinstance(plan, Plan) else ()
    return {
        "run": run,
        "record": run.record,
        "data": drawn(run.tables(), _charts(run)),
        "compared": _compared(run),
        "plan": plan,
        "arrays": plan.arrays if isinstance(plan, ArraysPlan) else (),
        "runs": like_neighbours(units),
        "sample": _text(run.folder / "sample.txt"),
    }


def read_record(run: Path) -> dict[str, Any]:
    advice = did_you_mean_path(run) or "Pass the output_dir of a run."
    with untrusted(f"RUN_DIR: '{run}'", "a run's folder with run.json", ConfigError, advice):
        record: Any = json.loads((run / "run.json").read_text(encoding="utf-8"))
        record = record if isinstance(record, dict) else {}
        held = (record.get("measured"), record.get("planned", {}))
        if not all(isinstance(one, dict) for one in held):
            raise ValueError("it is not the record of a run")
        if lacks := {"command", "status", "began", "error"} - record.keys():
            raise ValueError(f"it lacks {min(lacks)}")
    check_version(record.get("schema_version", 1), f"'{run / 'run.json'}'")
    return record


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def settings_of(text: str) -> list[tuple[str, str, str]]:
    """Key, value and origin of every line of a run's config.yaml; nothing if it cannot be read."""
    lines = text.splitlines()

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str, str]]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from walk(value, f"{name}.")
                continue
            start, end = value.start_mark, value.end_mark
            yield name, text[start.index : end.index], lines[end.line].partition("  # ")[2]

    try:
        return list(walk(yaml.compose(text), ""))
    except (yaml.YAMLError, RecursionError, IndexError):
        return []


# ---- the page of running runs --------------------------------------------------------------------


def page_server(render: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """A server of one page, which is rendered again for every request.

    Args:
        render: Returns the page; a FullshardError becomes the response, and the server continues.
        port: Port to listen on; 0: a free one.

    Raises:
        ConfigError: The port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, text = HTTPStatus.OK, "text/html", ""
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):  # a name of another site that leads here
                status, kind, text = HTTPStatus.FORBIDDEN, "text/plain", "expected a local address"
            elif self.path.partition("?")[0] != "/":
                status, kind, text = HTTPStatus.NOT_FOUND, "text/plain", "the page is at /"
            else:
                try:
                    text = render()
                except FullshardError as error:
                    status, kind, text = HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port: expected a free port, got {port} ({error}). Leave it out to use any free one."
        ) from error


# ---- charts --------------------------------------------------------------------------------------


def _charts(run: Run) -> Iterator[Chart]:
    values = {**run.planned, **run.record["measured"]}
    for chart in layout():
        lines = [one for line in chart["lines"] for one in _expanded(line, run.machine)]
        yield Chart(**{**chart, "lines": [_with_level(line, values) for line in lines]})


def _with_level(line: Row, values: Row) -> Line:
    """A line; a level becomes its value in the chart's unit, or NaN if it is not known."""
    if "level" not in line:
        return Line(**line)
    value = values.get(line["level"])
    level = math.nan if value is None else value * line.get("scale", 1)
    return Line(**{**line, "level": level, "style": "dashed"})


def _expanded(line: Row, machine: dict[str, list[Row]]) -> Iterator[Row]:
    """A line of a machine, for each node and GPU; other lines as they are."""
    if "{node}" not in line.get("table", ""):
        yield line
        return
    for at, (node, rows) in enumerate(machine.items()):
        num_gpus = sum(name.endswith("_watts") for name in (rows[-1] if rows else ()))
        for gpu in range(num_gpus if "{gpu}" in line["y"] else 1):
            name = f"node {node}, {line['name']}" if len(machine) > 1 else line["name"]
            color = line.get("color", 1) + gpu + at * max(2, num_gpus)
            texts = {"name": name, "table": line["table"], "y": line["y"]}
            labels = {key: text.format(node=node, gpu=gpu) for key, text in texts.items()}
            yield {**line, **labels, "color": color}


def _column(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


# ---- comparison ----------------------------------------------------------------------------------


def compared(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the comparison of several runs shows."""
    names = [run.name for run in runs]
    names = [
        name if names.count(name) == 1 else f"{name} ({run.folder})"
        for name, run in zip(names, runs, strict=True)
    ]
    charts = [
        Chart(
            chart["title"] if len(lines) == 1 else f"{chart['title']}: {line['name']}",
            chart["unit"],
            [
                Line(name, f"{at} {line['table']}", line["y"], 1 + at, scale=line.get("scale", 1))
                for at, name in enumerate(names)
            ],
            is_wide=line["y"] == "loss",
            from_zero=chart.get("from_zero", True),
        )
        for chart in layout()
        for lines in [[line for line in chart["lines"] if "table" in line]]
        for line in lines
        if "x" not in chart and chart.get("is_compared", True)
    ]
    tables = {
        name: table for at, run in enumerate(runs) for name, table in run.tables(f"{at} ").items()
    }
    values = [{key: value for key, value, _ in run.settings} for run in runs]
    keys = dict.fromkeys(key for one in values for key in one)
    return {
        "runs": list(zip(names, runs, strict=True)),
        "results": _results(runs),
        "differ": [
            (key, found)
            for key in keys
            if len(set(found := [one.get(key, "-") for one in values])) > 1
        ],
        "data": drawn(tables, charts),
    }


# The rows of a comparison; "-" where a run has no such number.
_RESULTS: dict[str, Callable[[Run], Any]] = {
    "status": lambda run: run.record["status"],
    "steps": lambda run: f"{run.progress[0]:,}",
    "training loss, nats per token": lambda run: (
        f"{[row['loss'] for row in run.steps if row['loss'] is not None][-1]:.4f}"
    ),
    "held-out loss, nats per token": lambda run: f"{run.evaluations[-1]['eval_loss']:.4f}",
    "lowest held-out loss": lambda run: f"{min(_column(run.evaluations, 'eval_loss')):.4f}",
    "tokens per second": lambda run: f"{median(_column(run.late, 'tokens_per_s')):,.0f}",
    "step time": lambda run: _milliseconds(median(_column(run.late, "step_time_s"))),
    "peak memory of the largest rank": lambda run: human_bytes(
        max(_column(run.steps, "memory_peak_bytes"))
    ),
    "wall time": lambda run: duration(run.record["measured"]["wall_s"]),
    "ranks": lambda run: run.planned["world_size"],
    "git commit": lambda run: run.record["started_by"]["git commit"][:12],
}


def _results(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """One row per result that a run has, with the value of each run."""
    rows = {name: [_value(run, result) for run in runs] for name, result in _RESULTS.items()}
    return [(name, values) for name, values in rows.items() if set(values) != {"-"}]


def _value(run: Run, result: Callable[[Run], Any]) -> str:
    try:
        return str(result(run))
    except (LookupError, TypeError, ValueError):  # the run has no such number
        return "-"


# ---- plan ----------------------------------------------------------------------------------------


def _compared(run: Run) -> list[tuple[str, str, str, str]]:
    """Name, planned, measured, ratio; speeds are medians of the second half of the steps."""
    planned, late = run.planned, run.late
    if not late:
        return []
    peak = max(_column(run.steps, "memory_peak_bytes"))
    memory = "peak memory per rank"
    if planned.get("measures_process"):
        memory += ", libraries included"

    def typical(name: str) -> float:
        return median(_column(late, name))

    rows = (
        (memory, planned.get("expected_peak_bytes"), peak, human_bytes),
        ("step time", planned.get("expected_step_time_s"), typical("step_time_s"), _milliseconds),
        (
            "tokens per second",
            planned.get("expected_tokens_per_s"),
            typical("tokens_per_s"),
            "{:,.0f}".format,
        ),
        ("exposed communication", planned.get("expected_wait_s"), typical("comm_s"), _milliseconds),
    )
    return [
        (
            what,
            "-" if expected is None else show(expected),
            show(measured),
            f"{measured / expected:.2f}" if expected else "-",
        )
        for what, expected, measured, show in rows
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.4g} ms"


def _plan(path: Path) -> Plan | ArraysPlan | None:
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        return ArraysPlan.from_json(text) or Plan.from_json(text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s is not shown: %s", path, error)
        return None


# ---- the page of a plan --------------------------------------------------------------------------


WIDTH, ROW_HEIGHT, TOP, LEFT, RIGHT = 1200.0, 34.0, 10.0, 80.0, 14.0


def write_plan_page(study: Study, strategies: Sequence[Outlook], target: Path) -> Path:
    """Writes the page of a configuration.

    Args:
        study: Plan, forecast, advice and scaling of the configuration.
        strategies: Forecasts of the other strategies.
        target: File to write.

    Raises:
        ConfigError: The file cannot be written.
    """
    outlook = study.outlook
    bars, phases = outlook.bars(), outlook.phases(study.storage)
    page = render(
        "plan.html.j2",
        study=study,
        outlook=outlook,
        plan=outlook.plan,
        phases=phases,
        places=[n for n in ("device", "host", "disk") if any(getattr(p, n) for p in phases)],
        checkpoint_bytes=outlook.plan.checkpoint_bytes,
        strategies=strategies,
        data=_plan_charts(study, bars),
        schedule=_schedule(outlook, bars),
        live=False,
    )
    return write_page(target, page)


def _plan_charts(study: Study, bars: Sequence[Bar]) -> dict[str, Any]:
    """Allocated memory during a micro-batch, stacked by kind, and efficiency over ranks."""
    rows, moments = study.outlook.rows, held_over_time(study.outlook.rows, bars)
    unit, scale = _time_unit(moments[-1].time_s) if moments else ("", 1.0)
    state = [row for row in rows if row.name not in list(TensorKind)]
    largest = sorted(state, key=lambda row: -row.num_bytes)[:3]
    kept = {row.name: row.num_bytes for row in largest}
    kept["other state"] = sum(row.num_bytes for row in state if row not in largest)
    memory = [{unit: scale * one.time_s, **kept, **one.held} for one in moments]
    layers = [*kept, *TensorKind]
    names = [name for name in layers if any(one[name] for one in memory)]
    lines = [Line(name, "memory", name, at) for at, name in enumerate(names, 1)]
    scaling = [{"ranks": one.world_size, "efficiency": one.efficiency} for one in study.scaling]
    title, efficiency = "Memory during a micro-batch", Line("efficiency", "scaling", "efficiency")
    charts = (
        Chart(title, "bytes", lines, x=unit, is_wide=True, is_stacked=True),
        Chart(
            "Efficiency over ranks, at constant work per rank",
            "%",
            [replace(efficiency, style="dots", scale=100)],
            x="ranks",
            is_wide=True,
            log2_x=True,
        ),
    )
    return drawn({"memory": table_of(memory), "scaling": table_of(scaling)}, charts)


def _schedule(outlook: Outlook, bars: Sequence[Bar]) -> str:
    """One lane for each stream of work, with one bar for each unit."""
    end_s = max((bar.end_s for bar in bars), default=0.0)
    if not end_s:
        return ""
    lanes = {lane: [bar for bar in bars if bar.lane is lane] for lane in Lane}
    unit, scale = _time_unit(end_s)
    return render(
        "schedule.svg.j2",
        lanes=[
            (lane, [bar for bar in own if bar.end_s > bar.start_s])
            for lane, own in lanes.items()
            if own
        ],
        units=outlook.plan.units,
        x=lambda time_s: LEFT + time_s / end_s * (WIDTH - LEFT - RIGHT),
        top=TOP,
        row_height=ROW_HEIGHT,
        width=WIDTH,
        end_s=end_s,
        unit=unit,
        scale=scale,
    )


def _time_unit(end_s: float) -> tuple[str, float]:
    """Unit of a time axis of this length, and units per second."""
    return ("seconds", 1.0) if end_s >= 2 else ("milliseconds", 1000.0)
