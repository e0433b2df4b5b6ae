"""Draws `results/step.json` of `fullshard bench step`: step times relative to FSDP2.

python -m benchmarks.ratios        writes results/step.svg
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from fullshard.bench.step import FLOOR, OURS, REFERENCE

HERE = Path(__file__).parent


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
    kind: str
    ends: tuple[float, float]


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
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["place"] = "{:.1f}".format
    template = environment.from_string((HERE / "bars.svg.j2").read_text(encoding="utf-8"))
    title = f"Step time beside {reference}'s (1.0); dashed: {floor}"
    return template.render(title=title, sections=sections) if found else ""


if __name__ == "__main__":
    rows = json.loads((HERE / "results" / "step.json").read_text(encoding="utf-8"))["rows"]
    (HERE / "results" / "step.svg").write_text(draw_ratios(rows, REFERENCE, OURS, FLOOR))
