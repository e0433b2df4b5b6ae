"""`python -m benchmarks.start`: time from starting a command to its first step.

Each round runs `fullshard train` (the main job, one step, without a file) in two ways: ranks forked
from a process that has imported everything, and ranks that each import by themselves.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page, paired_ratio
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.environment import current_variables
from fullshard.errors import ConfigError

NAME = "benchmarks.start"
FORKED, APART = "forked ranks", "ranks that import for themselves"
ALONE = (
    "import contextlib; from fullshard.launch import spawn; "
    "spawn.fork_server = lambda modules: contextlib.nullcontext(); "
    "from fullshard.cli.app import main; main()"
)
WAYS = {FORKED: ["-m", "fullshard"], APART: ["-c", ALONE]}
WORDS = ("max_steps=1", "save_strategy=no", "eval_strategy=no")
COLUMNS = ("ranks", "way", "first step after, s", "to the second way [95 %]", "processor time, s")
METHOD = (
    "First step: from the start of the command until the run's metrics.jsonl has its first row. "
    "Processor time: of all processes of the command until it has ended, with its model exported "
    "and a sample of text. Medians over the rounds; both ways take one turn a round.",
    "The main job: a small Llama on the text that ships with Python, whose tokens are cached.",
)


def start(way: str, num_ranks: int, folder: Path) -> tuple[float, float]:
    """Runs the command; returns its time to the first step and its processor time, s."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    rows = run / "metrics.jsonl"
    words = [*WORDS, f"output_dir={run}", f"launch.num_processes={num_ranks}"]
    variables = {**current_variables(), "XDG_CACHE_HOME": str(folder / "cache")}
    used, began, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0.0
    command = [sys.executable, *WAYS[way], "train", *words]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if not took and rows.is_file() and rows.stat().st_size:
                took = time.monotonic() - began
            time.sleep(0.01)
    if process.returncode != 0 or not took:
        raise ConfigError(f"{command}: expected a run of one step; exit code {process.returncode}.")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def measure(num_ranks: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Returns one row per way."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for at in range(rounds + 1):
        for way, times in found.items():
            times.append(start(way, num_ranks, folder))
            say(f"{num_ranks} ranks, round {at}, {way}: {times[-1]}")
    first = {way: [took for took, _ in times[1:]] for way, times in found.items()}
    return [
        {
            "name": way,
            "num_ranks": num_ranks,
            "first_step_s": median(first[way]),
            "ratio": paired_ratio(first[way], first[APART]).to_dict(),
            "cpu_s": median(cpu_s for _, cpu_s in times[1:]),
            "num_rounds": rounds,
        }
        for way, times in found.items()
    ]


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Number of ranks; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    out: OutFlag = None,
    wait: WaitFlag = False,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure the time to the first step of a run on local ranks."""
    with Neighbours(wait=wait, say=say) as neighbours, tempfile.TemporaryDirectory() as folder:
        rows = [row for count in ranks or (2, 4) for row in measure(count, rounds, Path(folder))]
    cells = [_cells(row) for row in rows]
    told = (NAME.partition(".")[2], "The start of a run", command_line(NAME), rows, COLUMNS, cells)
    return show(Page(*told, METHOD, neighbours), out)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["num_ranks"]),
        row["name"],
        f"{row['first_step_s']:.1f}",
        "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio"]),
        f"{row['cpu_s']:.1f}",
    )


if __name__ == "__main__":
    run_script(NAME)
