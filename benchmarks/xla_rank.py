"""Measurements of one rank of `python -m benchmarks.xla`.

torch's process group serves the rendezvous and the barriers around a step. The measured collectives
use jax's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch.distributed as dist

from benchmarks.xla import ENGINES, ONE, PEERS, Job
from benchmarks.xla_auto import auto_step
from fullshard.bench.engines import timed_by_all
from fullshard.launch import rendezvous
from fullshard.models.config import config_from_settings
from fullshard.run.on_xla import COORDINATOR
from fullshard.xla import opt_state, processes
from fullshard.xla.decoder import BLOCKS, DecoderConfig, loss_fn
from fullshard.xla.plan import Tree, XlaPlan, make_mesh, plan
from fullshard.xla.step import State, init, train_step

NUM_BATCHES = 4
SEED, LEARNING_RATE = 0, 1e-3
Train = Callable[[State, Any], tuple[State, dict[str, Any]]]


class Trainee:
    """An engine with its state and batches.

    Args:
        job: Case to measure.
        name: Name of the engine.
    """

    def __init__(self, job: Job, name: str) -> None:
        decoder = DecoderConfig.of(config_from_settings(job.shape.config()))
        alone = name == ONE
        mesh = make_mesh(1, 1, devices=jax.local_devices()) if alone else make_mesh(1, None)
        strategy = "full_shard" if alone else ENGINES[name]
        placed = plan(decoder.shapes(), {"strategy": strategy}, mesh, blocks=BLOCKS)
        tx = opt_state.adamw((0.9, 0.95), 1e-8, placed.map(lambda _: 0.0))
        self._state = init(placed, partial(_weights, placed), tx, jax.random.key(SEED))
        if name in PEERS.values():
            self._step: Train = auto_step(decoder, placed, tx, LEARNING_RATE)
        else:
            found = train_step(placed, loss_fn(decoder, placed), tx)
            self._step = partial(found, learning_rate=LEARNING_RATE)
        self._batches = [_batch(job, placed, at) for at in range(NUM_BATCHES)]
        self._num_steps = 0

    def step(self) -> dict[str, Any]:
        """Trains one step and waits until it is done."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready(self._state)
        return metrics


def _weights(placed: XlaPlan, key: Any) -> Tree:
    """Returns weights that do not depend on the mesh; norms are near one."""

    def draw(array: Any) -> jax.Array:
        layers = (array.num_layers,) if array.block else ()
        place = [a.name for a in placed.table.arrays].index(array.name)
        noise = jax.random.normal(jax.random.fold_in(key, place), (*layers, *array.shape))
        return 0.02 * noise + float(len(array.shape) == 1)

    return placed.map(draw)


def _batch(job: Job, placed: XlaPlan, at: int) -> dict[str, jax.Array]:
    """Returns this rank's tokens, as part of the batch of all devices of the mesh."""
    draw = np.random.default_rng(NUM_BATCHES * dist.get_rank() + at)
    shape = (job.shape.batch, job.shape.seq)
    ids = draw.integers(0, job.shape.vocab, shape).astype(np.int32)
    whole = (placed.table.mesh.world_size * shape[0], shape[1])
    made = jax.make_array_from_process_local_data(placed.batch_sharding(), ids, whole)
    return {"input_ids": made, "labels": made}


def measure(job: Job) -> dict[str, Any]:
    """Joins JAX's processes, builds all engines, then takes their steps in turn."""
    _join()
    try:
        return _measure(job)
    finally:
        processes.leave()


def _measure(job: Job) -> dict[str, Any]:
    rank = dist.get_rank()
    trainees: dict[str, Trainee] = {}
    losses: dict[str, list[float]] = {}
    for name in job.engines:
        if name != ONE or rank == 0:
            trainees[name] = Trainee(job, name)
            losses[name] = [float(trainees[name].step()["loss"]) for _ in range(job.num_checked)]
        dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in job.engines}
    cpu_times: dict[str, list[float]] = {name: [] for name in job.engines}
    for at in range(job.num_rounds):
        turn = at % len(job.engines)
        for name in job.engines[turn:] + job.engines[:turn]:
            step = trainees[name].step if name in trainees else time.thread_time
            step_s, cpu_s = timed_by_all(step)
            times[name].append(step_s)
            cpu_times[name].append(cpu_s)
    return {"times_s": times, "cpu_times_s": cpu_times, "losses": losses}


def _join() -> None:
    """Pins each rank to a core, as torch's engines use one thread; then initialises jax."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    free = partial(rendezvous.free_address, None)
    publish = partial(rendezvous.published, COORDINATOR, free)
    processes.join(dist.get_rank(), dist.get_world_size(), publish)
