"""Measurements of one rank of `python -m benchmarks.copies`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.copies import PLAIN, RECEIVED, Job
from fullshard.bench.engines import (
    BUILDERS,
    TRANSPORTS,
    Setup,
    make_batches,
    shard_ours,
    train_step,
)
from fullshard.engine import step as actions
from fullshard.engine.engine import Engine, engine_of
from fullshard.planner.schedule import EventKind

WARM_UP_STEPS = 2  # the first step learns the order of units, the second uses it
COPIES = ("copy", "cat", "clone", "stack")  # parts of the names of operations that only copy
COPY_IN = "all_gather_copy_in"


class CopyCounter(TorchDispatchMode):
    """Bytes read and written by copy operations, including autograd's, by operation.

    Attributes:
        num_bytes: by the operation's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(word in name for word in COPIES):
            # FSDP2's operation takes and returns the whole buffer but fills only this rank's part.
            leaves = tree_leaves(args[0] if name == COPY_IN else (args, kwargs, result))
            touched = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
            num_bytes = sum(tensor.nbytes for tensor in touched.values())
            self.num_bytes[name] += 2 * num_bytes if name == COPY_IN else num_bytes
        return result


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts copies inside the block; bytes from peers are counted as "received"."""
    counter, receive = CopyCounter(), dist.irecv

    def received(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counter.num_bytes[RECEIVED] += tensor.nbytes
        return receive(tensor, *args, **kwargs)

    # The engine disables dispatch modes for its own work; this mode stays on.
    blind = mock.patch.object(actions, "has_modes", return_value=False)
    with blind, mock.patch.object(dist, "irecv", received), counter:
        yield counter.num_bytes


def arithmetic(engine: Engine) -> dict[str, int]:
    """Returns the bytes that a step must read and write according to the layout, by purpose."""
    groups = [group for unit in engine.units for group in unit.groups]
    step = engine.runtime.step - 1
    gathered = [e.unit for e in engine.recorder.events(step) if e.kind is EventKind.GATHER]  # type: ignore[attr-defined]
    placed = [group for index in gathered for group in engine.units[index].gathered]
    cast = [g for g in groups if g.plan.shared and g.full.dtype is not g.master.dtype]
    shared_part = sum(g.master.nbytes + g.master.numel() * g.full.itemsize for g in cast)
    moved = [
        member.numel * (member.compute.itemsize + group.grad_slot.itemsize)
        for unit in engine.units
        for group in unit.trained_groups
        for member in group.members
        if group.grad_slot is not None
    ]
    weights = sum(group.master.nbytes + group.part.nbytes for group in placed) + shared_part
    return {"weights": weights, "gradients": sum(moved)}


def measure(job: Job) -> dict[str, Any]:
    """Runs every engine and counts one step of each."""
    setup = Setup(job.case)
    (batch,) = make_batches(job.case, dist.get_rank(), 1)
    found: dict[str, Any] = {}
    for name in (PLAIN, *job.engines):
        engine = None
        if name == PLAIN:
            step = train_step(setup.model().to(setup.compute), setup)
        elif name in TRANSPORTS:
            model = shard_ours(setup, TRANSPORTS[name])
            step, engine = train_step(model, setup), engine_of(model)
        else:
            step = BUILDERS[name](setup)
        for _ in range(WARM_UP_STEPS):
            step(*batch)
        with counted() as num_bytes:
            step(*batch)
        found[name] = {"counted": num_bytes, "arithmetic": engine and arithmetic(engine)}
    return found
