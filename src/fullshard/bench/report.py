"""Turns what was measured into rows, one JSON object and a Markdown page. Measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median

from fullshard.bench.cases import FLOOR, OURS, REFERENCE
from fullshard.bench.figures import draw_ratios
from fullshard.bench.machine import IDLE_SHARE
from fullshard.bench.page import SCHEMA_VERSION, provenance, table_lines
from fullshard.bench.statistics import Estimate, paired_ratio, removed_share
from fullshard.bench.step import LOSS_TOLERANCE, CaseResult, EngineResult, loss_errors

MIB = 2**20
METHOD = (
    "Engines live in the same processes, as many as memory allows and FSDP2 always among them, and "
    "take one step each per round, in an order that turns with every round; a step is timed from "
    "when every rank is ready until every rank has finished. Ratios are medians over the rounds of "
    "paired step times, with a 95 % bootstrap interval. One thread a rank, fused AdamW over "
    "what is trained, the same seeds; every rank has its own batches. FSDP2's prefetch distance is "
    "the fastest of 0, 1 and 2 in a pilot.",
    "Parameters, reduction and optimizer are float32. Where a case says bfloat16, forward and "
    "backward compute in it: ours by param_dtype, FSDP2 and FSDP1 by their mixed precision; the "
    "floor's model is bfloat16 and its updated part is cast once a step. Losses are float32; those "
    "of the first steps must agree with FSDP2's within "
    f"{LOSS_TOLERANCE['float32']:g}, in bfloat16 within {LOSS_TOLERANCE['bfloat16']:g}.",
    "CPU is the processor time of one rank, all its threads, which other processes lengthen far "
    "less than the step.",
    "The floor runs the same processes without any message and updates 1/W of the parameters; "
    "removed = 1 - (ours - floor) / (FSDP2 - floor).",
    "Memory is measured with each engine alone in fresh processes: the sampled peak of the "
    "proportional set size during three steps, over what the process held before the model was "
    "built; the rank that needs most counts. Resident counts shared pages in every rank.",
)


@dataclass(frozen=True)
class Report:
    """Everything that one run of the command found."""

    cases: tuple[CaseResult, ...]
    absent: tuple[str, ...]
    machine: dict[str, object]
    versions: dict[str, str]
    command: str


def _by_name(result: CaseResult) -> dict[str, EngineResult]:
    return {engine.peer.name: engine for engine in result.engines}


def ratio_to_reference(engine: EngineResult) -> Estimate | None:
    """Returns the paired ratio of an engine's step to FSDP2's; None without FSDP2."""
    return None if engine.paired_s is None else paired_ratio(engine.times_s, engine.paired_s)


def removed_of(result: CaseResult) -> Estimate | None:
    """Returns the share of FSDP2's overhead above the floor that ours removes."""
    engines = _by_name(result)
    if not {OURS, REFERENCE, FLOOR} <= engines.keys():
        return None
    return removed_share(*(engines[name].times_s for name in (OURS, REFERENCE, FLOOR)))


def is_loaded(result: CaseResult) -> bool:
    """Whether other processes used the machine while this case was timed."""
    return not result.became_idle or result.others_share >= IDLE_SHARE


def rows_of(result: CaseResult) -> list[dict[str, object]]:
    """Returns one JSON row for every engine of a case."""
    rows = []
    for engine in result.engines:
        step_time_s = median(engine.times_s)
        ratio = ratio_to_reference(engine)
        memory = engine.memory
        rows.append(
            {
                "name": engine.peer.name,
                "strategy": engine.peer.strategy,
                "step_time_s": step_time_s,
                "tokens_per_s": result.case.tokens_per_step / step_time_s,
                "memory_peak_bytes": memory.peak_bytes if memory else None,
                "case": result.case.name,
                "num_ranks": result.case.num_ranks,
                "cpu_step_s": engine.cpu_s,
                "num_rounds": len(engine.times_s),
                "ratio_to_fsdp2": ratio.to_dict() if ratio else None,
                "resident_peak_bytes": memory.resident_peak_bytes if memory else None,
                "build_peak_bytes": memory.build_peak_bytes if memory else None,
                "loss_difference": _plain(engine.loss_difference),
                "prefetch": engine.prefetch,
                "equal_losses": engine.has_equal_losses,
                "loaded": is_loaded(result),
            }
        )
    return rows


def _plain(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and isfinite(value) else None


def to_dict(report: Report) -> dict[str, object]:
    """Returns the object that `--json` prints and `--out` keeps."""
    cases = []
    for result in report.cases:
        removed = removed_of(result)
        cases.append(
            {
                **asdict(result.case),
                "others_share": result.others_share,
                "loaded": is_loaded(result),
                "removed_share": removed.to_dict() if removed else None,
                "losses": {e.peer.name: [_plain(x) for x in e.losses] for e in result.engines},
                "times_s": {e.peer.name: list(e.times_s) for e in result.engines},
                "pilot_s": result.pilot_s,
                "unfit": result.unfit,
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": [row for result in report.cases for row in rows_of(result)],
        "absent": list(report.absent),
        "cases": cases,
        "machine": report.machine,
        "versions": report.versions,
        "command": report.command,
        "method": list(METHOD),
    }


def _mib(num_bytes: object) -> str:
    return "-" if num_bytes is None else f"{int(str(num_bytes)) / MIB:.0f}"


COLUMNS = (
    "engine",
    "strategy",
    "step, ms",
    "CPU, ms",
    "tokens/s",
    "to FSDP2 [95 %]",
    "peak, MiB",
    "resident, MiB",
    "loss difference",
)


def table_of(result: CaseResult) -> list[tuple[str, ...]]:
    """Returns the cells of a case's table, one tuple an engine, in the order of COLUMNS."""
    cells = []
    for row, engine in zip(rows_of(result), result.engines, strict=True):
        ratio = ratio_to_reference(engine)
        difference = engine.loss_difference
        prefetch = "" if engine.prefetch is None else f" (prefetch {engine.prefetch})"
        cells.append(
            (
                f"{engine.peer.name}{prefetch}",
                engine.peer.strategy,
                f"{median(engine.times_s) * 1e3:.1f}",
                f"{engine.cpu_s * 1e3:.1f}",
                f"{row['tokens_per_s']:.0f}",
                str(ratio) if ratio else "-",
                _mib(row["memory_peak_bytes"]),
                _mib(row["resident_peak_bytes"]),
                "-" if difference is None else f"{difference:.1e}",
            )
        )
    return cells


def notes_of(result: CaseResult) -> list[str]:
    """Returns the sentences under a case's table."""
    notes = loss_errors(result)
    notes += [f"{name} is absent: {reason}." for name, reason in result.unfit.items()]
    removed = removed_of(result)
    if removed:
        notes.append(f"Removed share of FSDP2's overhead above the floor: {removed}.")
    state = "LOADED" if is_loaded(result) else "idle"
    notes.append(f"Other processes used {result.others_share:.0%} of the cores meanwhile: {state}.")
    return notes


def to_drawing(report: Report) -> str:
    """Returns the ratios of all cases as an SVG file of its own."""
    rows = [row for result in report.cases for row in rows_of(result)]
    return draw_ratios(rows, REFERENCE, OURS, FLOOR)


def to_markdown(report: Report) -> str:
    """Returns a page with one table a case."""
    lines = ["# Training step, side by side", ""]
    lines += provenance(report.machine, report.versions, report.command)
    if report.absent:
        lines += [f"Not installed, so absent: {', '.join(report.absent)}.", ""]
    for result in report.cases:
        lines += [f"## {result.case.describe()}", ""]
        lines += table_lines(COLUMNS, table_of(result))
        lines += ["", *notes_of(result), ""]
    lines += ["## Method", ""]
    lines += [f"- {sentence}" for sentence in METHOD]
    return "\n".join(lines) + "\n"
