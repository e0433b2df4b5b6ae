"""Draws the README's picture from a run: `python tools/readme_picture.py runs/train`.

The picture is the loss chart of that run's report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fullshard.observe.metrics import read_rows
from fullshard.observe.report import loss_chart

STYLE = """\
svg { font-family: system-ui, sans-serif; background: #fff; }
.grid { stroke: #e4e7ec; fill: none; } .axis { stroke: #667085; fill: none; }
.tick { fill: #667085; font-size: 11px; } .series { fill: none; stroke-width: 2; }
.c1 { stroke: #2563eb; } .c2 { stroke: #d97706; } .c3 { stroke: #667085; }
.faint { stroke-opacity: 0.25; stroke-width: 1; } .dashed { stroke-dasharray: 6 4; }
circle.c2 { fill: #d97706; }
"""
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "train.svg"


def main(run: Path) -> int:
    """Write the picture of one run."""
    rows = list(read_rows(run / "metrics.jsonl"))
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    drawing = loss_chart(steps, evaluations, record["measured"].get("baseline_loss"), STYLE)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawing, encoding="utf-8")
    print(f"{PICTURE}: {len(steps)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
