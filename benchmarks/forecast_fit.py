"""Fits the constants of `fullshard.outlook` to published runs.

    python -m benchmarks.forecast_fit              fit, and print the difference to constants.py
    python -m benchmarks.forecast_fit --write      fit, and write constants.py
    python -m benchmarks.forecast_fit --left-out   predict each row with constants that were
                                                   fitted without its group

`--left-out` writes benchmarks/results/planner_left_out.csv and the widths of the intervals.

The error of a row is log(predicted / measured). The rows of one group (one publisher's runs of one
model) share one weight, so that a table of a hundred rows does not dominate the fit. Doubtful rows
have lower weights. The loss grows more slowly than the error, because a published figure may be
wrong or its configuration incomplete.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fullshard.outlook import constants
from fullshard.outlook.constants import FITTED, Constants, Familiarity
from fullshard.outlook.memory import GIB, peak_memory
from fullshard.outlook.published import GRAVE, familiarity, read_workload
from fullshard.outlook.speed import tokens_per_s
from fullshard.outlook.workload import Workload

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "planner_public.csv"
LEFT_OUT = HERE / "results" / "planner_left_out.csv"
FOLDS = 10
MEMORY = (
    "logits_held",
    "fused_logits",
    "gathered_blocks",
    "cached_share",
    "base_gib",
)
# Physical bounds of the constants; fullshard/outlook/constants.py has their meaning.
BOUNDS = {
    "matmul_share": (0.6, 1.0),
    "hopper_matmul": (0.6, 1.0),
    "tpu_matmul_share": (0.5, 1.0),
    "narrow_width": (0.0, 1000.0),
    "expert_share": (0.2, 1.0),
    "elementwise_passes": (0.3, 5.0),
    "compiled_passes": (0.1, 1.0),
    "xla_passes": (0.1, 1.0),
    "logits_bytes": (6.0, 60.0),
    "attention_share": (0.2, 1.0),
    "hopper_attention": (0.3, 1.2),
    "tuned_attention": (1.0, 2.5),
    "link_share": (0.2, 1.0),
    "fabric_share": (0.1, 1.0),
    "overlap": (1.0, 8.0),
    "wait_s": (1e-06, 0.001),
    "launch_s": (3e-05, 0.003),
    "fp8_speedup": (1.0, 2.0),
    "logits_held": (10.0, 20.0),
    "fused_logits": (2.0, 12.0),
    "gathered_blocks": (1.0, 3.0),
    "cached_share": (0.0, 1.5),
    "base_gib": (0.0, 2.0),
}
SPEED = tuple(name for name in BOUNDS if name not in MEMORY)
TRUST = {"speed": {"A": 1.0, "B": 0.7, "C": 0.2}, "memory": {"A": 1.0, "B": 1.0, "C": 0.2}}
LOSS = {"speed": ("soft_l1", 0.08), "memory": ("cauchy", 0.06)}
COVERED = 0.8  # of the rows, by their intervals

Row = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """A row with its measurement, in tokens per second and device or in GiB."""

    row: Row
    run: Workload
    measured: float

    @property
    def group(self) -> str:
        return self.row["group"]


def read_rows(path: Path = DATA) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def speed_of(row: Row) -> float | None:
    """Tokens per second and device, measured or derived from a measurement."""

    def cell(key: str) -> float:
        return float(row[key] or 0)

    if cell("tokens_per_sec_per_gpu"):
        return cell("tokens_per_sec_per_gpu")
    if cell("step_time_s") and cell("global_batch_tokens") and cell("gpus"):
        return cell("global_batch_tokens") / cell("gpus") / cell("step_time_s")
    # Model operations a second, of tables that count them as 6 N + 12 L d s a token.
    if cell("tflops_per_gpu") and cell("mfu_pct") and row["source"].startswith("MaxText"):
        attention = 12 * cell("n_layers") * cell("d_model") * cell("seq_len")
        return cell("tflops_per_gpu") * 1e12 / (6e9 * cell("params_b") + attention)
    return None


def memory_of(row: Row) -> float | None:
    return float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None


MEASURED: dict[str, Callable[[Row], float | None]] = {"speed": speed_of, "memory": memory_of}


def samples(what: str, rows: Sequence[Row]) -> list[Sample]:
    """Returns the rows that have a measurement."""
    found = []
    for row in rows:
        measured = MEASURED[what](row) if row["status"] == "ok" else None
        if measured:
            found.append(Sample(row, read_workload(row), measured))
    return found


def predicted(what: str, run: Workload, k: Constants) -> float:
    if what == "speed":
        return tokens_per_s(run, k)
    return peak_memory(run, k).of(run.metric) / GIB


def errors(what: str, found: Sequence[Sample], k: Constants) -> np.ndarray:
    """Returns log(predicted / measured) per row."""
    return np.array([log(predicted(what, one.run, k) / one.measured) for one in found])


def fit(
    what: str, found: Sequence[Sample], start: Constants, held: Mapping[str, float] | None = None
) -> Constants:
    """Returns the best-fitting constants of speed or memory.

    Args:
        what: `speed` or `memory`.
        found: The rows.
        start: Where to begin, and the values of all other constants.
        held: Constants with fixed values.
    """
    held = held or {}
    names = [name for name in (SPEED if what == "speed" else MEMORY) if name not in held]
    low, high = np.array([BOUNDS[name] for name in names]).T
    sizes = Counter(one.group for one in found)
    weights = np.array(
        [TRUST[what][one.row["reliability"]] * sizes[one.group] ** -0.4 for one in found]
    )
    others = {name: getattr(start, name) for name in BOUNDS} | dict(held)

    def constants_at(point: np.ndarray) -> Constants:
        values = low + (high - low) * point
        return Constants(**(others | dict(zip(names, map(float, values), strict=True))))

    def cost(point: np.ndarray) -> np.ndarray:
        return errors(what, found, constants_at(point)) * np.sqrt(weights)

    first = np.array([getattr(start, name) for name in names])
    first = np.clip((first - low) / (high - low), 0.01, 0.99)
    loss, scale = LOSS[what]
    done = least_squares(
        cost, first, bounds=(0, 1), loss=loss, f_scale=scale, x_scale=0.1, diff_step=1e-4,
        max_nfev=25,
    )  # fmt: skip
    return constants_at(done.x)


def folds(found: Sequence[Sample]) -> np.ndarray:
    """Returns the fold of each row; a group is in one fold."""
    groups = sorted({one.group for one in found})
    fold_of = {group: place * 7919 % len(groups) % FOLDS for place, group in enumerate(groups)}
    return np.array([fold_of[one.group] for one in found])


def left_out(what: str, found: Sequence[Sample], start: Constants) -> np.ndarray:
    """Returns the errors of rows under constants fitted without their groups."""
    out = np.zeros(len(found))
    fold_of = folds(found)
    for fold in range(FOLDS):
        kept = [one for one, place in zip(found, fold_of, strict=True) if place != fold]
        away = np.flatnonzero(fold_of == fold)
        k = fit(what, kept, start)
        out[away] = errors(what, [found[place] for place in away], k)
        print(f"{what}: fold {fold + 1} of {FOLDS}", file=sys.stderr)
    return out


def spreads(what: str, found: Sequence[Sample], missed: np.ndarray) -> dict[Familiarity, float]:
    """Returns half widths that cover four of five rows, by familiarity."""
    by_kind: dict[Familiarity, list[float]] = defaultdict(list)
    for one, error in zip(found, missed, strict=True):
        if not any(doubt in GRAVE for doubt in one.run.doubt):
            by_kind[familiarity(one.run, what)].append(abs(error))
    return {kind: float(np.quantile(by_kind[kind], COVERED)) for kind in Familiarity}


def write_constants(k: Constants) -> None:
    """Writes the values into constants.py."""
    path = Path(constants.__file__)
    text = path.read_text(encoding="utf-8")
    for name in BOUNDS:
        value = f"{getattr(k, name):.4g}"
        value = value if "." in value or "e" in value else f"{value}.0"
        text = re.sub(rf"( {name}: float = )\S+", rf"\g<1>{value}", text)
    path.write_text(text, encoding="utf-8")


def write_spreads(found: Mapping[str, Mapping[Familiarity, float]]) -> None:
    path = Path(constants.__file__)
    head, mark, tail = path.read_text(encoding="utf-8").partition("SPREAD = {\n")
    for what, by_kind in found.items():
        before, key, after = tail.partition(f'    "{what}": {{\n')
        for kind, value in by_kind.items():
            after = re.sub(
                rf"(Familiarity\.{kind.name}: )[\d.]+", rf"\g<1>{value:.3f}", after, count=1
            )
        tail = before + key + after
    path.write_text(head + mark + tail, encoding="utf-8")


def write_left_out(found: Mapping[str, tuple[Sequence[Sample], np.ndarray]]) -> None:
    with LEFT_OUT.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["row_id", "what", "measured", "predicted", "familiarity"])
        for what, (rows, missed) in found.items():
            for one, error in zip(rows, missed, strict=True):
                values = (f"{one.measured:.6g}", f"{one.measured * np.exp(error):.6g}")
                table.writerow([one.row["row_id"], what, *values, familiarity(one.run, what)])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fit the constants of the forecast.")
    parser.add_argument("--write", action="store_true", help="write constants.py")
    parser.add_argument("--left-out", action="store_true", help="predict with the group left out")
    asked = parser.parse_args(words)
    rows = read_rows()
    found = {what: samples(what, rows) for what in MEASURED}
    if asked.left_out:
        missed = {what: left_out(what, found[what], FITTED) for what in found}
        write_left_out({what: (found[what], missed[what]) for what in found})
        write_spreads({what: spreads(what, found[what], missed[what]) for what in found})
        return 0
    k = FITTED
    for what in ("memory", "speed"):
        k = fit(what, found[what], k)
        before, after = (errors(what, found[what], one) for one in (FITTED, k))
        moved = np.median(np.abs(before - after))
        print(f"{what}: {len(after)} rows, median error {np.median(np.abs(after)):.1%}")
        print(f"  predictions move by {moved:.2%} from the committed constants")
    for name, (low, high) in BOUNDS.items():
        print(f"  {name:<20}{getattr(k, name):>10.4g}   in [{low:g}, {high:g}]")
    if asked.write:
        write_constants(k)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
