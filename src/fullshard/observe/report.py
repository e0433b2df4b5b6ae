"""Pages that need no network: `report.html` about a run, and the page of a plan.

The report is drawn from the files in the run's folder: run.json, metrics.jsonl, saves.jsonl,
plan.json, config.yaml and sample.txt. Missing files are left out, so a failed run has a report too,
and it can be drawn again at any time. The page of a plan is written before anything has run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fullshard.config.regular_files import did_you_mean_path
from fullshard.errors import ConfigError
from fullshard.observe.chart import WIDE, Axes, Scale, Series, area_chart, line_chart, render
from fullshard.observe.metrics import SAVES, read_rows
from fullshard.outlook.memory import checkpoint_bytes
from fullshard.outlook.player import Bar, Lane, held_over_time
from fullshard.outlook.predict import Outlook
from fullshard.outlook.search import Study
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes, like_neighbours
from fullshard.planner.tracing import TensorKind

logger = logging.getLogger(__name__)

Row = dict[str, Any]
SMOOTHING = 0.8  # weight of the past in the smoothed loss


def write_report(run: Path) -> Path:
    """Draws the report of a run's folder into it.

    Returns:
        The file.

    Raises:
        ConfigError: The folder holds no run.
    """
    target = run / "report.html"
    target.write_text(render("report.html.j2", **gather(run)), encoding="utf-8")
    return target


def gather(run: Path) -> dict[str, Any]:
    """Reads everything that the page shows."""
    record = _read_record(run)
    rows = list(read_rows(run / "metrics.jsonl"))
    steps = [row for row in rows if "loss" in row]
    plan, saves = _plan(run / "plan.json"), list(read_rows(run / SAVES))
    planned = record.get("planned", {})
    units = plan.units if isinstance(plan, Plan) else ()
    return {
        "record": record,
        "steps": steps,
        "charts": _charts(steps, rows, saves, {**record, "planned": planned}),
        "compared": _compared(steps, planned),
        "plan": plan,
        "arrays": plan.arrays if isinstance(plan, ArraysPlan) else (),
        "runs": like_neighbours(units),
        "sample": _text(run / "sample.txt"),
        "config": _text(run / "config.yaml"),
    }


def _read_record(run: Path) -> dict[str, Any]:
    try:
        record: Any = json.loads((run / "run.json").read_text(encoding="utf-8"))
        record = record if isinstance(record, dict) else {}
        held = (record.get("measured"), record.get("planned", {}))
        if not all(isinstance(one, dict) for one in held):
            raise ValueError("it is not the record of a run")
        if lacks := {"command", "status", "began", "error"} - record.keys():
            raise ValueError(f"it lacks {min(lacks)}")
        return record
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"RUN_DIR: expected a run's folder with run.json, got '{run}' ({error}). "
            + (did_you_mean_path(run) or "Name the output_dir of a run.")
        ) from error


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


# ---- charts --------------------------------------------------------------------------------------


def _charts(
    steps: list[Row], rows: list[Row], saves: list[Row], record: Row
) -> list[tuple[str, str, bool]]:
    """Title and drawing of each chart, and whether it takes the page's full width."""
    planned = record["planned"]
    evaluations = [row for row in rows if "eval_loss" in row]
    loss = loss_chart(steps, evaluations, record["measured"].get("baseline_loss"))
    speed = _planned_chart(steps, ("tokens_per_s", "", 1), planned.get("expected_tokens_per_s"))
    waits = _planned_chart(steps, ("comm_s", " ms", 1000), planned.get("expected_wait_s"))
    saved = Series("checkpoint", _column(saves, "step"), _column(saves, "save_s", 1000), 2, "dots")
    norm = _curve(steps, "grad_norm", 4, Axes("step", "norm"))
    return [
        ("Loss", loss, True),
        ("Time per step", _time_chart(steps), True),
        ("Memory of the largest rank", _memory_chart(steps, planned), False),
        ("Tokens per second, all ranks", speed, False),
        ("Exposed communication per step", waits, False),
        ("Pause of training per checkpoint", line_chart([saved], _from_zero("ms", " ms")), False),
        ("Gradient norm before clipping", norm, False),
        ("Learning rate", _curve(steps, "learning_rate", 1, _from_zero("rate")), False),
    ]


def _from_zero(label: str, unit: str = "", width: float | None = None) -> Axes:
    axes = Axes("step", label, lambda value: f"{value:g}{unit}", from_zero=True)
    return axes if width is None else replace(axes, width=width)


def _column(rows: list[Row], name: str, scale: float = 1) -> list[float]:
    return [scale * row[name] for row in rows]


def _level(name: str, xs: list[float], value: float, color: int = 3) -> Series:
    """A dashed horizontal line."""
    return Series(name, [xs[0], xs[-1]], [value] * 2, color, "dashed")


def loss_chart(
    steps: list[Row], evaluations: list[Row], baseline: float | None, style: str = ""
) -> str:
    """Training loss, raw and smoothed, held-out loss and baseline over steps."""
    steps = [row for row in steps if row["loss"] is not None]  # None: the step was skipped
    xs, losses = _column(steps, "step"), _column(steps, "loss")
    held_out = _column(evaluations, "step"), _column(evaluations, "eval_loss")
    series = [
        Series("training, every step", xs, losses, 1, "faint"),
        Series("training, smoothed", xs, _smoothed(losses), 1),
        Series("held out", *held_out, 2, "dots"),
    ]
    if baseline is not None and xs:
        series.append(_level("interpolated bigram, held out", xs, baseline))
    return line_chart(series, Axes("step", "loss in nats per token", width=WIDE, style=style))


def _smoothed(values: list[float]) -> list[float]:
    """Exponential mean, corrected for its start."""
    out: list[float] = []
    total, weight = 0.0, 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        out.append(total / weight)
    return out


def _time_chart(steps: list[Row]) -> str:
    xs = _column(steps, "step")
    series = [
        Series("compute", xs, _column(steps, "compute_s", 1000), 1),
        Series("communication", xs, _column(steps, "comm_s", 1000), 2),
        Series("data", xs, _column(steps, "data_s", 1000), 3),
    ]
    return area_chart(series, _from_zero("milliseconds", " ms", WIDE))


def _memory_chart(steps: list[Row], planned: Row) -> str:
    xs, peaks = _column(steps, "step"), _column(steps, "memory_peak_bytes")
    size, name = (2**30, "GiB") if max(peaks, default=0) >= 2**31 else (2**20, "MiB")
    series = [
        Series("in use", xs, _column(steps, "memory_bytes", 1 / size), 1),
        Series("peak", xs, _column(steps, "memory_peak_bytes", 1 / size), 2, "dashed"),
    ]
    expected = planned.get("expected_peak_bytes")
    if expected and xs:
        series.append(_level("planned, tensors only", xs, expected / size))
    return line_chart(series, _from_zero(name, f" {name}"))


def _planned_chart(steps: list[Row], what: tuple[str, str, float], planned: float | None) -> str:
    """A measured column and its planned value.

    Args:
        steps: Rows of metrics.jsonl.
        what: Name of the column, unit of the axis, scale from the column to that unit.
        planned: Planned value in the unit of the column; None: unknown.
    """
    name, unit, scale = what
    xs, values = _column(steps, "step"), _column(steps, name, scale)
    if not any(values):  # one rank, or inside of XLA's program
        return ""
    series = [Series("measured", xs, values, 1)]
    if planned is not None:
        series.append(_level("planned", xs, scale * planned))
    return line_chart(series, _from_zero(name, unit))


def _curve(steps: list[Row], field: str, color: int, axes: Axes) -> str:
    steps = [row for row in steps if row.get(field) is not None]
    series = Series(axes.y_label, _column(steps, "step"), _column(steps, field), color)
    return line_chart([series], axes)


# ---- plan ----------------------------------------------------------------------------------------


def _compared(steps: list[Row], planned: Row) -> list[tuple[str, str, str]]:
    """Name, planned value and measured value: the median of the second half of the steps."""
    late = steps[len(steps) // 2 :]
    if not late:
        return []
    memory, expected = "memory per rank", dict(planned)
    if planned.get("measures_process"):
        memory += ", libraries included"
        if planned.get("process_bytes") and planned.get("expected_peak_bytes") is not None:
            expected["expected_peak_bytes"] += planned["process_bytes"]
    rows = (
        (memory, "expected_peak_bytes", "memory_peak_bytes", human_bytes),
        ("step time", "expected_step_time_s", "step_time_s", _milliseconds),
        ("tokens per second", "expected_tokens_per_s", "tokens_per_s", "{:,.0f}".format),
        ("exposed communication", "expected_wait_s", "comm_s", _milliseconds),
    )
    return [
        (
            what,
            "-" if expected.get(key) is None else show(expected[key]),
            show(median(_column(late, name))),
        )
        for what, key, name, show in rows
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
        logger.warning("%s is left out: %s", path, error)
        return None


# ---- the page of a plan --------------------------------------------------------------------------


ROW_HEIGHT, TOP, LEFT, RIGHT = 34.0, 10.0, 80.0, 14.0


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
        checkpoint_bytes=checkpoint_bytes(outlook.plan),
        strategies=strategies,
        charts=(
            ("Memory during a micro-batch", _planned_memory_chart(outlook, bars), True),
            ("Schedule of a micro-batch", _schedule(outlook, bars), True),
            ("Efficiency over ranks, at constant work per rank", _scaling_chart(study), True),
        ),
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got '{target}' ({error}).") from error
    return target


def _planned_memory_chart(outlook: Outlook, bars: Sequence[Bar]) -> str:
    """Allocated memory during a micro-batch, stacked by kind."""
    moments = held_over_time(outlook.rows, bars)
    if not moments:
        return ""
    unit, scale = _time_unit(moments[-1].time_s)
    xs = [scale * moment.time_s for moment in moments]
    state = [row for row in outlook.rows if row.name not in list(TensorKind)]
    largest = sorted(state, key=lambda row: -row.num_bytes)[:3]
    rest = sum(row.num_bytes for row in state if row not in largest)
    layers = [(row.name, [float(row.num_bytes)] * len(xs)) for row in largest]
    layers.append(("other state", [float(rest)] * len(xs)))
    layers += [(kind, [moment.held[kind] for moment in moments]) for kind in TensorKind]
    layers = [(name, values) for name, values in layers if any(values)]
    series = [
        Series(name, xs, [value / 2**30 for value in values], color)
        for color, (name, values) in enumerate(layers, start=1)
    ]
    axes = Axes(unit, "GiB", lambda v: f"{v:g} GiB", from_zero=True, width=WIDE)
    return area_chart(series, axes)


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
        x=Scale(0.0, end_s, LEFT, WIDE - RIGHT),
        top=TOP,
        row_height=ROW_HEIGHT,
        width=WIDE,
        end_s=end_s,
        unit=unit,
        scale=scale,
    )


def _time_unit(end_s: float) -> tuple[str, float]:
    """Unit of a time axis of this length, and units per second."""
    return ("seconds", 1.0) if end_s >= 2 else ("milliseconds", 1000.0)


def _scaling_chart(study: Study) -> str:
    xs = [float(power) for power in range(len(study.scaling))]
    ys = [100 * point.efficiency for point in study.scaling]
    axes = Axes(
        "ranks",
        "per cent",
        lambda v: f"{v:g} %",
        from_zero=True,
        width=WIDE,
        x_format=lambda v: f"{2**v:,.0f}" if v == int(v) else "",
    )
    return line_chart([Series("efficiency", xs, ys, 1, "dots")], axes)
