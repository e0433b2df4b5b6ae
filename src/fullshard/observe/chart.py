"""Line and area charts as inline SVG.

Colours are CSS variables of the page (`--series-1` ...), so one drawing serves a light and a dark
background, and nothing has to be installed or loaded to see it.

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
from html import escape

HEIGHT = 260.0
NARROW, WIDE = 600.0, 1200.0  # half of the page's width, and all of it
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 34.0
MAX_POINTS = 600  # more cannot be seen at these widths
MAX_AREA_POINTS = 150  # finer layers flicker
NUM_TICKS = 5


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: In the legend.
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
    """Labels, number formats and width of a chart."""

    x_label: str
    y_label: str
    y_format: Callable[[float], str] = lambda value: f"{value:g}"
    from_zero: bool = False
    width: float = NARROW
    x_format: Callable[[float], str] = lambda value: f"{value:g}"


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draws lines over common axes; empty where there is no point."""
    drawn = [one for one in series if len(one.xs)]
    if not drawn:
        return ""
    x_scale, y_scale = _scales(drawn, axes)
    body = [_line(one, x_scale, y_scale) for one in sorted(drawn, key=_faint_first)]
    return _frame(body, (x_scale, y_scale), axes, drawn)


def area_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draws series stacked on each other; all have the same xs."""
    drawn = [one for one in series if len(one.xs)]
    if not drawn:
        return ""
    xs = drawn[0].xs
    lower = [0.0] * len(xs)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for one in drawn:
        upper = [low + y for low, y in zip(lower, one.ys, strict=True)]
        layers.append((one, lower, upper))
        lower = upper
    x_scale, y_scale = _scales([Series("", xs, lower, 0)], axes)
    body = [_area(one, low, high, (x_scale, y_scale)) for one, low, high in layers]
    return _frame(body, (x_scale, y_scale), axes, drawn)


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


def _scales(series: Sequence[Series], axes: Axes) -> tuple[Scale, Scale]:
    xs = [x for one in series for x in one.xs]
    ys = [y for one in series for y in one.ys]
    low, high = (0.0 if axes.from_zero else min(ys)), max(ys)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if axes.from_zero else low - room
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return (
        Scale(x_low, x_high, LEFT, axes.width - RIGHT),
        Scale(low, high + room, HEIGHT - BOTTOM, TOP),
    )


def _faint_first(one: Series) -> bool:
    return one.style != "faint"


def _points(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))


def _line(one: Series, x: Scale, y: Scale) -> str:
    xs, ys = mean_of_windows(one.xs), mean_of_windows(one.ys)
    parts = [
        f'<polyline class="series {one.style} c{one.color}" points="{_points(xs, ys, x, y)}"/>'
    ]
    if one.style == "dots":
        parts += [
            f'<circle class="dot c{one.color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3">'
            f"<title>{escape(one.name)}: {b:.4g} at {a:g}</title></circle>"
            for a, b in zip(xs, ys, strict=True)
        ]
    return "".join(parts)


def _area(one: Series, low: list[float], high: list[float], scales: tuple[Scale, Scale]) -> str:
    x, y = scales
    xs, low, high = (mean_of_windows(values, MAX_AREA_POINTS) for values in (one.xs, low, high))
    there = _points(xs, high, x, y)
    back = _points(xs[::-1], low[::-1], x, y)
    return f'<polygon class="area c{one.color}" points="{there} {back}"/>'


def _frame(
    body: Sequence[str], scales: tuple[Scale, Scale], axes: Axes, series: Sequence[Series]
) -> str:
    """Grid, ticks, labels and legend around what was drawn."""
    x, y = scales
    right = axes.width - RIGHT
    parts = [
        f'<svg viewBox="0 0 {axes.width:g} {HEIGHT:g}" role="img" '
        f'aria-label="{escape(axes.y_label)} over {escape(axes.x_label)}">'
    ]
    for value in ticks(y.low, y.high):
        place = f"{y(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT:g} {place}H{right:g}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6:g}" y="{place}" dy=".32em" text-anchor="end">'
            f"{escape(axes.y_format(value))}</text>"
        )
    for value in ticks(x.low, x.high, int(axes.width / 85)):
        parts.append(
            f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 15:g}" '
            f'text-anchor="middle">{escape(axes.x_format(value))}</text>'
        )
    bottom = HEIGHT - BOTTOM
    parts.append(f'<path class="axis" d="M{LEFT:g} {bottom:g}H{right:g}"/>')
    parts += body
    parts.append(
        f'<text class="tick" x="{right:g}" y="{HEIGHT - 4:g}" text-anchor="end">'
        f"{escape(axes.x_label)}</text></svg>"
    )
    return "".join(parts) + _legend(series)


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    entries = "".join(
        f'<span><i class="key c{one.color} {one.style}"></i>{escape(one.name)}</span>'
        for one in series
    )
    return f'<div class="legend">{entries}</div>'


def standalone(drawing: str, names: Sequence[str], style: str, title: str) -> str:
    """A drawing as an SVG file of its own, with a legend.

    Args:
        drawing: What `line_chart` made.
        names: Names of its series, in the order of their colors (1 is the first).
        style: CSS of its classes; a report has it in its page.
        title: One line above the legend.
    """
    head, _, body = drawing.partition("</svg>")[0].partition(">")
    right = float(head.partition('viewBox="0 0 ')[2].partition(" ")[0]) - 230
    legend = "".join(
        f'<path class="series c{color}" d="M{right:g} {16 + 18 * color}h30"/>'
        f'<text class="tick" x="{right + 40:g}" y="{20 + 18 * color}">{escape(name)}</text>'
        for color, name in enumerate(names, start=1)
    )
    top = f'<text class="tick" x="{right:g}" y="20">{escape(title)}</text>'
    sheet = f"<style>\n{style}</style>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{sheet}{body}{top}{legend}</svg>\n'
