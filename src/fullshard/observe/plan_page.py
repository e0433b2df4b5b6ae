"""The page of a plan: one HTML file that needs no network, written before anything has run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.observe.chart import WIDE, Axes, Scale, Series, area_chart, line_chart, render
from fullshard.outlook.memory import checkpoint_bytes
from fullshard.outlook.player import Bar, Lane, held_over_time
from fullshard.outlook.predict import Outlook
from fullshard.outlook.search import Study
from fullshard.planner.tracing import TensorKind

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
            ("Memory during a micro-batch", _memory_chart(outlook, bars), True),
            ("Schedule of a micro-batch", _schedule(outlook, bars), True),
            ("Efficiency over ranks, at constant work per rank", _scaling_chart(study), True),
        ),
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got '{target}' ({error}).") from error
    return target


def _memory_chart(outlook: Outlook, bars: Sequence[Bar]) -> str:
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
