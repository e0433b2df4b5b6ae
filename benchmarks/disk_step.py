"""`python -m benchmarks.disk_step`: a step with all state on disk, compared with the disk.

    rank     | gathers: reads | gathers, gradients: reads, writes | update: reads, writes |
    floor    | direct reads of as many bytes | direct reads and writes at once            |

The ranks enter a memory group (cgroup) that the state does not fit into: after a first step its
limit is lowered to their anonymous memory, some slack, and a part of the state. The bytes that a
step moves are the kernel's own count (`/proc/self/io`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import fullshard as fs
from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.io import CHUNK, MIB, WIDTH
from fullshard.bench.measurement import Neighbours, Page, paired_ratio, run_ranks, slowest, timed
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.errors import ConfigError

NAME = "benchmarks.disk_step"
COLUMNS = ("what", "s", "GB/s", "of the disk's speed [95 %]")
STATE_PER_LAYER = 4 * 4 * WIDTH * WIDTH  # a parameter, its gradient, AdamW's two moments
STEP, FLOOR = "fullshard step, nvme", "disk, the step's bytes"
SLACK = 64 * MIB  # page tables, threads, the interpreter
CACHED = 0.25  # of the state
METHOD = (
    f"{STEP}: forward, backward and AdamW's update of a stack of linear layers, each a unit, whose "
    "parameters, gradients and moments are on disk, in a memory group (cgroup) whose limit is the "
    f"ranks' anonymous and shared memory, {SLACK // MIB} MiB, and {CACHED:.0%} of the state. "
    f"{FLOOR}: as many bytes as the kernel counted for a step (/proc/self/io), read and written "
    f"directly in pieces of {CHUNK // MIB} MiB: what exceeds the written bytes is read alone, then "
    "as many bytes are read and written at once, and synced. The share of the second is the "
    "floor's time over the step's.",
)
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = "memory.limit_in_bytes" if GROUPS.is_dir() else "memory.max"
GROUPS = GROUPS if GROUPS.is_dir() else GROUPS.parent


class DiskFile:
    """A file of a rank, read and written directly in pieces; restarts at 0 where it ends."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self._chunks = path, max(1, num_bytes // CHUNK)
        self._source, self._target = mmap.mmap(-1, CHUNK), mmap.mmap(-1, CHUNK)  # whole pages
        self._source.write(os.urandom(CHUNK))
        self.write(self._chunks * CHUNK)

    def write(self, num_bytes: int) -> None:
        """Writes this many bytes in place, then syncs."""
        descriptor = self._repeat(os.O_WRONLY | os.O_CREAT, os.pwritev, self._source, num_bytes)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, num_bytes: int) -> None:
        """Reads this many bytes."""
        os.close(self._repeat(os.O_RDONLY, os.preadv, self._target, num_bytes))

    def _repeat(
        self, flags: int, act: Callable[..., int], buffer: mmap.mmap, num_bytes: int
    ) -> int:
        """Calls `act` for each piece in turn; returns the open file."""
        try:
            descriptor = os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError:  # as on tmpfs
            descriptor = os.open(self.path, flags, 0o644)
        for at in range(-(-num_bytes // CHUNK)):
            act(descriptor, [buffer], at % self._chunks * CHUNK)
        return descriptor


@dataclass(frozen=True)
class Job:
    """The job of the ranks.

    Attributes:
        num_bytes: Bytes of the state of all ranks: parameters, gradients, two moments.
        place: The folder whose disk is measured.
        group: Folder of the memory group.
    """

    num_bytes: int
    num_rounds: int
    place: str
    group: Path


@contextmanager
def memory_group(limit_bytes: int | None = None) -> Iterator[Path]:
    """Makes a memory group, with a limit if one is given.

    Raises:
        ConfigError: This process is not allowed to make one.
    """
    folder = GROUPS / f"fullshard-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        limit = folder / LIMIT  # missing if groups do not count memory
        limit.write_text(str(limit_bytes or limit.read_text()))
    except OSError as error:
        raise ConfigError(f"a memory group: expected to make '{folder}'; {error}.") from error
    try:
        yield folder
    finally:
        time.sleep(0.5)  # the kernel still counts processes that have just ended
        folder.rmdir()


def _moved() -> tuple[int, int]:
    """Returns the bytes that this process has read from disks and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return found["read_bytes"], found["write_bytes"]


class DiskStep:
    """A stack of linear layers, one unit each, whose state is on disk."""

    def __init__(self, job: Job) -> None:
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
        layers = max(2, job.num_bytes // STATE_PER_LAYER)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        torch.manual_seed(0)
        self.state_bytes = layers * STATE_PER_LAYER
        offload = {**kinds, "folder": job.place}
        self.model = fs.shard(model, wrap=["Linear"], offload=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.ones(1, WIDTH)

    def __call__(self) -> None:
        self.model(self.batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def limit(self, group: Path) -> None:
        """Lowers the group's limit; one rank does it."""
        os.sync()
        lines = (group / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        held = stat.get("total_rss", stat.get("anon", 0)) + stat.get("kernel", 0)
        held += stat.get("total_shmem", stat.get("shmem", 0))
        (group / LIMIT).write_text(str(held + SLACK + int(CACHED * self.state_bytes)))


def measure(job: Job) -> dict[str, Any]:
    """Returns this rank's seconds of steps and of the disk, by round, and the bytes of a step."""
    rank, group = dist.get_rank(), job.group
    (group / "cgroup.procs").write_text("0")
    step = DiskStep(job)
    step()
    dist.barrier()
    if rank == 0:
        step.limit(group)
    size = step.state_bytes // dist.get_world_size()
    disk = DiskFile(Path(job.place) / f"plain-{rank}", size)
    moved: list[tuple[int, int]] = []

    def counted() -> None:
        before = _moved()
        step()
        after = _moved()
        moved.append((after[0] - before[0], after[1] - before[1]))

    def replayed() -> None:
        read, written = (int(median(one)) for one in zip(*moved, strict=True))
        disk.read(max(0, read - written))
        writes = threading.Thread(target=disk.write, args=(written,))
        writes.start()
        disk.read(min(read, written))
        writes.join()

    times: dict[str, list[float]] = {STEP: [], FLOOR: []}
    for _ in range(2):
        counted()
    for _ in range(job.num_rounds):
        for name, act in ((STEP, counted), (FLOOR, replayed)):
            times[name].append(timed(act)[0])
    read, written = (median(one) for one in zip(*moved, strict=True))
    return {"times": times, "read": read, "written": written, "state": step.state_bytes}


def rows_of(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for the step and one for its floor."""
    times = slowest([rank["times"] for rank in ranks])
    num_bytes = sum(rank["read"] + rank["written"] for rank in ranks)
    return [
        {
            "name": f"{name}, {len(ranks)} ranks" if len(ranks) > 1 else f"{name}, 1 rank",
            "num_ranks": len(ranks),
            "num_bytes": num_bytes,
            "state_bytes": ranks[0]["state"],
            "time_s": median(seconds),
            "bytes_per_s": num_bytes / median(seconds),
            "share_of_disk": paired_ratio(times[FLOOR], seconds).to_dict(),
            "num_rounds": len(seconds),
        }
        for name, seconds in times.items()
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        f"{row['time_s']:.3f}",
        f"{row['bytes_per_s'] / 1e9:.2f}",
        "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["share_of_disk"]),
    )


def main(
    place: Annotated[Path, typer.Option(file_okay=False, help="Working folder.")] = Path("runs"),
    mib: Annotated[int, typer.Option(min=64, help="Size of all state, MiB.")] = 768,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps.")] = 7,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure a step with all state on disk on one and two ranks, and the disk."""
    rows: list[dict[str, Any]] = []
    place.mkdir(parents=True, exist_ok=True)
    with Neighbours(wait=wait, say=say) as neighbours:
        for count in (1, 2):
            with (
                tempfile.TemporaryDirectory(prefix="bench-disk-", dir=place) as folder,
                memory_group() as group,
            ):
                say(f"{count} ranks, state on disk: {rounds} steps")
                job = Job(mib * MIB, rounds, folder, group)
                what = f"{NAME}: {count} ranks"
                rows += rows_of(run_ranks(f"{NAME}:measure", job, count, what=what, timeout_s=1200))
    told = ("disk_step", "A step with state on disk", command_line(NAME), rows, COLUMNS)
    return show(Page(*told, [_cells(row) for row in rows], METHOD, neighbours), out)


if __name__ == "__main__":
    run_script(NAME)
