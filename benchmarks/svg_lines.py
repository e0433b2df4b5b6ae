"""Draws line charts as SVG files for the committed results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

HEIGHT = 260.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 34.0
MAX_POINTS = 600  # more are not visible at this width


@dataclass(frozen=True)
class Axes:
    """The axes of a drawing.

    Attributes:
        y_label: Label of the y axis.
        style: CSS of the file; the curves have the classes c1, c2, ...
        x_label: Label of the x axis.
        xs: x of every point, ascending; by default 1, 2, ...
        y_range: Range of the y axis; by default that of the values, with some room.
        width: Width in pixels.
        has_dots: A circle marks each point.
    """

    y_label: str
    style: str
    x_label: str = "step"
    xs: Sequence[float] = ()
    y_range: tuple[float, float] | None = None
    width: float = 900.0
    has_dots: bool = False


def svg_lines(curves: Mapping[str, Sequence[float]], axes: Axes) -> str:
    """Draws curves over common xs.

    Args:
        curves: Values by name, in the order of their xs.
        axes: Labels and ranges.
    """
    ys = [y for curve in curves.values() for y in curve]
    xs = axes.xs or range(1, max(map(len, curves.values())) + 1)
    room = (max(ys) - min(ys)) * 0.06 or 1.0
    low, high = axes.y_range or (min(ys) - room, max(ys) + room)
    first, last = xs[0], max(xs[-1], xs[0] + 1)

    def x(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (axes.width - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    right, bottom, key = axes.width - RIGHT, HEIGHT - BOTTOM, axes.width - 230
    parts = [f"<style>{axes.style}</style>", f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>']
    for value in ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>')
        parts.append(_text(LEFT - 6, y(value) + 4, f"{value:g}", "end"))
    parts += [
        _text(x(value), bottom + 15, f"{value:g}", "middle") for value in ticks(first, last, 10)
    ]
    parts.append(_text(right, HEIGHT - 4, axes.x_label, "end"))
    parts.append(_text(key, 20, axes.y_label, "start"))
    for number, (name, curve) in enumerate(curves.items(), start=1):
        size = math.ceil(len(curve) / MAX_POINTS)
        windows = [slice(i, i + size) for i in range(0, len(curve), size)]
        means = [(x(fmean(xs[one])), y(fmean(curve[one]))) for one in windows]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in means)
        parts.append(f'<polyline class="series c{number}" points="{points}"/>')
        if axes.has_dots:
            dot = f'<circle class="dot c{number}" r="3"'
            parts += [f'{dot} cx="{a:.1f}" cy="{b:.1f}"/>' for a, b in means]
        parts.append(f'<path class="series c{number}" d="M{key} {16 + 18 * number}h30"/>')
        parts.append(_text(key + 40, 20 + 18 * number, name, "start"))
    box = f"0 0 {axes.width:g} {HEIGHT:g}"
    lines = "\n".join(parts)
    return f'<svg viewBox="{box}" xmlns="http://www.w3.org/2000/svg">\n{lines}\n</svg>\n'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high], about `count` of them."""
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
