"""Counts the files and functions that one forward and backward of a sharded model run through.

    python tools/count_path.py        two ranks, fullshard and FSDP2; --list lists fullshard's

Whoever follows a step through the engine reads all of them. docs/architecture.md has the number.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard

import fullshard as fs

OURS = str(Path(fs.__file__).parent)
THEIRS = str(Path(torch.__file__).parent / "distributed" / "fsdp")
WIDTH, NUM_LAYERS, NUM_RANKS = 64, 4, 2
INNER = ("<genexpr>", "<listcomp>", "<lambda>")  # parts of other functions


class Layer(nn.Module):
    """A residual layer: a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, WIDTH) to the same shape."""
        return x + self.linear(self.norm(x))


def model() -> nn.Sequential:
    """Builds a model of equal layers."""
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))


def by_fsdp2() -> nn.Module:
    """Shards the model with torch's FSDP2."""
    made = model()
    for layer in made:
        fully_shard(layer)
    return fully_shard(made)


def by_us(transport: str) -> Callable[[], nn.Module]:
    """Returns a function that shards the model with fullshard."""
    return lambda: fs.shard(model(), wrap=("Layer",), transport=transport)


def passed(make: Callable[[], nn.Module], root: str) -> dict[str, set[str]]:
    """Returns the functions in `root` that the third step's forward and backward call, by file."""
    torch.manual_seed(0)
    sharded, found = make(), defaultdict[str, set[str]](set)
    x = torch.randn(8, WIDTH)

    def note(frame: FrameType, what: str, _: Any) -> None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_qualname
        if what == "call" and file.startswith(root) and not name.endswith(INNER):
            found[file.removeprefix(root + os.sep)].add(name)

    for step in range(3):
        if step == 2:
            threading.setprofile(note)
            sys.setprofile(note)
        sharded(x).sum().backward()
        sys.setprofile(None)
        threading.setprofile(None)
        sharded.zero_grad()
    return found


def measure(rank: int, port: int, listed: bool) -> None:  # noqa: FBT001  a process's argument
    """Prints one line per engine on rank 0."""
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    makes = {name: (by_us(name), OURS) for name in ("c10d", "shared")}
    for name, (make, root) in {**makes, "FSDP2": (by_fsdp2, THEIRS)}.items():
        found = passed(make, root)
        if rank == 0:
            print(f"{name:8} {len(found):3} files {sum(map(len, found.values())):4} functions")
        if rank == 0 and listed and root == OURS:
            for file in sorted(found):
                print(f"  {file}: {', '.join(sorted(found[file]))}")
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(measure, (port, "--list" in sys.argv), NUM_RANKS)


if __name__ == "__main__":
    main()
