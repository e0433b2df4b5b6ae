"""`python -m benchmarks.limits`: runs inside memory groups, compared with their plans.

Each case runs `fullshard train` for two steps, from creating the weights to exporting the model,
in a memory group (cgroup). Its limit is 1.05 times the planned memory plus that of the processes.
The anonymous and shared memory of every process in the group is sampled. Creating memory groups
needs root or a delegated group.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.disk_step import memory_group
from fullshard.bench.measurement import Neighbours, Page
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.load import load_config
from fullshard.errors import ConfigError
from fullshard.outlook.memory import LAUNCHER_PROCESS, MIB, RANK_PROCESS, WORKER_PROCESS
from fullshard.planner.mesh import Topology
from fullshard.run.outlook import foresee

NAME = "benchmarks.limits"
ROOT = Path(__file__).parents[1]
SLACK = 1.05
SAMPLE_S = 0.02
SENTENCE = "the quick brown fox jumps over the lazy dog while {} cats sat on mats and ran. "
LLAMA = {"model_type": "llama"}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
COLUMNS = (
    *("case", "ranks", "limit, MiB", "planned tensors, MiB", "plan + base, MiB"),
    *("measured, MiB", "measured / planned", "files, MiB", "dirty, MiB", "losses differ by"),
)
METHOD = (
    "Llama with 11 million parameters (tiny: 0.03 million), float32, AdamW, one sequence of 16 "
    "tokens a rank and step, two steps, an evaluation, an exported model and a sample of text.",
    "Planned tensors: the peak of the largest rank in memory, device and host. Base: what a rank "
    "of the tiny model takes beyond its tensors, with as many ranks. Measured: the peak of "
    "the largest rank's anonymous and shared memory (Anonymous + Pss_Shmem: a page of shared "
    "memory that n ranks map counts as 1/n in each; pages of imported modules, which forked ranks "
    "share with their server until it ends, count in each), sampled every "
    f"{SAMPLE_S * 1000:.0f} ms while all ranks live. Files: the peak of the "
    "group's page cache, which the kernel drops when memory is short; dirty is the part that it "
    "must write first.",
    f"The limit is {SLACK} times ranks x (planned + {RANK_PROCESS >> 20} MiB of a rank's process + "
    f"{WORKER_PROCESS >> 20} MiB of the process that makes batches) + {LAUNCHER_PROCESS >> 20} MiB "
    "of the launcher. No process was killed, else the command fails.",
    "Losses: the largest difference between a loss of the run (steps and evaluation) and that of "
    "the same run without offload.",
)


@dataclass(frozen=True)
class LimitCase:
    """A run under a limit.

    Attributes:
        name: Name of the case.
        words: Arguments of `fullshard train` for the placement of state.
        num_ranks: Number of ranks.
        from_folder: Whether weights are loaded from a folder; random otherwise.
        sizes: Sizes of the model.
    """

    name: str
    words: tuple[str, ...] = ()
    num_ranks: int = 1
    from_folder: bool = False
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)


KINDS = ("parameters", "gradients", "optimizer")
CASES = (
    LimitCase("base", sizes=TINY),
    LimitCase("base, 2 ranks", num_ranks=2, sizes=TINY),
    LimitCase("memory"),
    LimitCase("cpu", ("offload=cpu",)),
    LimitCase("nvme", ("offload=nvme",)),
    *(
        LimitCase(
            f"cpu, {kind} nvme",
            tuple(f"sharding.offload.{k}={'nvme' if k == kind else 'cpu'}" for k in KINDS),
        )
        for kind in KINDS
    ),
    LimitCase("memory, folder", from_folder=True),
    LimitCase("cpu, folder", ("offload=cpu",), from_folder=True),
    LimitCase("nvme, folder", ("offload=nvme",), from_folder=True),
    LimitCase("memory, 2 ranks", num_ranks=2),
    LimitCase("cpu, 2 ranks", ("offload=cpu",), num_ranks=2),
    LimitCase("nvme, 2 ranks", ("offload=nvme",), num_ranks=2),
)


def find_cases(names: Sequence[str]) -> list[LimitCase]:
    """Returns the cases with these names; all if none is given."""
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise ConfigError(f"--case: expected one of {'; '.join(known)}; got {name!r}.")
    return [known[name] for name in names] or list(CASES)


class Peaks:
    """Peaks of a group in bytes: memory per process, and file pages."""

    def __init__(self, group: Path) -> None:
        self._group = group
        self._samples: list[dict[int, int]] = []
        self.files = self.dirty = 0

    def processes(self, samples: Iterable[dict[int, int]] | None = None) -> dict[int, int]:
        """Returns the peak of each process, in order of their start."""
        peaks: dict[int, int] = {}
        for sizes in self._samples if samples is None else samples:
            peaks |= {pid: max(size, peaks.get(pid, 0)) for pid, size in sizes.items()}
        return peaks

    def of_rank(self, num_ranks: int) -> int:
        """Returns the peak of the largest rank while all ranks are alive.

        When a rank ends, the pages that it shared count in full in the others.
        """
        _, *others = self.processes().items()
        largest = sorted(others, key=lambda item: item[1])[-num_ranks:]
        ranks = {pid for pid, _ in largest}
        together = self.processes(sizes for sizes in self._samples if sizes.keys() >= ranks)
        return max(together[pid] for pid in ranks)

    def sample(self) -> None:
        """Reads the group once."""
        pids = sorted(map(int, (self._group / "cgroup.procs").read_text().split()))
        sizes: dict[int, int] = {}
        for pid in pids if len(pids) > 1 else ():  # only the launcher runs so far
            with suppress(OSError):  # the process has ended
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                found = re.findall(r"^(?:Anonymous|Pss_Shmem):\s*(\d+)", text, re.MULTILINE)
                sizes[pid] = 1024 * sum(map(int, found))
        self._samples.append(sizes)
        lines = (self._group / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        files = stat.get("total_cache", stat.get("file", 0))
        dirty = stat.get("total_dirty", stat.get("file_dirty", 0))
        self.files, self.dirty = max(self.files, files), max(self.dirty, dirty)


def train(words: Sequence[str], folder: Path, limit_bytes: int) -> Peaks:
    """Runs `fullshard train` under a limit.

    Raises:
        ConfigError: It failed, or was killed.
    """
    with memory_group(limit_bytes) as group:
        peaks = Peaks(group)
        inside = f'echo 0 > "{group}/cgroup.procs" && exec "$@"'
        command = ["sh", "-c", inside, "sh", sys.executable, "-m", "fullshard", "train", *words]
        variables = ["env", f"XDG_CACHE_HOME={folder / 'cache'}", "OMP_NUM_THREADS=1"]
        with (folder / "said.txt").open("w+") as said:
            process = subprocess.Popen([*variables, *command], stdout=said, stderr=said)
            while process.poll() is None:
                peaks.sample()
                time.sleep(SAMPLE_S)
        if process.returncode != 0:
            text = (folder / "said.txt").read_text()
            status = f"status {process.returncode}, peaks {peaks.processes()}"
            raise ConfigError(
                f"a run under a limit: expected its end; got {status}: {text[-2000:]}"
            )
    return peaks


def words_of(case: LimitCase, folder: Path) -> list[str]:
    """Returns the command line of a case after `fullshard train`."""
    model = f"model.config={json.dumps(LLAMA | case.sizes)}"
    if case.from_folder:
        model = f"model={folder / 'weights'}"
    return [
        model,
        f"data.path={folder / 'text.txt'}",
        f"training.output_dir={folder / 'out'}",
        *("training.max_steps=2", "training.max_seq_length=16", "training.save_strategy=no"),
        *("training.eval_strategy=no", "training.per_device_train_batch_size=1"),
        *(f"launch.num_processes={case.num_ranks}", *case.words),
    ]


def measure(case: LimitCase, folder: Path) -> dict[str, Any]:
    """Runs one case; its weights stay in `folder`."""
    words = words_of(case, folder)
    config = load_config(None, words).config
    outlook = foresee(config, Topology(case.num_ranks, case.num_ranks)).outlook  # type: ignore
    planned = outlook.peak_bytes["device"] + outlook.peak_bytes["host"]
    of_rank = planned + RANK_PROCESS + WORKER_PROCESS
    limit = round(SLACK * (case.num_ranks * of_rank + LAUNCHER_PROCESS))
    peaks = train(words, folder, limit)
    if not (folder / "weights").exists():
        (folder / "out" / "model").rename(folder / "weights")
    rows = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [row.get("loss", row.get("eval_loss")) for row in rows]
    return {
        "case": case.name,
        "num_ranks": case.num_ranks,
        "limit_bytes": limit,
        "planned_bytes": planned,
        "measured_bytes": peaks.of_rank(case.num_ranks),
        "launcher_bytes": next(iter(peaks.processes().values())),
        "file_bytes": peaks.files,
        "dirty_bytes": peaks.dirty,
        "losses": losses,
    }


def run(cases: Sequence[LimitCase], *, command: str, say: Callable[[str], None]) -> Page:
    """Measures every case."""
    rows: list[dict[str, Any]] = []
    references: dict[tuple[int, bool, int], list[float]] = {}
    bases: dict[int, int] = {}
    with Neighbours() as neighbours:
        for sizes in (TINY, SIZES):
            with tempfile.TemporaryDirectory(prefix="fullshard-limits-") as name:
                folder = Path(name)
                text = "".join(SENTENCE.format(at) for at in range(4000))
                (folder / "text.txt").write_text(text)
                for case in (case for case in cases if case.sizes == sizes):
                    say(case.name)
                    row = measure(case, folder)
                    if sizes is TINY:
                        bases[case.num_ranks] = row["measured_bytes"] - row["planned_bytes"]
                    base = bases.get(case.num_ranks, RANK_PROCESS)
                    row["expected_bytes"] = row["planned_bytes"] + base
                    key = (case.num_ranks, case.from_folder, len(case.sizes))
                    if not case.words:
                        references[key] = row["losses"]
                    reference = references.get(key)
                    pairs = zip(row["losses"], reference or (), strict=bool(reference))
                    row["loss_error"] = max((abs(a - b) for a, b in pairs), default=None)
                    rows.append(row)
    return Page(
        "limits",
        "Runs under a memory limit",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        notes=[_note(row) for row in rows if row["case"].startswith("base")],
    )


def _note(base: dict[str, Any]) -> str:
    return (
        f"Base of {base['num_ranks']} rank(s): {base['measured_bytes'] / MIB:.0f} MiB for a rank "
        f"and {base['launcher_bytes'] / MIB:.0f} MiB for the launcher, page tables aside."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = ("limit", "planned", "expected", "measured")
    error = row["loss_error"]
    return (
        row["case"],
        str(row["num_ranks"]),
        *(f"{row[f'{size}_bytes'] / MIB:,.0f}" for size in sizes),
        f"{row['measured_bytes'] / row['expected_bytes']:.3f}",
        *(f"{row[f'{what}_bytes'] / MIB:,.0f}" for what in ("file", "dirty")),
        "not compared" if error is None else f"{error:.1g}",
    )


def main(
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case; repeatable. Default: all.")
    ] = None,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Train under memory limits and compare the peak of every rank with its plan."""
    return show(run(find_cases(case or ()), command=command_line(NAME), say=say), out)


if __name__ == "__main__":
    run_script(NAME)
