"""A user's training script with one fault: `python -m support.hang_job FAULT`.

The fault is in the user's code: data that sleeps, a rank that is killed, an additional forward.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.errors import PreemptedError
from fullshard.launch.rank_entry import run_rank

FAULTY = 1
FAULT_AT = 3


class Net(nn.Module):
    """Four blocks of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def goes_wrong(step: int) -> bool:
    """Whether this rank commits its fault now; records the time for the test."""
    if dist.get_rank() != FAULTY or step != FAULT_AT:
        return False
    if "FULLSHARD_LOG_DIR" in os.environ:
        (Path(os.environ["FULLSHARD_LOG_DIR"]).parent / "fault").touch()
    return True


def fill_the_side_store() -> None:
    """Writes garbage into the store that all watchdogs read."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("fullshard/watchdog/0", dist.TCPStore(*place, is_master=False))
    store.set("asked", "{not json")
    store.add("alarm", 1)
    time.sleep(2.0)  # all ranks have read it
    store.set("asked", '{"7": [[]]}')


def read_batch(step: int, fault: str) -> torch.Tensor:
    """A user's data set, which hangs here."""
    if goes_wrong(step):
        if fault == "garbage":
            fill_the_side_store()
        if fault in ("sleep", "garbage"):
            time.sleep(600)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while fault == "lock":
            ctypes.PyDLL(None).sleep(600)  # a C extension that does not release the GIL
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(0)
    if fault == "exit" and step == FAULT_AT:
        time.sleep(600)  # no collective can fail here
    if fault == "preempt" and step == FAULT_AT:
        time.sleep(0 if dist.get_rank() == FAULTY else 2)  # one rank ends first
        raise PreemptedError("run: expected to reach its end, was asked to stop.")
    return torch.randn(2, 64)


def train(fault: str) -> None:
    """Trains six steps; one rank goes wrong in one of them."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    wrap, transport = (lambda module: isinstance(module, nn.Linear)), (*sys.argv[2:], "direct")[0]
    model = fs.shard(Net(), wrap=wrap, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = 3 if fault == "fewer" and dist.get_rank() == FAULTY else 6
    for step in range(1, steps + 1):
        if fault == "leave" and goes_wrong(step):
            return
        batch = read_batch(step, fault)
        faulty = dist.get_rank() == FAULTY and step == FAULT_AT
        if fault == "forward" and faulty:
            model(batch)
        if fault == "micro_batch" and faulty:
            model(batch).square().mean().backward()
        model(batch).square().mean().backward()
        fs.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    print("reached the end")
    dist.destroy_process_group()


if __name__ == "__main__":
    framed = sys.argv[1] in ("preempt", "leave")
    run_rank(lambda: train(sys.argv[1])) if framed else train(sys.argv[1])
