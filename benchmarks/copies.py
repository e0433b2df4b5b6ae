"""`python -m benchmarks.copies`: bytes read and written by the copy operations of a step.

A dispatch mode counts them: it sees every torch operation, including those of autograd. No counter
of the engine is used. The bytes that the plain model copies in the same step are subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page, run_ranks
from fullshard.bench.step import Case, find_case
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome

NAME = "benchmarks.copies"
MEASURE = "benchmarks.copies_rank:measure"
PLAIN = "plain"
ENGINES = ("fullshard", "fullshard-direct", "fullshard-c10d", "fsdp2")
RECEIVED = "received"
MIB = 1 << 20
COLUMNS = ("case", "engine", "copied, MiB", "arithmetic, MiB", "bytes a parameter", "received, MiB")
METHOD = (
    "One training step on every rank after two others; figures are rank 0's. Copied is what "
    "operations whose names speak of copy, clone, cat or stack read and write, seen by a "
    "TorchDispatchMode, less those of the plain unsharded model in the same step. What happens "
    "inside collectives of a process group is seen only where it runs on the caller's thread.",
    "Arithmetic is what the layout makes necessary: each gather reads this rank's master and "
    "writes its part of the slot, each gradient is read and written once, "
    "and a shared home with another compute dtype casts its part once a step.",
    "Received is what peers sent in messages of their own (direct exchange).",
)


@dataclass(frozen=True)
class Job:
    """Settings of the ranks' counts.

    Attributes:
        engines: Names from `engines.BUILDERS`.
    """

    case: Case
    engines: tuple[str, ...]


def run(
    cases: Sequence[Case], *, command: str, timeout_s: float, say: Callable[[str], None]
) -> Page:
    """Counts one step per engine and case."""
    rows: list[dict[str, object]] = []
    with Neighbours() as neighbours:
        for case in cases:
            say(case.describe())
            what = f"bench copies: the ranks of {case.name}"
            job = Job(case, ENGINES)
            ranks = run_ranks(MEASURE, job, case.num_ranks, what=what, timeout_s=timeout_s)
            rows += rows_of(case, ranks[0])
    return Page(
        "copies",
        "Bytes that copies read and write",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
    )


def rows_of(case: Case, found: dict) -> list[dict[str, object]]:
    """Returns one row per engine from the counts of one rank."""
    own = sum(found[PLAIN]["counted"].values())
    return [
        {
            "name": name,
            "case": case.name,
            "num_ranks": case.num_ranks,
            "num_parameters": case.numel,
            "copied_bytes": sum(of["counted"].values()) - of["counted"].get(RECEIVED, 0) - own,
            "received_bytes": of["counted"].get(RECEIVED, 0),
            "arithmetic_bytes": of["arithmetic"] and sum(of["arithmetic"].values()),
            "by_operation": of["counted"],
        }
        for name, of in found.items()
        if name != PLAIN
    ]


def _cells(row: dict) -> tuple[str, ...]:
    needed = row["arithmetic_bytes"]
    return (
        row["case"],
        row["name"],
        f"{row['copied_bytes'] / MIB:.2f}",
        "" if needed is None else f"{needed / MIB:.2f}",
        f"{row['copied_bytes'] / row['num_parameters']:.2f}",
        f"{row['received_bytes'] / MIB:.2f}" if row["received_bytes"] else "",
    )


def main(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Case of bench step; repeatable. Default: 109M, 109M-bf16."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit per group of ranks, s.")] = 900.0,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Count the bytes read and written by copies in a training step, ours and FSDP2."""
    chosen = [find_case(name) for name in case or ("109M", "109M-bf16")]
    page = run(chosen, command=command_line(NAME), timeout_s=timeout, say=say)
    return show(page, out)


if __name__ == "__main__":
    run_script(NAME)
