"""One rank of the long parity run."""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.long_parity import CASE, ENGINES, LEARNING_RATE, MAX_NORM, SEED, Job
from fullshard.bench.engines import BUILDERS, Setup
from fullshard.data.order import BatchShape, SampleOrder


def curve(engine: str, sequences: np.ndarray, num_steps: int) -> list[float]:
    """Trains one engine and returns the mean loss of all ranks at every step."""
    shape = BatchShape(CASE.batch, 1, CASE.num_ranks)
    order = SampleOrder(len(sequences), shape, SEED)
    step = BUILDERS[engine](Setup(CASE, SEED, LEARNING_RATE, max_norm=MAX_NORM))
    losses = []
    for at in range(num_steps):
        chosen = order.of_step(at)[0, dist.get_rank()]
        ids = torch.from_numpy(sequences[chosen].astype(np.int64))
        losses.append(step(ids[:, :-1], ids[:, 1:]))
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    return (mean / CASE.num_ranks).tolist()


def measure(job: Job) -> dict[str, list[float]]:
    """Trains the engines one after another and returns their curves."""
    warnings.simplefilter("ignore", FutureWarning)  # from other libraries, about names of torch
    return {engine: curve(engine, job.sequences, job.num_steps) for engine in ENGINES}
