"""Compares the losses of DDP, FSDP2 and fullshard over a thousand steps on the same text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import JsonFlag, run_script
from benchmarks.svg_lines import Axes, svg_lines
from fullshard.bench.measurement import run_ranks
from fullshard.bench.step import Case
from fullshard.cli.bench import OutFlag
from fullshard.cli.outcome import Outcome
from fullshard.config.schema import DataConfig
from fullshard.data.text import DatasetSettings, make_dataset, text_source

NAME = "benchmarks.long_parity"
MEASURE = "benchmarks.long_parity_rank:measure"
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


@dataclass(frozen=True)
class Job:
    """Tokens to train on, and number of steps.

    Attributes:
        sequences: (num_sequences, seq + 1), token ids.
    """

    sequences: np.ndarray
    num_steps: int


def run(num_steps: int, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Trains every engine and returns the loss curves and their settings.

    Raises:
        FullshardError: A rank failed. Its own error is already on standard error.
    """
    settings = DatasetSettings(CASE.seq + 1, CASE.vocab, DataConfig(validation_fraction=0))
    rows = make_dataset([text_source(None)], settings, None).train
    sequences = rows.take(np.arange(len(rows)))
    losses, *_ = run_ranks(
        MEASURE,
        Job(sequences, num_steps),
        CASE.num_ranks,
        what="long parity",
        timeout_s=timeout_s,
    )
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
    """Returns the largest difference at one step per pair of curves; NaN if a curve has NaN."""
    names = list(losses)
    return {
        f"{one} - {other}": float(np.max(np.abs(np.subtract(losses[one], losses[other]))))
        for at, one in enumerate(names)
        for other in names[at + 1 :]
    }


def plot(losses: Mapping[str, Sequence[float]]) -> str:
    """Returns an SVG file of all curves over the steps."""
    return svg_lines(losses, Axes(f"{CASE.num_ranks} ranks, loss in nats per token", STYLE))


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps per engine.")] = 1000,
    out: OutFlag = Path("benchmarks/results"),
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Train DDP, FSDP2 and fullshard on the same batches and compare their losses."""
    result = run(steps)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "long_parity.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "long_parity.svg").write_text(plot(result["losses"]))
    print(f"{result['model']}: {steps} steps")
    for name, losses in result["losses"].items():
        print(f"  {name:12} first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    for pair, largest in result["largest_difference"].items():
        print(f"  {pair}: at most {largest:.1e} apart")
    return Outcome(result)


if __name__ == "__main__":
    run_script(NAME)
