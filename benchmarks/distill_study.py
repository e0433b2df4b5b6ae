"""Does a student learn more from its teacher than from the text alone? (`make distill-study`)

python -m benchmarks.distill_study [--steps 200] [--out benchmarks/results]

A small mixture of experts is trained as the teacher. The student of the default distillation is cut
out of it and trained on the same tokens in the same order, with and without the teacher, at three
learning rates and with three seeds. Each side is judged at its best rate.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

from fullshard.bench.measurement import Neighbours, Page

SIDES = ("distilled", "alone")
CONFIDENCE = 0.95


def run(*words: object, ranks: int = 1) -> dict[str, Any]:
    """Runs a command of fullshard and returns its measurements.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", "fullshard", "--json", *map(str, words)]
    command.append(f"num_processes={ranks}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    return json.loads(done.stdout)["measured"]


def job(name: str) -> Path:
    """Returns a configuration that ships with fullshard."""
    return Path(str(files("fullshard.config.defaults").joinpath(name)))


def study(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns held-out losses of both sides by rate and seed, and of the teacher."""
    steps, rates, seeds = options.steps, options.rates, options.seeds
    teacher, cut = folder / "teacher", folder / "cut"
    distills, teaches = job("distill_job.yaml"), job("teacher_job.yaml")
    kept = ("save_strategy=no", "per_device_train_batch_size=8")
    lessons = f"max_steps={options.teacher_steps}"
    place = f"output_dir={teacher}"
    taught = run("train", teaches, place, lessons, "eval_strategy=steps", ranks=2)
    whole = f"teacher={teacher / 'model'}"
    # A rate of zero leaves the student as it was cut.
    run("distill", distills, whole, f"output_dir={cut}", "max_steps=1", "learning_rate=0", *kept)
    student = cut / "model"

    def one(side: str, rate: float, seed: int) -> float:
        place = folder / f"{side}-{rate:g}-{seed}"
        how = (f"output_dir={place}", f"max_steps={steps}", f"learning_rate={rate}", *kept)
        if side == "distilled":
            words = ("distill", distills, whole, f"student={student}", "layers=null")
            return run(*words, "experts=null", f"seed={seed}", *how)["eval_loss"]
        text = ("train", teaches, "model.config=null", f"model={student}", f"seed={seed}")
        shape = ("lr_scheduler_type=cosine", "warmup_steps=20", "eval_strategy=steps")
        return run(*text, *shape, *how)["eval_loss"]

    cases = list(product(SIDES, rates, seeds))
    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(lambda case: one(*case), cases))
    return {"teacher_loss": taught["eval_loss"], "runs": list(zip(cases, losses, strict=True))}


def judge(found: dict[str, Any], rates: list[float], seeds: list[int]) -> dict[str, Any]:
    """Compares both sides at their best rates; the interval covers the seeds."""
    losses = {tuple(case): loss for case, loss in found["runs"]}

    def of(side: str, rate: float) -> list[float]:
        return [losses[side, rate, seed] for seed in seeds]

    best = {side: min(rates, key=lambda r, s=side: statistics.mean(of(s, r))) for side in SIDES}
    gains = [
        alone - distilled
        for alone, distilled in zip(
            of("alone", best["alone"]), of("distilled", best["distilled"]), strict=True
        )
    ]
    mean = statistics.mean(gains)
    reach = student_t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1)
    half = reach * statistics.stdev(gains) / math.sqrt(len(gains))
    return {"best_rate": best, "gain": mean, "low": mean - half, "high": mean + half}


def page(
    found: dict[str, Any],
    verdict: dict[str, Any],
    options: argparse.Namespace,
    neighbours: Neighbours,
) -> Page:
    """Returns a table of all runs."""
    rows = [
        {"side": side, "learning_rate": rate, "seed": seed, "eval_loss": loss}
        for (side, rate, seed), loss in found["runs"]
    ]
    rates = sorted({row["learning_rate"] for row in rows})
    cells = []
    for side, rate in product(SIDES, rates):
        losses = [r["eval_loss"] for r in rows if (r["side"], r["learning_rate"]) == (side, rate)]
        chosen = "best" if verdict["best_rate"][side] == rate else ""
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        cells.append([side, f"{rate:g}", shown, f"{statistics.mean(losses):.4f}", chosen])
    gain = f"{verdict['gain']:.4f} [{verdict['low']:.4f}, {verdict['high']:.4f}]"
    return Page(
        "distill_study",
        "A student with its teacher and alone",
        "python -m benchmarks.distill_study " + " ".join(sys.argv[1:]),
        [*rows, {"teacher_loss": found["teacher_loss"]}, verdict],
        ["student", "learning rate", "held-out loss by seed, nats", "mean", ""],
        cells,
        [
            "Teacher and student are those of `fullshard distill` without a configuration: a "
            "Qwen3-MoE of 4 layers and 8 experts, and 2 layers with 4 experts cut out of it; the "
            f"teacher learns for {options.teacher_steps} steps.",
            f"Both sides begin with the same weights and see the same {options.steps} steps of "
            "8 x 128 tokens in the same order; a seed changes the order. Alone means the "
            "cross-entropy of the text, by `fullshard train`.",
            "Each side is judged at the rate with the lowest mean; the interval is Student's t "
            f"over the seeds' paired differences, {CONFIDENCE:.0%}.",
        ],
        neighbours,
        notes=[
            f"The teacher's held-out loss is {found['teacher_loss']:.4f}.",
            f"The teacher brings {gain} nats a token.",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of the student")
    parser.add_argument("--teacher-steps", type=int, default=1500, help="teacher steps")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds: expected two or more: their differences make the interval")
    folder = tempfile.TemporaryDirectory(prefix="fullshard-study-")
    with Neighbours() as neighbours, folder as name:
        found = study(Path(name), options)
    print(json.dumps(found), flush=True)
    verdict = judge(found, options.rates, options.seeds)
    result = page(found, verdict, options, neighbours)
    print(result.to_markdown())
    result.write(options.out)


if __name__ == "__main__":
    main()
