"""Measurements of one rank of `python -m benchmarks.overlap`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

import fullshard as fs
from benchmarks.delay import delayed
from benchmarks.overlap import TRACED, UNDELAYED, Job
from benchmarks.timeline import Entry, Timeline, slices_of
from fullshard.bench.engines import Block, build_model, make_batches
from fullshard.bench.step import Case
from fullshard.engine.engine import engine_of

SEED, LEARNING_RATE = 0, 1e-3
WARM_UP_STEPS = 2  # the first step learns the order of units, the second uses it


class Trainee:
    """A sharded model with its recorder.

    Args:
        case: Model and its sizes.
        depth: Units gathered ahead in forward and backward.
        wire: latency_s and bytes_per_s; None: nothing is delayed.
        options: Further arguments of `fs.shard`.
    """

    def __init__(
        self, case: Case, depth: int, wire: tuple[float, float] | None = None, **options: Any
    ) -> None:
        model = fs.shard(
            build_model(case, SEED),
            wrap=[Block.__name__],
            transport="direct",
            forward_prefetch=depth,
            backward_prefetch=depth,
            **options,
        )
        self.engine = engine_of(model)
        self.timeline = Timeline(self.engine.recorder)
        self.engine.recorder = self.engine.runtime.actions.recorder = self.timeline
        self.transport = transport = delayed(self.engine, *wire) if wire else None
        self.wires = [transport.gathers, transport.reductions, transport.outer] if transport else []
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        (self._batch,) = make_batches(case, dist.get_rank(), 1)
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> dict[str, Any]:
        """Trains one step; returns its time, events and messages on the wires."""
        self.timeline.entries.clear()
        for wire in self.wires:
            wire.sent.clear()
        dist.barrier()
        start = time.perf_counter()
        self._model(*self._batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.barrier()
        step_s = time.perf_counter() - start
        sent = [message for wire in self.wires for message in wire.sent]
        messages = [(m.issued_ns, m.starts_ns, m.done_ns) for m in sent]
        return {"step_s": step_s, "entries": list(self.timeline.entries), "messages": messages}


def block_forward_s(entries: Sequence[Entry], blocks: Collection[int]) -> float:
    """Returns a block's forward time: the lower quartile, averaged over the ranks."""
    spent = dict.fromkeys(blocks, 0)
    for piece in slices_of(entries):
        if piece.what == "forward" and piece.unit in spent:
            spent[piece.unit] += piece.stop_ns - piece.start_ns
    mean = torch.tensor([quantiles(spent.values())[0]], dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / 1e9 / dist.get_world_size()


def outer_hidden(trainee: Trainee, bytes_per_s: float) -> float:
    """Trains a step; returns the hidden share of the sums over replicas."""
    transport = trainee.transport
    assert transport is not None
    transport.outer.bytes_per_s = bytes_per_s
    transport.outer_waited_s = 0.0
    trainee.step()
    on_wire_s = sum(m.done_ns - m.starts_ns for m in transport.outer.sent) / 1e9
    return 1 - transport.outer_waited_s / on_wire_s


def measure(job: Job) -> dict[str, Any]:
    """Measures every depth, one step per round, after a step that sets the round's wires."""
    undelayed = Trainee(job.case, TRACED)
    units = undelayed.engine.plan.units
    blocks = [unit.index for unit in units[1:-1]]  # not the last block: the head computes after it
    gather_bytes = sum(group.gather_bytes() for group in units[1].groups)
    free = (job.latency_s, float("inf"))
    trainees = {str(depth): Trainee(job.case, depth, free) for depth in job.depths}
    replicas = Trainee(job.case, TRACED, free, strategy="no_shard")
    rounds: dict[str, list[Any]] = defaultdict(list)
    speeds, outer = [], []
    for _ in range(job.num_rounds):
        rounds[UNDELAYED].append(undelayed.step())
        forward_s = block_forward_s(rounds[UNDELAYED][-1]["entries"], blocks)
        wire_s = max(forward_s / job.compute_per_wire - job.latency_s, job.latency_s)
        speeds.append(gather_bytes / wire_s)
        for label, trainee in trainees.items():
            for wire in trainee.wires:
                wire.bytes_per_s = speeds[-1]
            rounds[label].append(trainee.step())
        outer.append(outer_hidden(replicas, speeds[-1]))
    titles = [unit.title for unit in units]
    return {
        "rounds": rounds,
        "bytes_per_s": median(speeds),
        "titles": titles,
        "outer_hidden": median(outer),
    }
