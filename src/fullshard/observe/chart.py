"""Line and area charts as inline SVG, and the templates of pages.

Colours are CSS variables of the page (`--series-1` ...), so one drawing serves a light and a dark
background. The page needs no network and no further file.

    +--------------------------------------+
    | top label                            |
    |  y |  ....                           |     margins LEFT, RIGHT, TOP, BOTTOM
    |    |      .......                    |
    |    +--------------------  x label    |
    +--------------------------------------+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fullshard.planner.text import human_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

HEIGHT = 260.0
NARROW, WIDE = 600.0, 1200.0  # half of the page's width, and the full width
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 34.0
MAX_POINTS = 600  # more are not visible at these widths
MAX_AREA_POINTS = 150  # finer layers flicker
NUM_TICKS = 5

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: Label in the legend.
        xs, ys: Points, x ascending.
        color: Number of the page's series colour, from 1.
        style: `line`, `faint` (thin, behind others), `dots` (line with points) or `dashed`.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    style: str = "line"


@dataclass(frozen=True)
class Axes:
    """Labels, number formats and width of a chart.

    Attributes:
        style: CSS of a chart that is a file of its own, with its legend inside; "": the page's CSS.
    """

    x_label: str
    y_label: str
    y_format: Callable[[float], str] = lambda value: f"{value:g}"
    from_zero: bool = False
    width: float = NARROW
    x_format: Callable[[float], str] = lambda value: f"{value:g}"
    style: str = ""


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def render(template: str, **facts: Any) -> str:
    """Renders one of our templates; all text in it is escaped."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fullshard.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": human_bytes,
        "number": "{:g}".format,
        "place": "{:.1f}".format,
        "count": "{:,.0f}".format,
    }
    return environment


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draws lines over common axes; empty if there is no point."""
    drawn = [one for one in series if len(one.xs)]
    lines = [
        (one, list(zip(mean_of_windows(one.xs), mean_of_windows(one.ys), strict=True)))
        for one in sorted(drawn, key=lambda one: one.style != "faint")
    ]
    return _draw([one.ys for one in drawn], drawn, axes, lines=lines)


def area_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draws series stacked on each other; all have the same xs."""
    drawn = [one for one in series if len(one.xs)]
    lower = [0.0] * len(drawn[0].xs) if drawn else []
    areas: list[tuple[Series, Points]] = []
    for one in drawn:
        upper = [low + y for low, y in zip(lower, one.ys, strict=True)]
        xs, low, high = (mean_of_windows(v, MAX_AREA_POINTS) for v in (one.xs, lower, upper))
        there, back = zip(xs, high, strict=True), zip(xs[::-1], low[::-1], strict=True)
        areas.append((one, [*there, *back]))
        lower = upper
    return _draw([lower], drawn, axes, areas=areas)


def mean_of_windows(values: Sequence[float], max_points: int = MAX_POINTS) -> list[float]:
    """Means of consecutive windows, so that at most `max_points` are left."""
    size = max(1, math.ceil(len(values) / max_points))
    windows = (values[i : i + size] for i in range(0, len(values), size))
    return [sum(window) / len(window) for window in windows]


def ticks(low: float, high: float, count: int = NUM_TICKS) -> list[float]:
    """Round numbers in [low, high], about `count` of them."""
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _draw(
    columns: Sequence[Sequence[float]],
    series: Sequence[Series],
    axes: Axes,
    *,
    lines: Sequence[tuple[Series, Points]] = (),
    areas: Sequence[tuple[Series, Points]] = (),
) -> str:
    """Scales the axes to `columns` of y values and draws lines or areas over them."""
    if not series:
        return ""
    xs = [x for one in series for x in one.xs]
    ys = [y for column in columns for y in column]
    low, high = (0.0 if axes.from_zero else min(ys)), max(ys)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if axes.from_zero else low - room
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    right, bottom = axes.width - RIGHT, HEIGHT - BOTTOM
    return render(
        "chart.svg.j2",
        axes=axes,
        height=HEIGHT,
        left=LEFT,
        right=right,
        bottom=bottom,
        x=Scale(x_low, x_high, LEFT, right),
        y=Scale(low, high + room, bottom, TOP),
        x_ticks=ticks(x_low, x_high, int(axes.width / 85)),
        y_ticks=ticks(low, high + room),
        lines=lines,
        areas=areas,
    )
