"""`fullshard bench comm`: what each transport takes for a flat buffer, beside a memory copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fullshard.bench.machine import Neighbours, available_bytes, wait_until_idle
from fullshard.bench.page import Page
from fullshard.bench.ranks import run_ranks
from fullshard.bench.statistics import paired_ratio
from fullshard.bench.step import WAIT_LIMIT_S
from fullshard.errors import ConfigError, WillNotFitError

MEASURE = "fullshard.bench.comm_rank:measure_all"
MIB = 2**20
TRANSPORTS = ("c10d", "direct", "shared")  # those that move bytes between processes
COPY, FETCH, REDUCE = "copy", "fetch", "reduce"
DEFAULT_MIB, DEFAULT_RANKS = (1, 16, 64), (2, 4)
BUFFERS = 12  # a rank's at most: two to copy, a transport's slots and what it receives into
COLUMNS = ("ranks", "MiB", "what", "by", "ms", "GB/s", "to a copy [95 %]")
METHOD = (
    "The plan of a model of one float32 parameter says where buffers are. fetch: all ranks' parts "
    "of the weights are there (all-gather; a shared home holds them, its ranks only wait for "
    "each other). reduce: the own part of the sum of all ranks' gradients is there "
    "(reduce-scatter). copy: torch.copy_ of as many bytes by every rank at once. GB/s is the "
    "buffer's size by the time.",
    "All take one turn a round, in an order that turns with every round; a turn begins at a "
    "barrier and lasts until the slowest rank has its result. Times are medians, ratios medians "
    "over the rounds of two times of one round, with a 95 % bootstrap interval. One thread a rank.",
    "Results are compared with what they must be before anything is timed.",
)


@dataclass(frozen=True)
class Job:
    """What one group of ranks measures.

    Attributes:
        sizes: bytes of the flat buffers.
    """

    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    num_rounds: int


def check(job: Job, worlds: Sequence[int]) -> None:
    """Refuses what cannot be measured here, before a rank starts.

    Raises:
        ConfigError: there is no such transport.
        WillNotFitError: the buffers of all ranks are larger than the memory that is left.
    """
    unknown = [name for name in job.transports if name not in TRANSPORTS]
    if unknown:
        raise ConfigError(
            f"transport: expected one of {', '.join(TRANSPORTS)}, got {unknown[0]!r}. Name one."
        )
    needed, there = BUFFERS * max(job.sizes) * max(worlds), available_bytes()
    if needed > there:
        raise WillNotFitError(
            f"mib: expected at most {there // (BUFFERS * max(worlds) * MIB)} for {max(worlds)} "
            f"ranks in the memory that is free, got {max(job.sizes) // MIB}. Ask for less."
        )


def run(
    job: Job, worlds: Sequence[int], *, timeout_s: float, wait: bool, say: Callable[[str], None]
) -> dict[str, object]:
    """Measures every number of ranks; returns the rows and what else a Page takes.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    became_idle = wait_until_idle(WAIT_LIMIT_S, say) if wait else True
    rows: list[dict[str, object]] = []
    absent: dict[str, str] = {}
    with Neighbours() as neighbours:
        for world in worlds:
            say(f"{world} ranks: {job.num_rounds} rounds of {', '.join(job.transports)}")
            what = f"bench comm: {world} ranks"
            results = run_ranks(MEASURE, job, world, what=what, timeout_s=timeout_s)
            absent |= results[0]["absent"]
            for at, size in enumerate(job.sizes):
                rows += rows_of(world, size, [result["sizes"][at] for result in results])
    share = neighbours.share
    return {"rows": rows, "absent": absent, "others_share": share, "became_idle": became_idle}


def rows_of(
    world: int, size: int, ranks: Sequence[dict[str, list[float]]]
) -> list[dict[str, object]]:
    """Returns one row for everything that was timed at one size.

    Args:
        world: ranks.
        size: bytes of the buffer.
        ranks: seconds by "transport operation" and round, of each rank; the slowest counts.
    """
    times = {
        key: [max(r) for r in zip(*(of[key] for of in ranks), strict=True)] for key in ranks[0]
    }
    return [
        {
            "name": key.split()[0],
            "operation": key.split()[-1],
            "num_ranks": world,
            "num_bytes": size,
            "time_s": median(seconds),
            "bytes_per_s": size / median(seconds),
            "ratio_to_copy": paired_ratio(seconds, times[COPY]).to_dict(),
            "num_rounds": len(seconds),
        }
        for key, seconds in times.items()
    ]


def page_of(found: dict, command: str) -> Page:
    """Returns the page of what `run` found."""
    cells = [
        (
            str(row["num_ranks"]),
            f"{row['num_bytes'] / MIB:g}",
            row["operation"],
            row["name"],
            f"{row['time_s'] * 1e3:.2f}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio_to_copy"]),
        )
        for row in found["rows"]
    ]
    return Page(
        "comm",
        "Transports beside a memory copy",
        command,
        columns=COLUMNS,
        cells=cells,
        method=METHOD,
        **found,
    )
