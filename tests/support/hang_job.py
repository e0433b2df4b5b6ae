"""A training script of a user's own, with one fault: `python -m support.hang_job FAULT`.

The fault lies in what users write: data that sleeps, a rank that is killed, a forward too many.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs

FAULTY = 1
FAULT_AT = 3


class Net(nn.Module):
    """Four blocks of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x, order=(0, 1, 2, 3)):
        for index in order:
            x = x + torch.tanh(self.layers[index](x))
        return x


def read_batch(step: int, fault: str) -> torch.Tensor:
    """What a data set of the user's does, and where it hangs."""
    if dist.get_rank() == FAULTY and step == FAULT_AT:
        if fault == "sleep":
            time.sleep(600)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while fault == "lock":
            ctypes.PyDLL(None).sleep(600)  # a C extension that keeps Python's lock
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.randn(2, 64)


def train(fault: str) -> None:
    """Five steps, one of which goes wrong on one rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fs.shard(Net(), wrap=lambda module: isinstance(module, nn.Linear))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = 3 if fault == "fewer" and dist.get_rank() == FAULTY else 6
    for step in range(1, steps + 1):
        batch = read_batch(step, fault)
        faulty = dist.get_rank() == FAULTY and step == FAULT_AT
        if fault == "forward" and faulty:
            model(batch)
        if fault == "micro_batch" and faulty:
            model(batch).square().mean().backward()
        order = (1, 0, 2, 3) if fault == "order" and faulty else (0, 1, 2, 3)
        model(batch, order).square().mean().backward()
        fs.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if fault == "barrier" and dist.get_rank() == FAULTY:
        model(batch)
    dist.barrier()
    print("reached the end")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
