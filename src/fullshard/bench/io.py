"""`fullshard bench io`: saving and loading beside the disk's own speed and torch's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fullshard.bench.machine import Neighbours, wait_until_idle
from fullshard.bench.page import Page
from fullshard.bench.ranks import run_ranks
from fullshard.bench.statistics import paired_ratio
from fullshard.bench.step import WAIT_LIMIT_S

MEASURE = "fullshard.bench.io_rank:measure"
MIB = 2**20
DISK_WRITE, DISK_READ = "disk write", "disk read"
SAVE, STALL, LOAD = "fullshard save", "fullshard stall", "fullshard load"
PEER_SAVE, PEER_LOAD = "torch DCP save", "torch DCP load"
OPERATIONS = (DISK_WRITE, SAVE, STALL, PEER_SAVE, DISK_READ, LOAD, PEER_LOAD)
COLUMNS = ("what", "s", "GB/s", "of the disk's speed [95 %]", "peak memory, MiB")
METHOD = (
    "A stack of linear layers with AdamW's states, sharded over the ranks: float32 parameters and "
    "two moments. disk write: every rank writes as many bytes as its share of the checkpoint into "
    "a file of its own, with O_DIRECT where the file system has it, then fsync; disk read: the "
    "same, read. save: fs.save until the checkpoint is complete, every file and folder synced. "
    "stall: fs.save(wait=False) until training may go on. torch DCP: torch.distributed.checkpoint "
    "of the same model under FSDP2 (fully_shard), its files synced.",
    "All take one turn a round, in turn; a turn begins at a barrier and lasts until the slowest "
    "rank is done. Before each read the files' pages are dropped from the page cache. Times are "
    "medians; the share of the disk's speed is the median over the rounds of two times of one "
    "round, with a 95 % bootstrap interval. Peak memory: what a rank's proportional set size grew "
    "by at most, sampled, in a turn of its own.",
    "What is loaded is compared with what was saved before anything is timed.",
)


@dataclass(frozen=True)
class Job:
    """What the ranks measure.

    Attributes:
        num_bytes: Bytes of the whole checkpoint.
        place: The folder whose disk is measured.
    """

    num_bytes: int
    num_rounds: int
    place: str


def run(
    job: Job, num_ranks: int, *, timeout_s: float, wait: bool, say: Callable[[str], None]
) -> dict[str, object]:
    """Measures; returns the rows and what else a Page takes.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    became_idle = wait_until_idle(WAIT_LIMIT_S, say) if wait else True
    with Neighbours() as neighbours:
        say(f"{num_ranks} ranks, {job.num_bytes / MIB:,.0f} MiB: {job.num_rounds} rounds")
        results = run_ranks(MEASURE, job, num_ranks, what="bench io", timeout_s=timeout_s)
    rows = rows_of(job, num_ranks, results)
    share = neighbours.share
    return {"rows": rows, "others_share": share, "became_idle": became_idle}


def rows_of(job: Job, num_ranks: int, ranks: Sequence[dict]) -> list[dict[str, object]]:
    """Returns one row for everything that was timed; the slowest rank counts."""
    times = {
        name: [max(r) for r in zip(*(of["times"][name] for of in ranks), strict=True)]
        for name in OPERATIONS
    }
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        disk = times[DISK_READ if name.endswith(("read", "load")) else DISK_WRITE]
        rows.append(
            {
                "name": name,
                "num_ranks": num_ranks,
                "num_bytes": job.num_bytes,
                "time_s": median(seconds),
                "bytes_per_s": job.num_bytes / median(seconds),
                "share_of_disk": paired_ratio(disk, seconds).to_dict(),
                "memory_peak_bytes": max(of["memory"].get(name, 0) for of in ranks),
                "num_rounds": len(seconds),
            }
        )
    return rows


def page_of(found: dict, command: str) -> Page:
    """Returns the page of what `run` found."""
    cells = [
        (
            row["name"],
            f"{row['time_s']:.3f}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["share_of_disk"]),
            f"{row['memory_peak_bytes'] / MIB:.0f}" if row["memory_peak_bytes"] else "",
        )
        for row in found["rows"]
    ]
    title = "Saving and loading beside the disk"
    return Page("io", title, command, columns=COLUMNS, cells=cells, method=METHOD, **found)
