"""The page of a plan, written before anything has run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.observe.chart import Chart, Line, drawn, render, table_of, write_page
from fullshard.outlook.player import Bar, Lane, held_over_time
from fullshard.outlook.predict import Outlook
from fullshard.outlook.search import Study
from fullshard.planner.tracing import TensorKind

WIDTH, ROW_HEIGHT, TOP, LEFT, RIGHT = 1200.0, 34.0, 10.0, 80.0, 14.0


def write_plan_page(study: Study, strategies: Sequence[Outlook], target: Path) -> Path:
    """Writes the page of a configuration.

    Args:
        study: Plan, forecast and advice of the configuration.
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
    """Allocated memory during a micro-batch, stacked by kind."""
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
    title = "Memory during a micro-batch"
    chart = Chart(title, "bytes", lines, x=unit, is_wide=True, is_stacked=True)
    return drawn({"memory": table_of(memory)}, [chart])


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
