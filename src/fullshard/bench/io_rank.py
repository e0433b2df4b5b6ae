"""One rank of `fullshard bench io`: `python -m fullshard.bench.io_rank FOLDER`."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_peer
from torch.distributed.checkpoint.state_dict_saver import save as save_peer
from torch.distributed.fsdp import fully_shard

import fullshard as fs
from fullshard.bench.io import (
    DISK_READ,
    DISK_WRITE,
    LOAD,
    OPERATIONS,
    PEER_LOAD,
    PEER_SAVE,
    SAVE,
    STALL,
    Job,
)
from fullshard.bench.memory import PeakSampler, proportional_bytes, return_free_memory
from fullshard.errors import VerifyError

WIDTH = 1024
BYTES_A_LAYER = 3 * 4 * WIDTH * WIDTH  # parameter and AdamW's two moments
CHUNK = 8 << 20


def build(num_bytes: int) -> nn.Sequential:
    """Linear layers whose parameters and AdamW states have about `num_bytes`."""
    torch.manual_seed(0)
    layers = max(2, num_bytes // BYTES_A_LAYER)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def updated(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its states made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _local(param: Any) -> torch.Tensor:
    return param.to_local()


class Disk:
    """Plain files of a rank's share: what the disk itself can do."""

    def __init__(self, folder: Path, num_bytes: int, rank: int) -> None:
        self.path = folder / f"plain-{rank}"
        self._chunks = max(1, num_bytes // CHUNK)
        self._buffer = mmap.mmap(-1, CHUNK)  # aligned to pages, as O_DIRECT wants it
        self._buffer.write(os.urandom(CHUNK))

    def write(self) -> None:
        """All bytes, then fsync."""
        descriptor = self._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(self._chunks):
            os.write(descriptor, self._buffer)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self) -> None:
        """All bytes."""
        descriptor = self._open(os.O_RDONLY)
        while os.readv(descriptor, [self._buffer]):
            pass
        os.close(descriptor)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs and the like
            return os.open(self.path, flags, 0o644)


class Bench:
    """Both models, the files, and what is timed."""

    def __init__(self, job: Job) -> None:
        self.rank = dist.get_rank()
        self.folder = Path(job.place)
        self.model = fs.shard(build(job.num_bytes))
        self.optimizer = updated(self.model)
        peer = build(job.num_bytes)
        for layer in peer:
            fully_shard(layer)
        fully_shard(peer)
        states = get_state_dict(peer, updated(peer))
        self.peer: dict[str, Any] = {"model": states[0], "optimizer": states[1]}
        disk = Disk(self.folder, job.num_bytes // dist.get_world_size(), self.rank)
        ours, theirs = self.folder / "ours", self.folder / "theirs"
        self.turns: dict[str, Callable[[], object]] = {
            DISK_WRITE: disk.write,
            SAVE: partial(fs.save, ours, self.model, self.optimizer),
            STALL: partial(fs.save, ours, self.model, self.optimizer, wait=False),
            PEER_SAVE: partial(save_peer, self.peer, checkpoint_id=theirs),
            DISK_READ: disk.read,
            LOAD: partial(fs.load, ours, self.model, self.optimizer),
            PEER_LOAD: partial(load_peer, self.peer, checkpoint_id=theirs),
        }

    def check(self) -> None:
        """What is loaded must be what was saved.

        Raises:
            VerifyError: It is not.
        """
        wanted = [_local(p).clone() for p in self.model.parameters()]
        self.turns[SAVE]()
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()
        self.turns[LOAD]()
        found = [_local(p) for p in self.model.parameters()]
        if not all(map(torch.equal, found, wanted)):
            raise VerifyError("bench io: expected to load what was saved; the bits differ.")

    def take(self, name: str) -> float:
        """Seconds of one turn on this rank."""
        if name in (DISK_READ, LOAD, PEER_LOAD):
            self._drop_pages()
        elif name == PEER_SAVE and self.rank == 0:
            shutil.rmtree(self.folder / "theirs", ignore_errors=True)
        dist.barrier()
        start = time.perf_counter()
        self.turns[name]()
        taken = time.perf_counter() - start
        fs.wait()
        dist.barrier()
        return taken

    def memory(self, name: str) -> int:
        """What this rank's memory grows by at most in one turn."""
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


def measure(job: Job) -> dict:
    """This rank's seconds by operation and round, and its memory by operation."""
    bench = Bench(job)
    bench.check()
    for name in OPERATIONS:  # once untimed: folders, pages, threads
        bench.take(name)
    memory = {name: bench.memory(name) for name in (SAVE, STALL, PEER_SAVE, LOAD, PEER_LOAD)}
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for _ in range(job.num_rounds):
        for name in OPERATIONS:
            times[name].append(bench.take(name))
    return {"times": times, "memory": memory}
