"""A thousand steps of DDP, FSDP2 and fullshard on the same text: their losses, side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.bench.cases import Case
from fullshard.bench.ranks import run_module
from fullshard.observe.chart import Axes, Series, line_chart, standalone
from fullshard.train.dataset import DatasetSettings, make_dataset
from fullshard.train.text import embedded_corpus

RANK_MODULE = "fullshard.bench.long_parity_rank"
TOKENS_FILE, LOSSES_FILE = "train.npy", "losses.json"
ENGINES = ("ddp", "fsdp2", "fullshard")
CASE = Case("parity", width=128, layers=2, vocab=512, batch=4, seq=64, num_ranks=2)
LEARNING_RATE, MAX_NORM, SEED = 1e-3, 1.0, 0
# Equal curves cover each other: the first is the widest.
STYLE = """\
svg { font-family: system-ui, sans-serif; background: #fff; }
.grid { stroke: #e4e7ec; fill: none; } .axis { stroke: #667085; fill: none; }
.tick { fill: #667085; font-size: 11px; } .series { fill: none; stroke-linejoin: round; }
.c1 { stroke: #93b4f5; stroke-width: 7; } .c2 { stroke: #d97706; stroke-width: 3.5; }
.c3 { stroke: #111827; stroke-width: 1; }
"""


def run(num_steps: int, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Trains every engine and returns the curves with what they were trained on.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    settings = DatasetSettings(CASE.seq + 1, 0.0, CASE.vocab)
    with tempfile.TemporaryDirectory(prefix="fullshard-parity-") as name:
        folder = Path(name)
        np.save(folder / TOKENS_FILE, make_dataset(embedded_corpus(), settings, None).train)
        arguments = [str(folder), str(num_steps)]
        run_module(
            RANK_MODULE, arguments, CASE.num_ranks, folder, what="long parity", timeout_s=timeout_s
        )
        losses = json.loads((folder / LOSSES_FILE).read_text())
    return {
        "model": CASE.describe(),
        "case": asdict(CASE),
        "num_steps": num_steps,
        "optimizer": {"name": "AdamW", "learning_rate": LEARNING_RATE, "max_norm": MAX_NORM},
        "seed": SEED,
        "torch": torch.__version__,
        "largest_difference": differences(losses),
        "losses": losses,
    }


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest distance between two curves at one step, for each pair; NaN where one has NaN."""
    names = list(losses)
    return {
        f"{one} - {other}": float(np.max(np.abs(np.subtract(losses[one], losses[other]))))
        for at, one in enumerate(names)
        for other in names[at + 1 :]
    }


def plot(losses: Mapping[str, Sequence[float]]) -> str:
    """All curves over the steps, as an SVG file of its own."""
    series = [
        Series(name, range(1, len(curve) + 1), curve, color)
        for color, (name, curve) in enumerate(losses.items(), start=1)
    ]
    drawing = line_chart(series, Axes("step", "loss in nats a token", width=900.0))
    title = f"{CASE.num_ranks} ranks, loss in nats a token"
    return standalone(drawing, list(losses), STYLE, title)
