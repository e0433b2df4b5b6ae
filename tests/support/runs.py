"""Reads what a run wrote into its folder, and interferes between its start and its ranks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.observe.metrics import read_rows
from fullshard.recipes.distill.loss import CHECKSUM, TopK
from fullshard.run import start


def record_of(run: Path) -> dict[str, Any]:
    """Returns the record of a run."""
    return json.loads((run / "run.json").read_text())


def numbers(run: Path, *kinds: str) -> dict[str, float]:
    """Returns metrics of these kinds by kind and step; by default, losses and held-out losses."""
    kinds = kinds or ("loss", "eval_loss")
    rows = [*read_rows(run / "metrics.jsonl")]
    return {f"{kind} {row['step']}": row[kind] for row in rows for kind in kinds if kind in row}


def same_losses(fullshard: Callable[..., Any], folder: Path, *words: object) -> dict[str, float]:
    """Runs a command on torch and on jax; compares and returns the losses."""
    for backend in ("torch", "jax"):
        more = (f"backend={backend}", f"output_dir={folder / backend}")
        fullshard(*words, *more, code=0)
    found = numbers(folder / "jax")
    assert found == pytest.approx(numbers(folder / "torch"), rel=1e-5)
    return found


def losses(run: Path) -> dict[int, float]:
    """Returns losses by step."""
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}


def other_cache_at_the_start(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Replaces a cache by another teacher's logits before the ranks start."""
    other = shutil.copytree(cache, cache.with_name("other"))
    values = np.load(other / "values.npy", mmap_mode="r+")
    values[:] *= 0.5
    told = json.loads((other / "cache.json").read_text())
    told[CHECKSUM] = TopK.load(other).checksum()
    (other / "cache.json").write_text(json.dumps(told))
    start_ranks = start.start_ranks

    def swap_and_start(*given: Any) -> Any:
        cache.rename(cache.with_name("first"))
        other.rename(cache)
        return start_ranks(*given)

    monkeypatch.setattr(start, "start_ranks", swap_and_start)
