"""`report.html`: one self-contained page about a run, drawn from the files in its folder.

It reads run.json, metrics.jsonl, saves.jsonl, plan.json, config.yaml and sample.txt; whatever is
missing is left out, so a failed run has a report too, and it can be drawn again at any time.
"""

from __future__ import annotations

import json
import logging
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from fullshard.config.regular_files import did_you_mean_path
from fullshard.errors import ConfigError
from fullshard.observe.chart import WIDE, Axes, Series, area_chart, line_chart
from fullshard.observe.metrics import SAVES, read_rows
from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.planner.text import human_bytes
from fullshard.planner.units import UnitPlan

logger = logging.getLogger(__name__)

Row = dict[str, Any]
NUM_WIDE = 2  # charts that take the page's whole width
SMOOTHING = 0.8  # weight of the past in the smoothed loss


def write_report(run: Path) -> Path:
    """Draws the report of a run's folder into it.

    Returns:
        The file.

    Raises:
        ConfigError: The folder holds no run.
    """
    target = run / "report.html"
    target.write_text(render("report.html.j2", gather(run)), encoding="utf-8")
    return target


def render(template: str, facts: dict[str, Any]) -> str:
    """A page from one of our templates."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fullshard.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(facts)


def gather(run: Path) -> dict[str, Any]:
    """Everything that the page shows."""
    record = _read_record(run)
    rows = list(read_rows(run / "metrics.jsonl"))
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    saves = list(read_rows(run / SAVES))
    record["planned"] = record.get("planned") or {}
    return {
        "title": f"fullshard {record['command']}",
        "subtitle": f"{record['status']}, began {record['began']}",
        "error": record["error"],
        "tiles": _tiles(record["measured"], steps),
        "charts": _charts(steps, evaluations, saves, record),
        "compared": _compared(steps, record["planned"]),
        "plan": _plan(run / "plan.json"),
        "environment": list(record.get("environment", {}).items()),
        "sample": _text(run / "sample.txt"),
        "config": _text(run / "config.yaml"),
    }


def _read_record(run: Path) -> dict[str, Any]:
    try:
        record: Any = json.loads((run / "run.json").read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("measured"), dict):
            raise ValueError("it is no record of a run")
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


# ---- tiles ---------------------------------------------------------------------------------------


def _tiles(measured: dict[str, Any], steps: list[Row]) -> list[dict[str, str]]:
    tiles: list[dict[str, str]] = []
    finite = [row for row in steps if row["loss"] is not None]
    if finite:
        last = finite[-1]
        tiles.append(_tile("training loss", f"{last['loss']:.4f}", f"step {last['step']}"))
    if measured.get("eval_loss") is not None:
        tiles.append(_held_out_tile(measured))
    if steps:
        late = steps[len(steps) // 2 :]
        speed = sum(row["tokens_per_s"] for row in late) / len(late)
        tiles.append(_tile("tokens a second", f"{speed:,.0f}", "all ranks, second half"))
        peak = max(row["memory_peak_bytes"] for row in steps)
        tiles.append(_tile("peak memory", human_bytes(peak), "largest rank"))
    if measured.get("wall_s") is not None:
        tiles.append(_tile("wall time", f"{measured['wall_s']:.0f} s", "from start to end"))
    return tiles


def _held_out_tile(measured: dict[str, Any]) -> dict[str, str]:
    loss, baseline = measured["eval_loss"], measured.get("baseline_loss")
    if baseline is None:
        return _tile("held-out loss", f"{loss:.4f}", "nats a token")
    beats = loss < baseline
    note = f"interpolated bigram: {baseline:.4f}"
    return _tile("held-out loss", f"{loss:.4f}", note, "good" if beats else "bad")


def _tile(label: str, value: str, note: str, mood: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note, "mood": mood}


# ---- charts --------------------------------------------------------------------------------------


def _charts(
    steps: list[Row], evaluations: list[Row], saves: list[Row], record: Row
) -> list[dict[str, Any]]:
    planned = record["planned"]
    drawings = {
        "Loss": loss_chart(steps, evaluations, record["measured"].get("baseline_loss")),
        "Where a step's time goes": _time_chart(steps),
        "Memory of the largest rank": _memory_chart(steps, planned),
        "Tokens a second, all ranks": _beside_plan(
            steps, ("tokens_per_s", "", 1), planned.get("expected_tokens_per_s")
        ),
        "Communication that is not hidden": _beside_plan(
            steps, ("comm_s", " ms", 1000), planned.get("expected_wait_s")
        ),
        "Training stands still to save": _saves_chart(saves),
        "Gradient norm before clipping": _curve(steps, "grad_norm", 4, "norm"),
        "Learning rate": _curve(steps, "learning_rate", 1, "rate", from_zero=True),
    }
    return [
        {"title": title, "drawing": _safe(drawing), "wide": place < NUM_WIDE}
        for place, (title, drawing) in enumerate(drawings.items())
        if drawing
    ]


def _safe(drawing: str) -> Any:
    """Marks our own SVG as markup; every text in it was escaped when it was drawn."""
    from markupsafe import Markup

    return Markup(drawing)


def _column(rows: list[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def loss_chart(steps: list[Row], evaluations: list[Row], baseline: float | None) -> str:
    steps = [row for row in steps if row["loss"] is not None]  # others were skipped
    xs, losses = _column(steps, "step"), _column(steps, "loss")
    series = [
        Series("training, every step", xs, losses, 1, "faint"),
        Series("training, smoothed", xs, _smoothed(losses), 1),
        Series(
            "held out", _column(evaluations, "step"), _column(evaluations, "eval_loss"), 2, "dots"
        ),
    ]
    if baseline is not None and xs:
        ends = [xs[0], xs[-1]]
        series.append(Series("interpolated bigram, held out", ends, [baseline] * 2, 3, "dashed"))
    return line_chart(series, Axes("step", "loss in nats a token", width=WIDE))


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
        Series(name, xs, [1000 * value for value in _column(steps, field)], color)
        for name, field, color in (
            ("compute", "compute_s", 1),
            ("communication", "comm_s", 2),
            ("data", "data_s", 3),
        )
    ]
    axes = Axes("step", "milliseconds", lambda value: f"{value:g} ms", from_zero=True, width=WIDE)
    return area_chart(series, axes)


def _memory_chart(steps: list[Row], planned: Row) -> str:
    xs = _column(steps, "step")
    peaks = _column(steps, "memory_peak_bytes")
    unit, name = (2**30, "GiB") if max(peaks, default=0) >= 2**31 else (2**20, "MiB")
    series = [
        Series("in use", xs, [value / unit for value in _column(steps, "memory_bytes")], 1),
        Series("peak", xs, [value / unit for value in peaks], 2, "dashed"),
    ]
    expected = planned.get("expected_peak_bytes")
    if expected and xs:
        ends = [xs[0], xs[-1]]
        series.append(Series("planned, tensors alone", ends, [expected / unit] * 2, 3, "dashed"))
    return line_chart(series, Axes("step", name, lambda value: f"{value:g} {name}", from_zero=True))


def _beside_plan(steps: list[Row], what: tuple[str, str, float], planned: float | None) -> str:
    """A column (its name, its unit, how many of these it has), and what the plan said."""
    name, unit, scale = what
    xs = _column(steps, "step")
    if not any(_column(steps, name)):  # one rank, or inside of XLA's program
        return ""
    series = [Series("measured", xs, [scale * value for value in _column(steps, name)], 1)]
    if planned is not None and xs:
        series.append(Series("planned", [xs[0], xs[-1]], [scale * planned] * 2, 3, "dashed"))
    return line_chart(series, Axes("step", name, lambda value: f"{value:g}{unit}", from_zero=True))


def _saves_chart(saves: list[Row]) -> str:
    times = [1000 * value for value in _column(saves, "save_s")]
    series = [Series("checkpoint", _column(saves, "step"), times, 2, "dots")]
    return line_chart(series, Axes("step", "ms", lambda value: f"{value:g} ms", from_zero=True))


def _curve(steps: list[Row], field: str, color: int, label: str, *, from_zero: bool = False) -> str:
    steps = [row for row in steps if row.get(field) is not None]
    series = [Series(label, _column(steps, "step"), _column(steps, field), color)]
    return line_chart(series, Axes("step", label, from_zero=from_zero))


# ---- plan ----------------------------------------------------------------------------------------


def _compared(steps: list[Row], planned: Row) -> list[tuple[str, str, str]]:
    """What the plan said, beside what was measured: the median of the second half."""
    late = steps[len(steps) // 2 :]
    if not late:
        return []
    memory = "memory of a rank"
    if planned.get("measures_process"):
        memory += ", libraries included"
        before = planned.get("process_bytes")
        if before and planned.get("expected_peak_bytes") is not None:
            total = planned["expected_peak_bytes"] + before
            planned = {**planned, "expected_peak_bytes": total}
    told = {
        memory: ("expected_peak_bytes", "memory_peak_bytes", _size),
        "a step": ("expected_step_time_s", "step_time_s", _milliseconds),
        "tokens a second": ("expected_tokens_per_s", "tokens_per_s", _count),
        "communication not hidden": ("expected_wait_s", "comm_s", _milliseconds),
    }
    found: list[tuple[str, str, str]] = []
    for what, (key, field, show) in told.items():
        value = planned.get(key)
        measured = show(median(_column(late, field)))
        found.append((what, "-" if value is None else show(value), measured))
    return found


def _size(num_bytes: float) -> str:
    return human_bytes(round(num_bytes))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.4g} ms"


def _plan(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        plan = ArraysPlan.from_json(text) or Plan.from_json(text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s is left out: %s", path, error)
        return None
    mesh = plan.mesh
    if isinstance(plan, ArraysPlan):
        units = [_array(array, mesh.shard) for array in plan.arrays]
    else:
        units = [_unit(list(run)) for _, run in groupby(plan.units, key=_likeness)]
    headline = (
        f"{plan.model_kind}: {plan.num_parameters:,} parameters, {plan.strategy} on "
        f"{mesh.world_size} rank(s) (replicate {mesh.replicate} x shard {mesh.shard}), "
        f"{plan.num_units} units"
    )
    return {
        "headline": headline,
        "units": units,
        "memory": [
            {"name": row["name"], "size": human_bytes(int(row["bytes"]))} for row in plan.rows()
        ],
    }


def _array(array: ArrayPlan, num_parts: int) -> dict[str, str]:
    dtypes, dim = array.dtypes, array.cut.dim
    return {
        "title": array.name,
        "kind": "array" + ("" if array.trainable else " (frozen)"),
        "role": "block" if array.block else "root",
        "count": str(array.num_layers or 1),
        "elements": f"{array.numel:,}",
        "padding": f"{array.cut.padding:,}",
        "kept": f"{array.part_numel(num_parts):,}",
        "slots": "whole on every device" if dim is None else f"cut along dimension {dim}",
        "dtypes": f"{dtypes.master} / {dtypes.compute} / {dtypes.reduce}",
    }


def _likeness(unit: UnitPlan) -> tuple[Any, ...]:
    """Neighbours that are alike in this share a row of the table."""
    dtypes = tuple((group.dtypes, group.trainable) for group in unit.groups)
    return unit.kind, unit.role, unit.parent, unit.numel, unit.padding, dtypes


def _unit(run: list[UnitPlan]) -> dict[str, str]:
    first, last = run[0], run[-1]
    dtypes = {f"{g.dtypes.master} / {g.dtypes.compute} / {g.dtypes.reduce}" for g in first.groups}
    rings = {group.slot.ring for unit in run for group in unit.groups if group.slot is not None}
    frozen = "" if first.trainable else " (frozen)"
    return {
        "title": first.title if len(run) == 1 else f"{first.title} .. {last.title}",
        "kind": first.kind + frozen,
        "role": str(first.role),
        "count": str(len(run)),
        "elements": f"{first.numel:,}",
        "padding": f"{first.padding:,}",
        "kept": f"{sum(group.layout.part_numel for group in first.groups):,}",
        "slots": ", ".join(sorted(rings)) or "nothing: read in place",
        "dtypes": ", ".join(sorted(dtypes)),
    }
