"""Scores the forecast on published runs, left out of the fit, and on local runs.

    python -m benchmarks.planner               from results/*.csv and results/time.json
    python -m benchmarks.planner --ablation    each constant neutralised, the others fitted again
    python -m benchmarks.planner --out FILE    also write a file

`make bench-planner` runs the first. It reads the predictions of
`python -m benchmarks.forecast_fit --left-out`, whose constants were fitted without the row's group.
Predictions of runs on a calibrated machine come from `python -m benchmarks.times`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from pathlib import Path

import numpy as np

from benchmarks.forecast_baselines import RULES, boosted_trees, has_trees
from benchmarks.forecast_fit import (
    LEFT_OUT,
    MEASURED,
    MEMORY,
    SPEED,
    Sample,
    errors,
    fit,
    read_rows,
    samples,
)
from benchmarks.times import summary
from fullshard.outlook.constants import FITTED, Familiarity
from fullshard.outlook.published import familiarity, predict, spread
from fullshard.outlook.workload import Compiler, Metric, Parallelism, Tuning, Workload

TIMES = Path(__file__).parent / "results" / "time.json"
TIMES_COMMAND = (
    "python -m benchmarks.times --wait --calibration benchmarks/results/calibration.json "
    "--out benchmarks/results"
)
DRAWS = 2000  # of the bootstrap over groups
APART = 1.1  # times faster: a decision that matters
TREES = (
    "Boosted trees see the numbers of a row as logarithms, and its kinds; of speed they learn the "
    "share of the device's peak. Their groups are left out ten parts at a time, as ours are."
)
NO_TREES = (
    "Boosted trees are not among them, because scikit-learn is not installed: "
    "`pip install --constraint constraints.txt --editable '.[bench]'`."
)
# Values of constants that remove their terms.
NEUTRAL = {
    "matmul_share": 1.0,
    "hopper_matmul": 1.0,
    "tpu_matmul_share": 1.0,
    "narrow_width": 0.0,
    "expert_share": 1.0,
    "elementwise_passes": 0.3,
    "compiled_passes": 1.0,
    "xla_passes": 1.0,
    "logits_bytes": 6.0,
    "attention_share": 1.0,
    "hopper_attention": 1.0,
    "tuned_attention": 1.0,
    "link_share": 1.0,
    "fabric_share": 1.0,
    "overlap": 8.0,
    "wait_s": 1e-6,
    "launch_s": 3e-5,
    "fp8_speedup": 1.0,
    "logits_held": 2.0,
    "fused_logits": 12.0,
    "gathered_blocks": 1.0,
    "cached_share": 0.0,
    "base_gib": 0.0,
}
# Hides a feature that has no constant.
UNSEEN: dict[str, Callable[[Workload], Workload]] = {
    "recompute": lambda run: replace(run, kernels=replace(run.kernels, recompute=0.0, kept=1.0)),
    "recompute by operation": lambda run: replace(
        run, kernels=replace(run.kernels, by_operation=False)
    ),
    "a compiler": lambda run: replace(run, kernels=replace(run.kernels, compiler=Compiler.NONE)),
    "adapters": lambda run: replace(run, tuning=Tuning.FULL),
    "tensor, context and pipeline ranks": lambda run: replace(
        run, mesh=Parallelism(run.mesh.world_size)
    ),
    "saving": lambda run: replace(run, saves_whole=False),
}


@dataclass(frozen=True)
class Scored:
    """Rows of one kind with their log(predicted / measured)."""

    found: list[Sample]
    missed: np.ndarray

    def where(self, keep: Callable[[Sample], bool]) -> Scored:
        places = [place for place, one in enumerate(self.found) if keep(one)]
        return Scored([self.found[place] for place in places], self.missed[places])

    @property
    def relative(self) -> np.ndarray:
        """Returns relative errors: |predicted / measured - 1|."""
        return np.abs(np.exp(self.missed) - 1)

    def interval(self) -> tuple[float, float]:
        """Returns the 90 % bootstrap interval of the median over groups."""
        groups: dict[str, list[float]] = defaultdict(list)
        for one, error in zip(self.found, self.relative, strict=True):
            groups[one.group].append(error)
        values = [np.array(errors) for errors in groups.values()]
        rng = np.random.default_rng(0)
        draws = [
            np.median(
                np.concatenate([values[i] for i in rng.integers(len(values), size=len(values))])
            )
            for _ in range(DRAWS)
        ]
        low, high = np.quantile(draws, (0.05, 0.95))
        return float(low), float(high)

    def covered(self, what: str) -> float:
        """Share of rows whose interval contains the measurement."""
        widths = np.array([spread(one.run, what) for one in self.found])
        return float(np.mean(np.abs(self.missed) <= widths))


def committed(what: str) -> Scored:
    """Returns the committed left-out predictions."""
    known = {one.row["row_id"]: one for one in samples(what, read_rows())}
    with LEFT_OUT.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["what"] == what]
    found = [known[line["row_id"]] for line in lines]
    missed = [log(float(line["predicted"]) / float(line["measured"])) for line in lines]
    return Scored(found, np.array(missed))


# ---- decisions -----------------------------------------------------------------------------------


def right_decisions(scored: Scored) -> tuple[int, float]:
    """Returns the pairs of a group that differ and how often the faster one was predicted."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, error in zip(scored.found, scored.missed, strict=True):
        groups[one.group].append((one.measured, one.measured * exp(error)))
    pairs = [
        ((first[0] > second[0]) == (first[1] > second[1]))
        for rows in groups.values()
        for first, second in combinations(rows, 2)
        if max(first[0], second[0]) / min(first[0], second[0]) >= APART
    ]
    return len(pairs), sum(pairs) / len(pairs)


def right_fits() -> tuple[int, int, int, int]:
    """Returns (correct, all) of the runs that ran, then of those that ran out of memory."""
    ran = [predict(row)["pred_fits"] for row in read_rows() if row["status"] == "ok"]
    failed = [predict(row)["pred_fits"] for row in read_rows() if row["status"].startswith("oom")]
    return ran.count("true"), len(ran), failed.count("false"), len(failed)


# ---- pages ---------------------------------------------------------------------------------------


def score_lines() -> list[str]:
    """Returns the table of scores."""
    lines = [
        "| what | rows | groups | median error | 90 % of draws | mean | in the interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for what in ("speed", "memory"):
        scored = committed(what)
        reliable = scored.where(lambda one: one.row["reliability"] != "C")
        parts = {"all": scored, "reliable (A, B)": reliable}
        for metric in Metric if what == "memory" else ():
            parts[f"reliable, {metric}"] = reliable.where(
                lambda one, metric=metric: one.run.metric is metric
            )
        for kind in Familiarity:
            alike = [familiarity(one.run, what) is kind for one in scored.found]
            found = [one for one, keep in zip(scored.found, alike, strict=True) if keep]
            parts[kind] = Scored(found, scored.missed[np.array(alike)])
        for name, part in parts.items():
            low, high = part.interval()
            lines.append(
                f"| {what}, {name} | {len(part.found)} | {len({o.group for o in part.found})} "
                f"| {np.median(part.relative):.1%} | {low:.1%} to {high:.1%} "
                f"| {np.mean(part.relative):.1%} | {part.covered(what):.0%} |"
            )
    return lines


def baseline_lines() -> list[str]:
    """Scores simple rules on the same rows, with the same groups left out."""
    lines = ["| rule | median error | mean |", "|---|---|---|"]
    for what in ("speed", "memory"):
        found = committed(what).found
        rules = {name: rule(found) for name, rule in RULES[what].items()}
        trees = boosted_trees(what, found)
        if trees is not None:
            rules["boosted trees"] = trees
        for name, missed in rules.items():
            relative = np.abs(np.exp(missed) - 1)
            lines.append(
                f"| {what}, {name} | {np.median(relative):.1%} | {np.mean(relative):.1%} |"
            )
    return lines


def worst_lines(count: int = 8) -> list[str]:
    """Returns the groups with the largest errors."""
    lines = ["| what | group | rows | predicted over measured |", "|---|---|---|---|"]
    for what in ("speed", "memory"):
        groups: dict[str, list[float]] = defaultdict(list)
        scored = committed(what)
        for one, error in zip(scored.found, scored.missed, strict=True):
            groups[one.group].append(error)
        order = sorted(groups, key=lambda group: -float(np.median(np.abs(groups[group]))))
        for group in order[:count]:
            ratio = exp(float(np.median(groups[group])))
            name = group.replace("|", " / ")
            lines.append(f"| {what} | {name} | {len(groups[group])} | {ratio:.2f} |")
    return lines


def ablation_lines() -> list[str]:
    """Scores in-sample errors with one term removed and the other constants fitted again."""
    lines = [
        "| constant | without its term | median error | of the rows it moves |",
        "|---|---|---|---|",
    ]
    for what, names in (("speed", SPEED), ("memory", MEMORY)):
        found = samples(what, read_rows())
        whole = errors(what, found, FITTED)
        lines.append(f"| (all of {what}) | | {np.median(np.abs(np.exp(whole) - 1)):.1%} | |")
        for name in names:
            k = fit(what, found, FITTED, {name: NEUTRAL[name]})
            missed = errors(what, found, k)
            moved = np.abs(missed - whole) > 0.02
            part = np.median(np.abs(np.exp(missed[moved]) - 1)) if moved.any() else 0.0
            before = np.median(np.abs(np.exp(whole[moved]) - 1)) if moved.any() else 0.0
            lines.append(
                f"| {name} | {NEUTRAL[name]:g} | {np.median(np.abs(np.exp(missed) - 1)):.1%} "
                f"| {before:.1%} to {part:.1%}, {moved.sum()} rows |"
            )
    return lines


def unseen_lines() -> list[str]:
    """Scores in-sample errors of the rows that use a feature, with the feature hidden."""
    lines = ["| what | not seen | rows | median error | unseen |", "|---|---|---|---|---|"]
    for what in MEASURED:
        found = samples(what, read_rows())
        whole = errors(what, found, FITTED)
        for name, change in UNSEEN.items():
            blind = [Sample(one.row, change(one.run), one.measured) for one in found]
            missed = errors(what, blind, FITTED)
            has = np.abs(missed - whole) > 0.02
            if has.any():
                before, after = (np.median(np.abs(np.exp(e[has]) - 1)) for e in (whole, missed))
                lines.append(f"| {what} | {name} | {has.sum()} | {before:.1%} | {after:.1%} |")
    return lines


def own_lines() -> list[str]:
    """Scores runs on the calibrated machine, from `python -m benchmarks.times`."""
    if not TIMES.is_file():
        return [f"Not measured yet. {TIMES_COMMAND} writes results/{TIMES.name}."]
    found = json.loads(TIMES.read_text(encoding="utf-8"))
    rows = found["rows"]
    lines = [
        "| run | ranks | strategy | planned, ms | measured, ms | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['num_ranks']} | {row['strategy']} | {1e3 * row['planned_s']:.1f} "
        f"| {1e3 * row['measured_s']:.1f} | {row['error']:+.1%} |"
        for row in rows
    ]
    state = "LOADED" if any(row["loaded"] for row in rows) else "idle"
    return [
        f"Written by `{found['command']}`; none of the runs is in the calibration. "
        f"{summary([row['error'] for row in rows])} Other processes used "
        f"{found['others_share']:.0%} of the cores meanwhile: {state}.",
        "",
        *lines,
    ]


def page(*, ablation: bool) -> str:
    """Returns the whole page as Markdown."""
    pairs, right = right_decisions(committed("speed"))
    ran, of_ran, failed, of_failed = right_fits()
    parts = [
        "# The forecast against published runs",
        "Written by `python -m benchmarks.planner --ablation --out`. Every row was predicted by "
        "constants that were fitted without its group (a publisher's runs of one model).",
        "\n".join(score_lines()),
        f"Which of two runs of a group, at least {APART - 1:.0%} apart, is faster: "
        f"{right:.1%} of {pairs:,} pairs right.",
        f"Of {of_ran} runs that ran, {ran} are said to fit; of {of_failed} that failed (out of "
        f"memory, or for a reason that is not published), {failed} are said not to.",
        "## Simple rules on the same rows\n\n" + "\n".join(baseline_lines()),
        TREES if has_trees() else NO_TREES,
        "## Where it fails\n\n" + "\n".join(worst_lines()),
        "## Steps on a calibrated machine\n\n" + "\n".join(own_lines()),
    ]
    if ablation:
        parts.append("## Without a term (all rows, in sample)\n\n" + "\n".join(ablation_lines()))
        parts.append(
            "## Without seeing something that has no constant\n\n" + "\n".join(unseen_lines())
        )
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Score the forecast.")
    parser.add_argument("--ablation", action="store_true", help="refit without each term; slow")
    parser.add_argument("--out", type=Path, help="also write this Markdown file")
    asked = parser.parse_args(words)
    text = page(ablation=asked.ablation)
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
