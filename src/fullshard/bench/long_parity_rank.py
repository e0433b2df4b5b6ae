"""One rank of the long parity run: `python -m fullshard.bench.long_parity_rank FOLDER STEPS`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fullshard.bench.engines import BUILDERS, Setup
from fullshard.bench.long_parity import (
    CASE,
    ENGINES,
    LEARNING_RATE,
    LOSSES_FILE,
    MAX_NORM,
    SEED,
    TOKENS_FILE,
)
from fullshard.launch import rendezvous
from fullshard.train.order import BatchShape, SampleOrder


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


def main(folder: Path, num_steps: int) -> None:
    """Trains the engines one after another; rank 0 writes the curves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of peers, about names of torch
    sequences = np.load(folder / TOKENS_FILE)
    rendezvous.init_process_group()
    try:
        losses = {engine: curve(engine, sequences, num_steps) for engine in ENGINES}
        if dist.get_rank() == 0:
            (folder / LOSSES_FILE).write_text(json.dumps(losses))
        dist.barrier()
    finally:
        rendezvous.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
