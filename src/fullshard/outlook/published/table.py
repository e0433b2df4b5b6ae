"""Predictions for the rows of a table: tokens a second, step time, peak memory, whether it fits.

Every number has an interval that holds the truth for four runs in five, as far as published runs
tell (`benchmarks/results/planner.md`). The further a row is from runs that are well known (devices,
parallelism, formats) and the more had to be assumed, the wider it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

from fullshard.outlook.constants import FITTED, SPREAD, Constants, Familiarity
from fullshard.outlook.memory import GIB, peak_memory
from fullshard.outlook.published.rows import read_workload
from fullshard.outlook.speed import tokens_per_s
from fullshard.outlook.workload import Math, Metric, Tuning, Workload

COLUMNS = (
    *(
        f"pred_{name}{end}"
        for name in ("tokens_per_sec_per_gpu", "step_time_s", "peak_mem_gib")
        for end in ("", "_lo", "_hi")
    ),
    "pred_fits",
    "pred_note",
)
GRAVE = ("device", "model")  # without these, a guess is of the right order at best


def predict(row: Mapping[str, str], k: Constants = FITTED) -> dict[str, str]:
    """The predictions for one row, as text: COLUMNS.

    A row that cannot be read has blanks, and says in `pred_note` what was expected of which column.
    """
    try:
        run = read_workload(row)
    except ValueError as error:
        return {**dict.fromkeys(COLUMNS, ""), "pred_note": f"not predicted: {error}"}
    speed = tokens_per_s(run, k)
    batch = run.batch.seq_len * run.batch.micro_batch * run.batch.accumulation
    step_s = batch / run.mesh.model_ranks / speed
    held = peak_memory(run, k)
    memory = held.of(run.metric) / GIB
    cells = {
        **_interval("tokens_per_sec_per_gpu", speed, spread(run, "speed")),
        **_interval("step_time_s", step_s, spread(run, "speed")),
        **_interval("peak_mem_gib", memory, spread(run, "memory")),
        "pred_fits": str(held.active <= run.device.memory_gib * GIB).lower(),
        "pred_note": f"assumed: {', '.join(run.doubt)}" if run.doubt else "",
    }
    return {name: cells[name] for name in COLUMNS}


def _interval(name: str, value: float, spread: float) -> dict[str, str]:
    values = (value, value * exp(-spread), value * exp(spread))
    return {
        f"pred_{name}{end}": f"{number:.6g}"
        for end, number in zip(("", "_lo", "_hi"), values, strict=True)
    }


def spread(run: Workload, what: str) -> float:
    """Half the interval's width, of the logarithm.

    Args:
        run: The run.
        what: `speed` or `memory`.
    """
    grave = sum(doubt in GRAVE for doubt in run.doubt)
    return SPREAD[what][familiarity(run, what)] * (1 + 2 * grave)


def familiarity(run: Workload, what: str) -> Familiarity:
    """How much like the runs that are known best."""
    doubts = set(run.doubt) - ({"activation_checkpointing"} if what == "speed" else set[str]())
    if doubts or (what == "memory" and run.metric is Metric.UNKNOWN):
        return Familiarity.ASSUMED
    usual = run.precision.math is Math.HALF and run.mesh.model_ranks == 1 and not run.offloads
    if what == "speed":
        known = run.device.name in ("A100", "A100-40", "H100")
        usual = usual and known and run.tuning is Tuning.FULL
    return Familiarity.USUAL if usual else Familiarity.UNUSUAL
