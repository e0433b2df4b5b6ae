"""Measurements of one rank of `python -m benchmarks.mesh`."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fullshard as fs
from benchmarks.mesh import THEIRS, TRANSPORTS, WARM_UP, Job

Step = Callable[[torch.Tensor], float]
GROUP = "c10d::"  # operations of process groups, which all of torch.distributed calls


def operations(found: profile) -> Counter[str]:
    """Counts operations of process groups in a profile by name, wherever they were called."""
    names = (event.name for event in found.events() or ())
    return Counter(name.removeprefix(GROUP) for name in names if name.startswith(GROUP))


def measure(job: Job) -> dict[str, Any]:
    """Trains both sides in turn; returns times, losses and collectives by engine."""
    case, rank = job.case, dist.get_rank()
    steps = {name: _step(_ours(job, transport)) for name, transport in TRANSPORTS.items()}
    steps[THEIRS] = _step(_theirs(job))
    # Ranks of a tensor axis are neighbours and share a batch.
    seed = rank // case.axes.get("tensor", 1)
    draw = torch.Generator().manual_seed(seed)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    found: dict[str, Counter[str]] = {}
    for number in range(-WARM_UP, job.num_rounds):
        batch = torch.randint(0, 2048, (case.batch, case.length), generator=draw)
        gc.collect()
        turn = number % len(steps)
        for name in [*steps][turn:] + [*steps][:turn]:
            dist.barrier()
            began = time.perf_counter()
            if number == -1:
                with profile(activities=[ProfilerActivity.CPU]) as step:
                    loss = steps[name](batch)
                found[name] = operations(step)
            else:
                loss = steps[name](batch)
            if number >= 0:
                times[name].append(time.perf_counter() - began)
                losses[name].append(loss)
    return {"times": times, "losses": losses, "collectives": found}


def _ours(job: Job, transport: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    return fs.shard(model, transport=transport, **job.case.axes)


def _theirs(job: Job) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**job.case.theirs)
    loaded = AutoModelForCausalLM.from_pretrained
    return loaded(job.folder, dtype=torch.float32, distributed_config=config)


def _step(model: Any) -> Step:
    """Runs forward, backward and update; returns the loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
