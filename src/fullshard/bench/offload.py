"""A step with all state on disk, in a memory group that the state does not fit into.

    rank     | gathers: reads | gathers, gradients: reads, writes | update: reads, writes |
    floor    | direct reads of as many bytes | direct reads and writes at once            |

The ranks enter a memory group (cgroup). After a first step its limit is lowered to their anonymous
memory, some slack, and a part of the state. The bytes that a step moves are the kernel's own count
(`/proc/self/io`).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.bench.page import paired_ratio, slowest
from fullshard.bench.ranks import timed
from fullshard.errors import ConfigError

MIB = 2**20
CHUNK = 8 * MIB
WIDTH = 1024
BYTES_PER_LAYER = 4 * 4 * WIDTH * WIDTH  # a parameter, its gradient, AdamW's two moments
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


class PlainFiles:
    """Plain files of a rank's share, which show the disk's own speed."""

    def __init__(self, folder: Path, num_bytes: int, rank: int) -> None:
        self.path = folder / f"plain-{rank}"
        self._chunks = max(1, num_bytes // CHUNK)
        self._source = mmap.mmap(-1, CHUNK)  # aligned to pages, as O_DIRECT requires
        self._source.write(os.urandom(CHUNK))
        self._target = mmap.mmap(-1, CHUNK)

    def write(self, num_bytes: int | None = None) -> None:
        """Write the file again, or so many bytes in place; then sync."""
        anew = os.O_CREAT | os.O_TRUNC if num_bytes is None else 0
        descriptor = self._repeat(os.O_WRONLY | anew, os.pwritev, self._source, num_bytes)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, num_bytes: int | None = None) -> None:
        """Reads the file, or so many bytes, again from the start where it ends."""
        os.close(self._repeat(os.O_RDONLY, os.preadv, self._target, num_bytes))

    def _repeat(
        self, flags: int, act: Callable[..., int], buffer: mmap.mmap, num_bytes: int | None
    ) -> int:
        """Calls `act` for one chunk after another; returns the open file."""
        descriptor = self._open(flags)
        count = self._chunks if num_bytes is None else -(-num_bytes // CHUNK)
        for at in range(count):
            act(descriptor, [buffer], at % self._chunks * CHUNK)
        return descriptor

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs and the like
            return os.open(self.path, flags, 0o644)


@dataclass(frozen=True)
class OffloadJob:
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
        ConfigError: This process may not make one.
    """
    folder = GROUPS / f"fullshard-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        limit = folder / LIMIT  # which is missing where groups do not count memory
        limit.write_text(str(limit_bytes or limit.read_text()))
    except OSError as error:
        raise ConfigError(f"a memory group: expected to make '{folder}'; {error}.") from error
    try:
        yield folder
    finally:
        time.sleep(0.5)  # the kernel still counts processes that have just ended
        folder.rmdir()


def _moved() -> tuple[int, int]:
    """Bytes that this process has read from disks, and written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return found["read_bytes"], found["write_bytes"]


class OffloadedStep:
    """A stack of linear layers, a unit each, whose state is on disk."""

    def __init__(self, job: OffloadJob) -> None:
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
        layers = max(2, job.num_bytes // BYTES_PER_LAYER)
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        torch.manual_seed(0)
        self.state_bytes = layers * BYTES_PER_LAYER
        offload = {**kinds, "folder": job.place}
        self.model = fs.shard(model, wrap=["Linear"], offload=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.ones(1, WIDTH)

    def __call__(self) -> None:
        self.model(self.batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def limit(self, group: Path) -> None:
        """Lowers the group's limit, from one rank."""
        os.sync()
        lines = (group / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        held = stat.get("total_rss", stat.get("anon", 0)) + stat.get("kernel", 0)
        held += stat.get("total_shmem", stat.get("shmem", 0))
        (group / LIMIT).write_text(str(held + SLACK + int(CACHED * self.state_bytes)))


def measure(job: OffloadJob) -> dict[str, Any]:
    """Returns this rank's seconds of steps and of the disk, by round, and the bytes of a step."""
    rank, group = dist.get_rank(), job.group
    (group / "cgroup.procs").write_text("0")
    step = OffloadedStep(job)
    step()
    dist.barrier()
    if rank == 0:
        step.limit(group)
    disk = PlainFiles(Path(job.place), step.state_bytes // dist.get_world_size(), rank)
    disk.write()
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


def rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for the step and one for its floor."""
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
            "memory_peak_bytes": 0,
            "num_rounds": len(seconds),
        }
        for name, seconds in times.items()
    ]
