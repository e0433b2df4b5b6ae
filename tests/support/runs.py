"""What a run left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullshard.observe.metrics import read_rows


def record_of(run: Path) -> dict[str, Any]:
    """How it went."""
    return json.loads((run / "run.json").read_text())


def numbers(run: Path, *kinds: str) -> dict[str, float]:
    """Of these kinds, which are the losses and held-out losses unless told, by kind and step."""
    kinds = kinds or ("loss", "eval_loss")
    rows = [*read_rows(run / "metrics.jsonl")]
    return {f"{kind} {row['step']}": row[kind] for row in rows for kind in kinds if kind in row}


def losses(run: Path) -> dict[int, float]:
    """By step."""
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}
