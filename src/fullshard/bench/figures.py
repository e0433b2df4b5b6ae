"""Drawings of benchmark results as SVG files.

Each drawing is made from the JSON object that the command writes, so that committed results can be
drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

STYLE = """\
svg { font-family: system-ui, sans-serif; background: #fff; }
text { fill: #475467; font-size: 12px; } .title { fill: #101828; font-size: 14px; }
.compute, .other { fill: #98a2b3; } .ours, .backward { fill: #2563eb; } .forward { fill: #60a5fa; }
.gather { fill: #059669; } .reduce { fill: #d97706; } .wait { fill: #f04438; }
.floor { stroke: #101828; stroke-dasharray: 4 3; } .ends { stroke: #101828; }
"""
WIDTH, LEFT, ROW = 960.0, 150.0, 18.0


def svg_of(height: float, parts: Iterable[str]) -> str:
    """Returns an SVG file, WIDTH units wide."""
    head = f'<svg viewBox="-8 0 {WIDTH + 8:g} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">'
    return "".join([head, f"<style>\n{STYLE}</style>", *parts, "</svg>\n"])


def text_at(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Returns text at a place."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bar_at(kind: str, x: float, y: float, width: float, height: float, words: str) -> str:
    """Returns a bar of a class of STYLE; its words are a tooltip."""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" '
        f'height="{height:g}"><title>{escape(words)}</title></rect>'
    )


def draw_comparison(title: str, rows: Sequence[Mapping[str, Any]], what: Mapping[str, str]) -> str:
    """Returns bars of some quantities, one under the other.

    Args:
        title: Title of the drawing.
        rows: Rows with a `name` and the quantities.
        what: Title of each quantity, by its key in the rows.
    """
    parts, y = [text_at(0, 16, title, "title")], 34.0
    for key, words in what.items():
        parts.append(text_at(0, y + 12, words, "title"))
        y += ROW
        most = max(row[key] for row in rows)
        for row in rows:
            said = f"{row[key]:,.4g}" if row[key] < 1e4 else f"{row[key]:,.0f}"
            width = row[key] / most * (WIDTH - LEFT - 90)
            parts.append(text_at(0, y + 12, row["name"]))
            parts.append(bar_at("ours", LEFT, y, width, ROW - 5, said))
            parts.append(text_at(LEFT + width + 6, y + 11, said))
            y += ROW
        y += 10
    return svg_of(y, parts)


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
    if not found:
        return ""
    most = max(row["ratio_to_fsdp2"]["high"] for row in found)
    scale = (WIDTH - LEFT - 60) / most
    parts, y = (
        [text_at(0, 16, f"Step time beside {reference}'s (1.0); dashed: {floor}", "title")],
        34.0,
    )
    for case in dict.fromkeys(row["case"] for row in found):
        own = {row["name"]: row["ratio_to_fsdp2"] for row in found if row["case"] == case}
        parts.append(text_at(0, y + 12, str(case), "title"))
        top = y = y + ROW
        for name, ratio in own.items():
            if name == floor:
                continue
            kind = "ours" if name == ours else "other"
            words = f"{ratio['value']:.3f}"
            parts.append(text_at(0, y + 12, name))
            parts.append(bar_at(kind, LEFT, y, ratio["value"] * scale, ROW - 5, words))
            low, high = (LEFT + ratio[end] * scale for end in ("low", "high"))
            parts.append(f'<path class="ends" d="M{low:.1f} {y + 6.5:g}H{high:.1f}"/>')
            parts.append(text_at(high + 6, y + 11, words))
            y += ROW
        if floor in own:
            x = LEFT + own[floor]["value"] * scale
            parts.append(f'<path class="floor" d="M{x:.1f} {top:g}V{y:g}"/>')
        y += 10
    return svg_of(y + 4, parts)
