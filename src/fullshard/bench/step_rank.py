"""One rank of `fullshard bench step`.

Engines run in turn, step by step, in one process group (mode "time"), or alone (mode "memory").
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from fullshard.bench.engines import BUILDERS, Setup, Step, make_batches
from fullshard.bench.ranks import PeakSampler, proportional_bytes, return_free_memory
from fullshard.bench.step import CASES, Case, StepJob

NUM_BATCHES = 4
PREFETCHES = (0, 1, 2)
TUNABLE = ("fsdp2", "fsdp2-zero2")
PILOT_STEPS = 3
MEMORY_STEPS = 3


def setup_of(job: StepJob, engine: str) -> Setup:
    """Returns what the engine is built from."""
    distance = (job.prefetch or {}).get(engine, 0)
    return Setup(job.case, job.seed, job.learning_rate, distance)


class Feeder:
    """Hands an engine its batches in order and counts its steps."""

    def __init__(self, case: Case, step: Step) -> None:
        self._batches = make_batches(case, dist.get_rank(), NUM_BATCHES)
        self._step = step
        self._num_steps = 0

    def step(self) -> torch.Tensor:
        """Runs one training step and returns this rank's loss."""
        tokens, labels = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        return self._step(tokens, labels)

    def mean_loss(self) -> float:
        """Runs one step and returns the mean of all ranks' losses."""
        loss = self.step().double().reshape(1)
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Times one step.

    Returns:
        The seconds from when every rank is ready until every rank has finished, and the processor
        seconds of this rank alone (which a loaded machine lengthens far less).
    """
    dist.barrier()
    start, cpu_s = time.perf_counter(), time.process_time()
    step()
    cpu_s = time.process_time() - cpu_s
    dist.barrier()
    return time.perf_counter() - start, cpu_s


def choose_prefetch(job: StepJob, engine: str) -> dict[int, float]:
    """Times FSDP2's prefetch distances and returns the best step of each, in the slowest rank."""
    times: dict[int, float] = {}
    for distance in PREFETCHES:
        setup = replace(setup_of(job, engine), prefetch=distance)
        feeder = Feeder(job.case, BUILDERS[engine](setup))
        feeder.step()
        best = torch.tensor([min(timed(feeder.step)[0] for _ in range(PILOT_STEPS))])
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        times[distance] = float(best)
        del feeder
        gc.collect()
    return times


def measure_time(job: StepJob) -> dict[str, object]:
    """Runs the engines in turn and returns their step times, losses and settings."""
    pilot: dict[int, float] = {}
    if job.prefetch is None:
        tunable = [engine for engine in job.engines if engine in TUNABLE]
        pilot = choose_prefetch(job, tunable[0]) if tunable else {}
        best = min(pilot, key=pilot.__getitem__, default=0)
        job = replace(job, prefetch=dict.fromkeys(TUNABLE, best))
    feeders, losses = {}, {}
    for engine in job.engines:
        feeder = Feeder(job.case, BUILDERS[engine](setup_of(job, engine)))
        losses[engine] = [feeder.mean_loss() for _ in range(job.num_checked)]
        feeders[engine] = feeder
    gc.collect()
    times: dict[str, list[float]] = {engine: [] for engine in job.engines}
    cpu_times: dict[str, list[float]] = {engine: [] for engine in job.engines}
    for i in range(job.num_rounds):
        # The order turns with every round, so that no engine always follows the same other one.
        turn = i % len(job.engines)
        for engine in job.engines[turn:] + job.engines[:turn]:
            step_s, step_cpu_s = timed(feeders[engine].step)
            times[engine].append(step_s)
            cpu_times[engine].append(step_cpu_s)
    return {
        "times_s": times,
        "cpu_times_s": cpu_times,
        "losses": losses,
        "prefetch": job.prefetch,
        "pilot_s": pilot,
    }


def warm_up_process(job: StepJob, engine: str) -> None:
    """Runs the engine on a tiny model first, so that the memory of imports does not count."""
    case = job.case
    like = replace(CASES["tiny"], num_ranks=case.num_ranks, kind=case.kind, compute=case.compute)
    tiny = replace(job, case=like)
    Feeder(tiny.case, BUILDERS[engine](setup_of(tiny, engine))).step()


def measure(job: StepJob) -> dict[str, object]:
    """Measures what a job asks for."""
    # Peers call what torch renamed, at every step: writing that down is no part of a step.
    warnings.simplefilter("ignore", FutureWarning)
    return measure_time(job) if job.mode == "time" else measure_memory(job)


def measure_memory(job: StepJob) -> dict[str, object]:
    """Runs one engine alone and returns its peak over what the process held before it was built."""
    (engine,) = job.engines
    warm_up_process(job, engine)
    return_free_memory()
    dist.barrier()
    baseline = proportional_bytes()
    feeder = Feeder(job.case, BUILDERS[engine](setup_of(job, engine)))
    return_free_memory()
    dist.barrier()
    with PeakSampler() as steps:
        for _ in range(MEMORY_STEPS):
            feeder.step()
        dist.barrier()
    return {"memory_peak_bytes": steps.peak_bytes - baseline}
