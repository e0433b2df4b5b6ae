"""Drawings of what benchmarks found, as SVG files of their own.

Each is made of the object that the command writes as JSON, so that a committed result can be drawn
again.
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
WIDTH, LEFT, ROW, LANE = 960.0, 150.0, 18.0, 26.0


def _file(height: float, parts: Iterable[str]) -> str:
    head = f'<svg viewBox="-8 0 {WIDTH + 8:g} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">'
    return "".join([head, f"<style>\n{STYLE}</style>", *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _bar(kind: str, x: float, y: float, width: float, height: float, words: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" '
        f'height="{height:g}"><title>{escape(words)}</title></rect>'
    )


def draw_trace(trace: Mapping[str, Any]) -> str:
    """Lanes for what each rank computes, gathers and reduces in one step.

    Args:
        trace: A Chrome trace: named processes and threads, complete events in microseconds.
    """
    events = trace["traceEvents"]
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = [e for e in events if e["name"] == "thread_name"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    bars = [e for e in events if e["ph"] == "X"]
    start = min(e["ts"] for e in bars)
    span = max(e["ts"] + e["dur"] for e in bars) - start
    scale = (WIDTH - LEFT - 10) / span
    rows = {key: 34 + LANE * at + 8 * key[0] for at, key in enumerate(sorted(lanes))}
    hidden = trace["otherData"]["hidden"]
    parts = [
        _text(0, 16, f"One step over {span / 1e3:.0f} ms: {hidden:.1%} of the wire hidden", "title")
    ]
    for key, y in rows.items():
        parts.append(_text(0, y + 14, f"{ranks[key[0]]}, {lanes[key]}"))
    for event in bars:
        key = (event["pid"], event["tid"])
        kind = event["cat"] if lanes[key] == "compute" else lanes[key]
        words = f"{event['name']}: {event['dur'] / 1e3:.2f} ms"
        x = LEFT + (event["ts"] - start) * scale
        parts.append(_bar(kind, x, rows[key], event["dur"] * scale, LANE - 6, words))
    bottom = max(rows.values()) + LANE + 20
    for at, (kind, words) in enumerate(
        {
            "forward": "forward",
            "backward": "backward",
            "wait": "waiting for the wire",
            "gather": "gather",
            "reduce": "reduce",
        }.items()
    ):
        x = LEFT + 160 * at
        parts += [_bar(kind, x, bottom - 10, 12, 12, words), _text(x + 18, bottom, words)]
    return _file(bottom + 10, parts)


def draw_comparison(title: str, rows: Sequence[Mapping[str, Any]], what: Mapping[str, str]) -> str:
    """Bars of some quantities, one under the other.

    Args:
        title: Above all.
        rows: Each with a `name` and the quantities.
        what: Words for each quantity, by its key in the rows.
    """
    parts, y = [_text(0, 16, title, "title")], 34.0
    for key, words in what.items():
        parts.append(_text(0, y + 12, words, "title"))
        y += ROW
        most = max(row[key] for row in rows)
        for row in rows:
            said = f"{row[key]:,.4g}" if row[key] < 1e4 else f"{row[key]:,.0f}"
            width = row[key] / most * (WIDTH - LEFT - 90)
            parts.append(_text(0, y + 12, row["name"]))
            parts.append(_bar("ours", LEFT, y, width, ROW - 5, said))
            parts.append(_text(LEFT + width + 6, y + 11, said))
            y += ROW
        y += 10
    return _file(y, parts)


def draw_ratios(rows: Sequence[Mapping[str, Any]], reference: str, ours: str, floor: str) -> str:
    """Step times as shares of a reference's, engine by engine, case by case.

    Args:
        rows: One per engine, with `case`, `name` and its ratio to the reference, with an interval.
        reference, ours, floor: Names of engines: what is 1, whose bars stand out, and the line that
            none can pass.

    Returns:
        The file, or nothing where the reference did not run.
    """
    found = [row for row in rows if row["ratio_to_fsdp2"]]
    if not found:
        return ""
    most = max(row["ratio_to_fsdp2"]["high"] for row in found)
    scale = (WIDTH - LEFT - 60) / most
    parts, y = (
        [_text(0, 16, f"Step time beside {reference}'s (1.0); dashed: {floor}", "title")],
        34.0,
    )
    for case in dict.fromkeys(row["case"] for row in found):
        own = {row["name"]: row["ratio_to_fsdp2"] for row in found if row["case"] == case}
        parts.append(_text(0, y + 12, str(case), "title"))
        top = y = y + ROW
        for name, ratio in own.items():
            if name == floor:
                continue
            kind = "ours" if name == ours else "other"
            words = f"{ratio['value']:.3f}"
            parts.append(_text(0, y + 12, name))
            parts.append(_bar(kind, LEFT, y, ratio["value"] * scale, ROW - 5, words))
            low, high = (LEFT + ratio[end] * scale for end in ("low", "high"))
            parts.append(f'<path class="ends" d="M{low:.1f} {y + 6.5:g}H{high:.1f}"/>')
            parts.append(_text(high + 6, y + 11, words))
            y += ROW
        if floor in own:
            x = LEFT + own[floor]["value"] * scale
            parts.append(f'<path class="floor" d="M{x:.1f} {top:g}V{y:g}"/>')
        y += 10
    return _file(y + 4, parts)
