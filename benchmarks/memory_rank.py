"""Measurements of one rank of `python -m benchmarks.memory`."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fullshard as fs
from benchmarks.memory import Job, MemoryCase
from fullshard.config.schema import RunConfig
from fullshard.config.values import TransportKind
from fullshard.models.build import given_model_config
from fullshard.outlook.predict import Machine, Outlook
from fullshard.planner.units import Place
from fullshard.recipes.base import Seat
from fullshard.recipes.pretrain.recipe import sharded
from fullshard.run.optim import build_optimizer
from fullshard.run.outlook import look_at

NUM_STEPS = 3  # optimizer state and receive buffers exist from the second step on


def live_peak_bytes(work: Callable[[], Any]) -> int:
    """Returns the peak of the live bytes of torch's allocator while `work` runs.

    Earlier allocations and memory outside of the allocator (mappings) are not counted.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = work()
    del kept
    events = sorted(_allocations(seen), key=lambda event: event.start_time_ns)
    now = peak = 0
    for event in events:
        now += event.extra_fields.alloc_size  # negative where memory is freed
        peak = max(peak, now)
    return peak


def _allocations(seen: profile) -> Iterator[Any]:
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            yield event


def train(config: RunConfig) -> object:
    """Runs a few steps like the loop of `fullshard train`."""
    training = config.training
    seat = Seat(0, 1, torch.device("cpu"))
    model, objective = sharded(config, given_model_config(config), seat)
    optimizer = build_optimizer(model, training)
    vocabulary = given_model_config(config).vocab_size
    for _ in range(NUM_STEPS):
        shape = (training.per_device_train_batch_size, training.max_seq_length)
        ids = torch.randint(vocabulary, shape)
        labels = ids.clone()
        for _ in range(training.gradient_accumulation_steps):
            loss, num_tokens = objective(model, {"input_ids": ids, "labels": labels})
            (loss * (1 / num_tokens)).backward()
        fs.clip_grad_norm_(model, training.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def _mapped_bytes(outlook: Outlook) -> int:
    """Memory shared by ranks of one host: weights, and gradient slots that peers read."""
    if outlook.plan.transport is not TransportKind.SHARED:
        return 0
    return sum(
        row.num_bytes
        for row in outlook.rows
        if row.place is Place.SHARED or row.name == "gradient slots"
    )


def measure(case: MemoryCase) -> dict[str, Any]:
    """Plans and runs a case."""
    config = case.config()
    outlook = look_at(config, dist.get_world_size(), Machine(None, None))
    measured = live_peak_bytes(lambda: train(config))
    return {
        "planned_bytes": outlook.peak_bytes[Place.DEVICE] - _mapped_bytes(outlook),
        "measured_bytes": measured,
        "is_traced": outlook.is_traced,
        "rows": {row.name: row.num_bytes for row in outlook.rows},
    }


def measure_all(job: Job) -> list[dict]:
    """Measures the cases one after another."""
    return [measure(case) for case in job.cases]
