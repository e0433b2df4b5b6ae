"""One rank of a run in which rank 1 kills itself at a mark: FILE RANK MARK before|after."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import fullshard as fs
from fullshard.transport.segment import Board, Mark
from support.models import Chain, vectors

STEP = 1  # the second: everything was shared once


def main() -> None:
    """Trains a few steps."""
    file, rank, mark, when = sys.argv[1], int(sys.argv[2]), Mark[sys.argv[3]], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    offload = "cpu" if mark in (Mark.PLACED, Mark.FETCHED) else None
    model = fs.shard(Chain(3).double(), transport="shared", offload=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if rank == 1 and step == STEP:
            die_at(mark, when)
        model(vectors(step, rank)["x"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def die_at(mark: Mark, when: str) -> None:
    """Kills this process when it is about to advance a mark, or just after."""
    advance = Board.advance

    def last_words(self: Board, what: Mark, value: int) -> None:
        if what is mark and when == "after":
            advance(self, what, value)
        if what is mark:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(self, what, value)

    Board.advance = last_words


if __name__ == "__main__":
    main()
