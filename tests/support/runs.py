"""What a run left in its folder, and what comes between its start and its ranks."""

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
    """How it went."""
    return json.loads((run / "run.json").read_text())


def numbers(run: Path, *kinds: str) -> dict[str, float]:
    """Of these kinds, which are the losses and held-out losses unless told, by kind and step."""
    kinds = kinds or ("loss", "eval_loss")
    rows = [*read_rows(run / "metrics.jsonl")]
    return {f"{kind} {row['step']}": row[kind] for row in rows for kind in kinds if kind in row}


def same_losses(fullshard: Callable[..., Any], folder: Path, *words: object) -> dict[str, float]:
    """Runs a command on torch and on jax; the losses of both, which are the same."""
    for backend in ("torch", "jax"):
        more = (f"backend={backend}", f"output_dir={folder / backend}")
        fullshard(*words, *more, code=0)
    found = numbers(folder / "jax")
    assert found == pytest.approx(numbers(folder / "torch"), rel=1e-5)
    return found


def losses(run: Path) -> dict[int, float]:
    """By step."""
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}


def other_cache_at_the_start(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Another teacher's logits of the same data take a cache's place before ranks are started."""
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
