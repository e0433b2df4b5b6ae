"""Drawings of benchmark results as SVG files.

Each drawing is made from the JSON object that the command writes, so that committed results can be
drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.observe.chart import render

TEMPLATE = "bars.svg.j2"


@dataclass(frozen=True)
class Bar:
    """One bar; lengths are shares of the widest one.

    Attributes:
        words: Value beside the bar.
        kind: `ours` stands out, `other` does not.
        ends: Ends of its interval.
    """

    name: str
    length: float
    words: str
    kind: str = "ours"
    ends: tuple[float, float] | None = None


def draw_comparison(title: str, rows: Sequence[Mapping[str, Any]], what: Mapping[str, str]) -> str:
    """Returns bars of some quantities, one under the other.

    Args:
        title: Title of the drawing.
        rows: Rows with a `name` and the quantities.
        what: Title of each quantity, by its key in the rows.
    """
    sections: list[tuple[str, list[Bar], float | None]] = []
    for key, words in what.items():
        most = max(row[key] for row in rows)
        bars = [Bar(row["name"], row[key] / most, _said(row[key])) for row in rows]
        sections.append((words, bars, None))
    return render(TEMPLATE, title=title, sections=sections)


def _said(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def draw_ratios(rows: Sequence[Mapping[str, Any]], reference: str, ours: str, floor: str) -> str:
    """Returns step times relative to a reference, engine by engine, case by case.

    Args:
        rows: One row per engine, with `case`, `name` and its ratio to the reference.
        reference: Name of the engine whose step is 1.
        ours: Name of the engine whose bars stand out.
        floor: Name of the engine that is drawn as a line.

    Returns:
        The SVG file; "" if the reference did not run.
    """
    found = [row for row in rows if row["ratio_to_fsdp2"]]
    most = max((row["ratio_to_fsdp2"]["high"] for row in found), default=1.0)
    sections: list[tuple[str, list[Bar], float | None]] = []
    for case in dict.fromkeys(row["case"] for row in found):
        lengths = {
            row["name"]: [row["ratio_to_fsdp2"][key] / most for key in ("value", "low", "high")]
            for row in found
            if row["case"] == case
        }
        line = lengths.pop(floor)[0] if floor in lengths else None
        bars = [
            Bar(name, length, f"{length * most:.3f}", "ours" if name == ours else "other", (a, b))
            for name, (length, a, b) in lengths.items()
        ]
        sections.append((str(case), bars, line))
    title = f"Step time beside {reference}'s (1.0); dashed: {floor}"
    return render(TEMPLATE, title=title, sections=sections) if found else ""
