"""A measurement: its page (JSON and Markdown), other processes, statistics, and its local ranks.

A page shows how busy other processes kept the machine during the measurement.

[Note: a rank's memory]
The proportional set size counts a page that n processes share as 1/n, so mappings that ranks share
count once in total. Linux keeps no peak of it, so a thread samples it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from fullshard.errors import FullshardError
from fullshard.launch.local_call import call_on_ranks
from fullshard.launch.machine import describe_machine, describe_versions
from fullshard.launch.spawn import print_failure
from fullshard.observe.metrics import repeated

SCHEMA_VERSION = 1
IDLE_SHARE = 0.05  # of all cores: a machine is idle while other processes use less
IDLE_FOR_S = 3
WAIT_LIMIT_S = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Page:
    """The result of one run of a command.

    Attributes:
        name: Stem of the files: `comm` gives comm.json and comm.md.
        rows: Rows of the JSON object.
        columns: Headings of the table.
        cells: Rows of the table.
        method: How the figures were measured, in sentences.
        neighbours: How much other processes used the machine meanwhile.
        absent: What could not be measured, with the reason.
        notes: Sentences under the table.
        drawings: SVG files by name.
        more: Further members of the JSON object.
    """

    name: str
    title: str
    command: str
    rows: Sequence[Mapping[str, object]]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    method: Sequence[str]
    neighbours: Neighbours
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    drawings: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, object] = field(default_factory=describe_machine)
    versions: Mapping[str, str] = field(
        default_factory=lambda: describe_versions(("fullshard", "torch"))
    )
    more: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Returns the object that `--json` prints and `--out` keeps."""
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": [{"loaded": self.neighbours.loaded, **row} for row in self.rows],
            "absent": list(self.absent),
            "why_absent": dict(self.absent),
            "others_share": self.neighbours.share,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "command": self.command,
            "method": list(self.method),
            **self.more,
        }

    def to_markdown(self) -> str:
        """Returns the page for people."""
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        lines += [f"- {versions}", f"- command: `{self.command}`", ""]
        table = (self.columns, ["---"] * len(self.columns), *self.cells)
        lines += ["| " + " | ".join(cells) + " |" for cells in table]
        lines.append("")
        absent = [f"Absent: {name}. {why}" for name, why in self.absent.items()]
        for sentence in (*absent, *self.notes, str(self.neighbours)):
            lines += [sentence, ""]
        lines += ["## Method", "", *(f"- {sentence}" for sentence in self.method)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes the object, the page and the drawings."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            f"{self.name}.json": json.dumps(self.to_dict(), indent=1) + "\n",
            f"{self.name}.md": self.to_markdown(),
            **self.drawings,
        }
        for name, text in files.items():
            (folder / name).write_text(text)


def method_of(doc: str | None, **values: object) -> tuple[str, ...]:
    """The paragraphs below `Method:` of a module's docstring, each as one line.

    Args:
        doc: The docstring.
        **values: Values of its `{names}`.
    """
    _, _, text = (doc or "").partition("\nMethod:\n")
    return tuple(" ".join(part.split()).format(**values) for part in text.strip().split("\n\n"))


# ---- other processes -----------------------------------------------------------------------------


class Neighbours:
    """Measures how much of the machine other processes use inside a `with` block.

    Child processes that ended inside the block count as ours.

    Attributes:
        share: Share of all cores that others used; known after the block.
        became_idle: Whether the machine was idle before the block began, where that was awaited.
    """

    share = 0.0

    def __init__(self, *, wait: bool = False, say: Say = print) -> None:
        """With `wait`, first waits until the machine is idle, and reports through `say`."""
        self.became_idle = not wait or wait_until_idle(WAIT_LIMIT_S, say)

    def __enter__(self) -> Neighbours:
        psutil.cpu_percent()  # begins the interval
        self._start_s, self._own_s = time.perf_counter(), sum(os.times()[:4])
        return self

    def __exit__(self, *exc: object) -> None:
        own_s = sum(os.times()[:4]) - self._own_s
        capacity_s = (time.perf_counter() - self._start_s) * (psutil.cpu_count() or 1)
        self.share = max(0.0, psutil.cpu_percent() / 100 - own_s / capacity_s)

    @property
    def loaded(self) -> bool:
        """Whether other processes used the machine too much for figures to count."""
        return not self.became_idle or self.share >= IDLE_SHARE

    def __str__(self) -> str:
        state = "LOADED" if self.loaded else "idle"
        return f"Other processes used {self.share:.0%} of the cores meanwhile: {state}."


def wait_until_idle(limit_s: float, say: Say) -> bool:
    """Wait until other processes have not used the processor for some seconds.

    Returns:
        False if they did not within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    quiet_s = 0
    was_reported = False
    while quiet_s < IDLE_FOR_S:
        if time.monotonic() > deadline:
            say(f"the machine was not idle within {limit_s:.0f} s: rows are marked loaded")
            return False
        share = psutil.cpu_percent(interval=1.0) / 100
        quiet_s = quiet_s + 1 if share < IDLE_SHARE else 0
        if not was_reported and quiet_s == 0:
            say(f"waiting for other processes, which use {share:.0%} of the cores")
            was_reported = True
    return True


# ---- statistics ----------------------------------------------------------------------------------

NUM_RESAMPLES = 2000
TAIL = 0.025  # on each side: a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A statistic of the measured rounds and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Returns the three numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the times of the slowest rank by operation and round.

    Args:
        ranks: Each rank's times by operation and round.
    """
    return {
        name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def bootstrap(num_rounds: int, statistic: Callable[[Sequence[int]], float]) -> Estimate:
    """Estimates a statistic of paired rounds by the percentile bootstrap.

    Rounds are drawn as a whole, so that a disturbance of a round affects both sides of a ratio.

    Args:
        num_rounds: Number of measured rounds.
        statistic: Maps indices of rounds (with repetition) to a number.
    """
    draw = random.Random(0)
    everything = range(num_rounds)
    values = sorted(statistic(draw.choices(everything, k=num_rounds)) for _ in range(NUM_RESAMPLES))
    cut = int(TAIL * NUM_RESAMPLES)
    return Estimate(statistic(everything), values[cut], values[-1 - cut])


def median_of(values: Sequence[float]) -> Estimate:
    """Estimates the median of the rounds."""
    return bootstrap(len(values), lambda rounds: median(values[i] for i in rounds))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Estimates the median over the rounds of `ours / theirs`."""
    return median_of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def removed_share(
    ours: Sequence[float], theirs: Sequence[float], floor: Sequence[float]
) -> Estimate | None:
    """Estimates the share of their overhead above the floor that ours removes: 1 is all.

    Returns None if their median is not above the floor's, because there is no overhead to remove.
    """
    if median(theirs) <= median(floor):
        return None

    def statistic(rounds: Sequence[int]) -> float:
        base = median(floor[i] for i in rounds)
        overhead = median(theirs[i] for i in rounds) - base
        # A resample may contain only rounds without overhead, whose share is undefined.
        return 1 - (median(ours[i] for i in rounds) - base) / overhead if overhead > 0 else 0.0

    return bootstrap(len(ours), statistic)


def largest_difference(losses: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Returns every engine's largest relative difference of a loss to the reference's.

    The difference is NaN if any of the losses is NaN.
    """
    expected = losses[reference]
    found = {}
    for name, values in losses.items():
        pairs = zip(values, expected, strict=True)
        differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        # max() ignores a NaN that does not come first; a sum does not.
        found[name] = max(differences) if isfinite(sum(differences)) else nan
    return found


# ---- memory and time of a rank -------------------------------------------------------------------

SAMPLE_EVERY_S = 0.002


def proportional_bytes() -> int:
    """Returns this process's proportional set size."""
    return psutil.Process().memory_full_info().pss


def return_free_memory() -> None:
    """Returns freed heap pages to the system, so that they do not count as used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PeakSampler:
    """Samples the proportional set size in a thread while the context is open."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, proportional_bytes())

    def __enter__(self) -> PeakSampler:
        self._sample()
        self._end = repeated(self._sample, SAMPLE_EVERY_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of this rank, of an action that all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - used


# ---- local ranks ---------------------------------------------------------------------------------


def run_ranks(
    measure: str, job: object, num_ranks: int, *, what: str, timeout_s: float
) -> list[Any]:
    """Calls a function on local ranks, in a process group, and returns each rank's result.

    Args:
        measure: `module:function`. It gets the job and runs on one thread.
        job: What to measure; any object that can be pickled.
        num_ranks: Local ranks.
        what: Names the group in an error, as in "bench step: the ranks of 29M".
        timeout_s: Limit for the whole group.

    Raises:
        FullshardError: A rank failed. Its own error is already on standard error.
    """
    call = measure, job
    function = f"{__name__}:on_one_thread"
    launch, result, found = call_on_ranks(function, call, num_ranks, timeout_s)
    print_failure(launch, result)
    if result.exit_code:
        cause = "the error above" if result.failure else "a signal"
        error = FullshardError(
            f"{what}: expected exit code 0, got {result.exit_code}, because of {cause}."
        )
        error.exit_code = result.exit_code
        raise error
    return found


def on_one_thread(call: tuple[str, object]) -> Any:
    """Calls `module:function` with its job on one thread of this rank."""
    import torch

    torch.set_num_threads(1)
    measure, job = call
    module, _, function = measure.partition(":")
    return getattr(importlib.import_module(module), function)(job)
