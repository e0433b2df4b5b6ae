"""`python -m benchmarks.compile`: step time of blocks compiled by torch.compile, ours and FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import (
    Neighbours,
    Page,
    Say,
    largest_difference,
    paired_ratio,
    run_ranks,
)
from fullshard.bench.step import REFERENCE, Case, find_case
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome

NAME = "benchmarks.compile"
MEASURE = "benchmarks.compile_rank:measure"
ENGINES = ("fullshard", REFERENCE)
ALIKE = f"{REFERENCE} compiled"
COLUMNS = ("engine", "step, ms", f"of {ALIKE} [95 %]", "graphs", "recompiled", "losses differ by")
METHOD = (
    "Every block is compiled on its own, `block.compile()`, before it is sharded; embedding, head, "
    "loss and optimizer are not. All engines live in the same processes and take a step each a "
    "round; a ratio is the median over the rounds of two step times of one round.",
    "Graphs are those that were compiled in the first steps; recompiled counts all that came "
    "during the timed ones, of all engines together. Losses are those of the first steps beside "
    f"{ALIKE}'s: compiled code rounds otherwise.",
)


@dataclass(frozen=True)
class Job:
    """Settings of the ranks' measurement.

    Attributes:
        backend: Backend of torch.compile.
        num_checked: Number of first steps, which compile; their losses are compared.
    """

    case: Case
    num_rounds: int
    backend: str = "inductor"
    engines: tuple[str, ...] = ENGINES
    num_checked: int = 3


def run(job: Job, *, command: str, timeout_s: float, wait: bool, say: Say) -> Page:
    """Runs the ranks and returns their measurements."""
    say(job.case.describe())
    with Neighbours(wait=wait, say=say) as neighbours:
        ranks = run_ranks(
            MEASURE, job, job.case.num_ranks, what="bench compile", timeout_s=timeout_s
        )
    found = ranks[0]
    differences = largest_difference(found["losses"], ALIKE)
    rows = [
        {
            "name": key,
            "case": job.case.name,
            "backend": job.backend,
            "step_s": median(times),
            "ratio_to_fsdp2_compiled": paired_ratio(times, found["times"][ALIKE]).to_dict(),
            "num_graphs": found["graphs"][key],
            "num_recompiled": max(rank["recompiled"] for rank in ranks),
            "largest_loss_difference": differences[key],
        }
        for key, times in found["times"].items()
    ]
    cells = [
        (
            row["name"],
            f"{row['step_s'] * 1e3:.1f}",
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio_to_fsdp2_compiled"]),
            str(row["num_graphs"]),
            str(row["num_recompiled"]),
            f"{row['largest_loss_difference']:.1e}",
        )
        for row in rows
    ]
    title = f"Compiled blocks: {job.case.describe()}"
    return Page(
        "compile",
        title,
        command,
        rows,
        COLUMNS,
        cells,
        METHOD,
        neighbours,
    )


def main(  # noqa: PLR0913  (one parameter an option)
    case: Annotated[str, typer.Option(help="Case of bench step.")] = "29M",
    backend: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "inductor",
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps per engine.")] = 11,
    timeout: Annotated[float, typer.Option(help="Time limit for all ranks, s.")] = 1800.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Time blocks compiled by torch.compile, ours and FSDP2, and count recompiles."""
    job, command = Job(find_case(case), rounds, backend), command_line(NAME)
    return show(run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


if __name__ == "__main__":
    run_script(NAME)
