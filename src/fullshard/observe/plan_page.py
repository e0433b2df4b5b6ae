"""The page of a plan: one HTML file without network, drawn before anything has run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.observe.chart import WIDE, Axes, Series, area_chart, line_chart
from fullshard.observe.report import render
from fullshard.outlook.memory import Fit, checkpoint_bytes
from fullshard.outlook.player import Bar, Lane, held_over_time
from fullshard.outlook.predict import Outlook
from fullshard.outlook.search import Study
from fullshard.planner.text import human_bytes
from fullshard.planner.tracing import TensorKind

MOODS = {Fit.FITS: "good", Fit.TIGHT: "", Fit.NO: "bad", None: ""}
ROW_HEIGHT, TOP, LEFT = 34.0, 10.0, 80.0


def write_plan_page(study: Study, strategies: Sequence[Outlook], target: Path) -> Path:
    """Draw what is known of a configuration into a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    page = render("plan.html.j2", gather(study, strategies))
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got '{target}' ({error}).") from error
    return target


def gather(study: Study, strategies: Sequence[Outlook]) -> dict[str, Any]:
    """Everything that the page shows."""
    outlook = study.outlook
    plan = outlook.plan
    mesh = plan.mesh
    phases = outlook.phases(study.storage)
    places = [name for name in ("device", "host", "disk") if any(getattr(p, name) for p in phases)]
    return {
        "title": f"Plan of {plan.model_kind}",
        "subtitle": (
            f"{plan.num_parameters:,} parameters, {plan.strategy} on {mesh.world_size} rank(s) "
            f"(replicate {mesh.replicate} x shard {mesh.shard})"
        ),
        "tiles": _tiles(study),
        "charts": _charts(study),
        "rows": [{"name": r.name, "size": human_bytes(r.num_bytes)} for r in outlook.rows],
        "reserve": [
            {"name": r.name, "size": human_bytes(r.num_bytes), "why": r.why}
            for r in outlook.overhead()
        ],
        "places": places,
        "phases": [
            {"name": p.name, "sizes": [human_bytes(getattr(p, place)) for place in places]}
            for p in phases
        ],
        "checkpoint": human_bytes(checkpoint_bytes(plan)),
        "strategies": [_strategy(one) for one in strategies],
        "scaling": [
            {
                "ranks": f"{point.world_size:,}",
                "step": f"{point.step_time_s:.3g}",
                "efficiency": f"{point.efficiency:.0%}",
                "size": human_bytes(point.peak_bytes),
                "reason": point.reason,
            }
            for point in study.scaling
        ],
        "advice": [one.sentence(outlook) for one in study.advice],
    }


def _strategy(outlook: Outlook) -> dict[str, str]:
    step = outlook.step_time_s
    return {
        "name": str(outlook.config.strategy),
        "size": human_bytes(outlook.peak_bytes["device"]),
        "step": "-" if step is None else f"{step:.3g}",
        "fit": "" if outlook.fit is None else outlook.fit.value,
    }


def _tiles(study: Study) -> list[dict[str, str]]:
    outlook = study.outlook
    peak = outlook.peak_bytes["device"]
    verdict = "unknown" if outlook.fit is None else outlook.fit.value
    memory = study.outlook.machine.memory_bytes
    share = f"{peak / memory:.0%} of {human_bytes(memory)}" if memory else "name --gpus to judge"
    tiles = [
        {"label": "verdict", "value": verdict, "note": share, "mood": MOODS[outlook.fit]},
        {"label": "a device holds", "value": human_bytes(peak), "note": "at most", "mood": ""},
    ]
    if outlook.step_time_s is not None and outlook.tokens_per_s is not None:
        how = "calibrated" if outlook.is_calibrated else "estimate"
        step, speed = f"{outlook.step_time_s:.3g} s", f"{outlook.tokens_per_s:,.0f}"
        tiles.append({"label": "a step", "value": step, "note": how, "mood": ""})
        tiles.append({"label": "tokens a second", "value": speed, "note": "all ranks", "mood": ""})
    return tiles


def _charts(study: Study) -> list[dict[str, Any]]:
    from markupsafe import Markup

    bars = study.outlook.bars()
    drawings = {
        "Memory over a micro-batch": (memory_chart(study.outlook, bars), True),
        "The schedule of a micro-batch": (lanes_chart(bars, study.outlook), True),
        "Efficiency over ranks, the work of a rank kept": (_scaling_chart(study), True),
    }
    return [
        {"title": title, "drawing": Markup(drawing), "wide": wide}
        for title, (drawing, wide) in drawings.items()
        if drawing
    ]


def memory_chart(outlook: Outlook, bars: Sequence[Bar]) -> str:
    """What is held, stacked by kind, over the time of a micro-batch."""
    moments = held_over_time(outlook.rows, bars)
    if not moments:
        return ""
    unit, scale = _time_unit(moments[-1].time_s)
    xs = [scale * moment.time_s for moment in moments]
    state = [row for row in outlook.rows if row.name not in list(TensorKind)]
    largest = sorted(state, key=lambda row: -row.num_bytes)[:3]
    rest = sum(row.num_bytes for row in state if row not in largest)
    layers = [(row.name, [float(row.num_bytes)] * len(xs)) for row in largest]
    if rest:
        layers.append(("other state", [float(rest)] * len(xs)))
    layers += [(kind, [moment.held[kind] for moment in moments]) for kind in TensorKind]
    layers = [(name, values) for name, values in layers if any(values)]
    series = [
        Series(name, xs, [value / 2**30 for value in values], color)
        for color, (name, values) in enumerate(layers, start=1)
    ]
    axes = Axes(unit, "GiB", lambda v: f"{v:g} GiB", from_zero=True, width=WIDE)
    return area_chart(series, axes)


def lanes_chart(bars: Sequence[Bar], outlook: Outlook) -> str:
    """A lane for each thing that works at a time, a bar for each unit's turn."""
    end = max((bar.end_s for bar in bars), default=0.0)
    if not end:
        return ""
    lanes = [lane for lane in Lane if any(bar.lane is lane for bar in bars)]
    height = TOP + ROW_HEIGHT * len(lanes) + 24
    scale = (WIDE - LEFT - 14) / end
    unit, shown = _time_unit(end)
    names = [unit.title for unit in outlook.plan.units]
    parts = [f'<svg viewBox="0 0 {WIDE:g} {height:g}" role="img" aria-label="schedule">']
    for row, lane in enumerate(lanes):
        y = TOP + row * ROW_HEIGHT
        parts.append(f'<text class="tick" x="0" y="{y + 20:g}">{lane}</text>')
        for bar in (one for one in bars if one.lane is lane and one.end_s > one.start_s):
            width = max(0.4, (bar.end_s - bar.start_s) * scale)
            parts.append(
                f'<rect class="bar c{row + 1}" x="{LEFT + bar.start_s * scale:.1f}" y="{y:g}" '
                f'width="{width:.1f}" height="{ROW_HEIGHT - 8:g}"><title>'
                f"{escape(names[bar.unit])}: {1000 * (bar.end_s - bar.start_s):.4g} ms"
                "</title></rect>"
            )
    parts.append(
        f'<text class="tick" x="{LEFT:g}" y="{height - 4:g}">0</text>'
        f'<text class="tick" x="{WIDE - 14:g}" y="{height - 4:g}" text-anchor="end">'
        f"{shown * end:.4g} {unit}</text></svg>"
    )
    return "".join(parts)


def _time_unit(end_s: float) -> tuple[str, float]:
    """What an axis so long is said in, and how many of it a second has."""
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
