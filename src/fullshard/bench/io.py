"""`fullshard bench io`: saving and loading, compared with the disk and torch's own checkpoints.

Method:

A stack of linear layers with AdamW's states, sharded over the ranks: float32 parameters and two
moments. disk write: every rank writes as many bytes as its share of the checkpoint into a file of
its own, with O_DIRECT where the file system supports it, then fsync; disk read: the same, read.
save: fs.save until the checkpoint is complete, every file and folder synced. stall:
fs.save(wait=False) until training may continue. torch DCP: torch.distributed.checkpoint of the same
model under FSDP2 (fully_shard), its files synced.

All take one turn per round. A turn begins at a barrier and lasts until the slowest rank is done.
Before each read the files' pages are dropped from the page cache. Times are medians; the share of
the disk's speed is the median over the rounds of two times of one round, with a 95 % bootstrap
interval. Peak memory: the sampled growth of a rank's proportional set size, in a turn of its own.

Loaded values are compared with the saved ones before anything is timed.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_peer
from torch.distributed.checkpoint.state_dict_saver import save as save_peer
from torch.distributed.fsdp import fully_shard

import fullshard as fs
from fullshard.bench.measurement import (
    Neighbours,
    Page,
    PeakSampler,
    Say,
    method_of,
    paired_ratio,
    proportional_bytes,
    return_free_memory,
    run_ranks,
    slowest,
    timed,
)
from fullshard.errors import VerifyError

MIB = 2**20
CHUNK = 8 * MIB
WIDTH = 1024
BYTES_PER_LAYER = 3 * 4 * WIDTH * WIDTH  # a parameter and AdamW's two moments
DISK_WRITE, DISK_READ = "disk write", "disk read"
SAVE, STALL, LOAD = "fullshard save", "fullshard stall", "fullshard load"
PEER_SAVE, PEER_LOAD = "torch DCP save", "torch DCP load"
COLUMNS = ("what", "s", "GB/s", "of the disk's speed [95 %]", "peak memory, MiB")
METHOD = method_of(__doc__)


class PlainFiles:
    """Plain files of a rank's share, which show the disk's own speed."""

    def __init__(self, folder: Path, num_bytes: int, rank: int) -> None:
        self.path = folder / f"plain-{rank}"
        self._chunks = max(1, num_bytes // CHUNK)
        self._source = mmap.mmap(-1, CHUNK)  # aligned to pages, as O_DIRECT requires
        self._source.write(os.urandom(CHUNK))
        self._target = mmap.mmap(-1, CHUNK)

    def write(self) -> None:
        """Writes the file again; then syncs."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.fsync(descriptor := self._repeat(flags, os.pwritev, self._source))
        os.close(descriptor)

    def read(self) -> None:
        """Reads the file."""
        os.close(self._repeat(os.O_RDONLY, os.preadv, self._target))

    def _repeat(self, flags: int, act: Callable[..., int], buffer: mmap.mmap) -> int:
        """Calls `act` for one chunk after another; returns the open file."""
        try:
            descriptor = os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs and the like
            descriptor = os.open(self.path, flags, 0o644)
        for at in range(self._chunks):
            act(descriptor, [buffer], at * CHUNK)
        return descriptor


@dataclass(frozen=True)
class IoJob:
    """The job of the ranks.

    Attributes:
        num_bytes: Bytes of the whole checkpoint.
        place: The folder whose disk is measured.
    """

    num_bytes: int
    num_rounds: int
    place: str


def build(num_bytes: int) -> nn.Sequential:
    """Returns linear layers whose parameters and AdamW states have about `num_bytes`."""
    torch.manual_seed(0)
    layers = max(2, num_bytes // BYTES_PER_LAYER)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def updated(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW after one step, so that its states exist."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class TimedOperations:
    """Both models, the files, and the timed operations by name."""

    def __init__(self, job: IoJob) -> None:
        self.rank = dist.get_rank()
        self.folder = Path(job.place)
        self.model = fs.shard(build(job.num_bytes))
        optimizer = updated(self.model)
        peer = build(job.num_bytes)
        for layer in peer:
            fully_shard(layer)
        fully_shard(peer)
        model_state, optimizer_state = get_state_dict(peer, updated(peer))
        states: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        disk = PlainFiles(self.folder, job.num_bytes // dist.get_world_size(), self.rank)
        ours, theirs = self.folder / "ours", self.folder / "theirs"
        self.actions: dict[str, Callable[[], object]] = {
            DISK_WRITE: disk.write,
            SAVE: partial(fs.save, ours, self.model, optimizer),
            STALL: partial(fs.save, ours, self.model, optimizer, wait=False),
            PEER_SAVE: partial(save_peer, states, checkpoint_id=theirs),
            DISK_READ: disk.read,
            LOAD: partial(fs.load, ours, self.model, optimizer),
            PEER_LOAD: partial(load_peer, states, checkpoint_id=theirs),
        }

    def check(self) -> None:
        """Check that the loaded values equal the saved ones.

        Raises:
            VerifyError: It is not.
        """

        def values() -> list[torch.Tensor]:
            params: list[Any] = list(self.model.parameters())
            return [param.to_local().clone() for param in params]

        wanted = values()
        self.actions[SAVE]()
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        self.actions[LOAD]()
        if not all(map(torch.equal, values(), wanted)):
            raise VerifyError("bench io: expected to load what was saved; the bits differ.")

    def take(self, name: str) -> float:
        """Returns the seconds of one turn on this rank."""
        if name in (DISK_READ, LOAD, PEER_LOAD):
            self._drop_pages()
        elif name == PEER_SAVE and self.rank == 0:
            shutil.rmtree(self.folder / "theirs", ignore_errors=True)
        taken, _ = timed(self.actions[name])
        fs.wait()
        dist.barrier()
        return taken

    def memory(self, name: str) -> int:
        """Returns the largest growth of this rank's memory in one turn."""
        return_free_memory()
        before = proportional_bytes()
        with PeakSampler() as sampler:
            self.take(name)
        return max(0, sampler.peak_bytes - before)

    def _drop_pages(self) -> None:
        if self.rank == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)


def measure(job: IoJob) -> dict[str, Any]:
    """Returns this rank's seconds by operation and round, and its memory by operation."""
    turns = TimedOperations(job)
    turns.check()
    for name in turns.actions:  # once untimed: folders, pages, threads
        turns.take(name)
    memory = {name: turns.memory(name) for name in (SAVE, STALL, PEER_SAVE, LOAD, PEER_LOAD)}
    times: dict[str, list[float]] = {name: [] for name in turns.actions}
    for _ in range(job.num_rounds):
        for name in times:
            times[name].append(turns.take(name))
    return {"times": times, "memory": memory}


# ---- the command ---------------------------------------------------------------------------------


def run(
    job: IoJob, num_ranks: int, *, command: str, timeout_s: float, wait: bool, say: Say
) -> Page:
    """Measures every operation.

    Raises:
        FullshardError: A rank failed; its own error has been shown.
    """
    with Neighbours(wait=wait, say=say) as neighbours:
        say(f"{num_ranks} ranks, {job.num_bytes / MIB:,.0f} MiB: {job.num_rounds} rounds")
        found = run_ranks(
            f"{__name__}:measure", job, num_ranks, what="bench io", timeout_s=timeout_s
        )
    rows = _rows(job, found)
    return Page(
        "io",
        "Saving and loading beside the disk",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
    )


def _rows(job: IoJob, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for everything that was timed."""
    times = slowest([rank["times"] for rank in ranks])
    rows: list[dict[str, Any]] = []
    for name, seconds in times.items():
        disk = times[DISK_READ if name.endswith(("read", "load")) else DISK_WRITE]
        rows.append(
            {
                "name": name,
                "num_ranks": len(ranks),
                "num_bytes": job.num_bytes,
                "time_s": median(seconds),
                "bytes_per_s": job.num_bytes / median(seconds),
                "share_of_disk": paired_ratio(disk, seconds).to_dict(),
                "memory_peak_bytes": max(rank["memory"].get(name, 0) for rank in ranks),
                "num_rounds": len(seconds),
            }
        )
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        f"{row['time_s']:.3f}",
        f"{row['bytes_per_s'] / 1e9:.2f}",
        "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["share_of_disk"]),
        f"{row['memory_peak_bytes'] / MIB:.0f}" if row["memory_peak_bytes"] else "",
    )
