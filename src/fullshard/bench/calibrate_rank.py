"""One rank of `fullshard bench calibrate`: `python -m fullshard.bench.calibrate_rank FOLDER`."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.bench import ceilings
from fullshard.bench.calibrate import Job, host_config
from fullshard.bench.ceilings import Sizes
from fullshard.bench.comm_rank import Exchange, plan_buffer, resolve
from fullshard.bench.idle import make_idle
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from fullshard.models.build import build_sharded, given_model_config
from fullshard.models.config import build_model
from fullshard.outlook.calibration import Point
from fullshard.planner.mesh import Mesh
from fullshard.recipes.base import causal_lm_loss
from fullshard.run.optim import build_optimizer
from fullshard.transport import make_transport

DTYPES = (torch.float32, torch.bfloat16)
SETTLED = 256  # numbers that end a backward: two a parameter, or so
WARM_UP, HOST_STEPS = 5, 40


def kernels(sizes: Sizes) -> dict[str, list[Point]]:
    """Tables of operations by kind and dtype."""
    found: dict[str, list[Point]] = {}
    with torch.no_grad():
        for dtype in DTYPES:
            word = str(dtype).removeprefix("torch.")
            for measure in (ceilings.products, ceilings.attentions, ceilings.passes):
                tables = measure(dtype, sizes, dist.barrier)
                found |= {f"{kind} {word}": points for kind, points in tables.items()}
                gc.collect()
    found["update float32"] = ceilings.updates(sizes, dist.barrier)
    return found


# ---- between ranks -------------------------------------------------------------------------------


def transfers(sizes: Sizes) -> dict[str, list[Point]]:
    """Tables of what each transport takes for a buffer: seconds, and those of processors."""
    world = dist.get_world_size()
    found: dict[str, list[Point]] = {}
    if world == 1:
        return found

    def note(name: str, num_bytes: int, work: Callable[[], Any]) -> None:
        wall_s, cpu_s = _timed(work, sizes.num_rounds)
        found.setdefault(name, []).append(((num_bytes,), wall_s))
        found.setdefault(f"{name} cpu", []).append(((num_bytes,), max(cpu_s, 1e-9)))

    for name in ("direct", "shared", "c10d"):
        try:
            config = resolve(name, world)
        except ConfigError:  # not on this system
            continue
        for num_bytes in sizes.transfers:
            exchange = Exchange(
                make_transport(config, Mesh(1, world)), plan_buffer(num_bytes, config, world)
            )
            note(f"{name} fetch", num_bytes, exchange.fetch)
            note(f"{name} reduce", num_bytes, exchange.reduce)
        transport = make_transport(config, Mesh(1, world))
        few = torch.ones(SETTLED, dtype=torch.float64)
        note(f"{name} settle", few.nbytes, lambda t=transport, v=few: t.all_reduce(v))
    replicas = make_transport(resolve("direct", world), Mesh(world, 1))
    for num_bytes in sizes.transfers:
        values = torch.ones(num_bytes // 4)
        note("direct replicas", num_bytes, lambda v=values: list(replicas.sum_replicas(v)))
    return found


def _timed(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds, and seconds of this rank's processors."""
    walls, processors = [], []
    for turn in range(-2, rounds):
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        work()
        if turn >= 0:
            walls.append(time.perf_counter() - start)
            processors.append(time.process_time() - used)
    return median(walls), median(processors)


# ---- the host ------------------------------------------------------------------------------------


def host(depths: tuple[int, ...]) -> dict[str, float]:
    """Processor's seconds of a tiny model's passes without an engine, and of its steps with one."""
    config = host_config(depths[-1])
    ids = torch.randint(given_model_config(config).vocab_size, (1, config.training.max_seq_length))
    found = _plain_passes(build_model(given_model_config(config), None, torch.float32, 0), ids)
    for depth in depths:
        found[f"step {depth}"] = _step_s(depth, ids)
    return found


def _plain_passes(model: nn.Module, ids: torch.Tensor) -> dict[str, float]:
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for turn in range(-WARM_UP, HOST_STEPS):
        start = time.thread_time()
        loss, _ = causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        model.zero_grad()
        if turn >= 0:
            times["forward"].append(middle - start)
            times["backward"].append(end - middle)
    return {name: median(values) for name, values in times.items()}


def _step_s(depth: int, ids: torch.Tensor) -> float:
    """Of a whole step as the training loop takes it; messages cost nothing."""
    config = host_config(depth)
    model = build_sharded(config, given_model_config(config), torch.device("cpu"))
    make_idle(engine_of(model))
    optimizer = build_optimizer(model, config.training)
    limit = config.training.max_grad_norm or math.inf
    times: list[float] = []
    for turn in range(-WARM_UP, HOST_STEPS):
        start = time.thread_time()
        loss, count = causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)
        (loss * (1 / count)).backward()
        fs.clip_grad_norm_(model, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if turn >= 0:
            times.append(time.thread_time() - start)
    return median(times)


def measure(job: Job) -> dict[str, Any]:
    """Everything that the job asks for."""
    found: dict[str, Any] = {"transfers": transfers(job.sizes)}
    if job.has_kernels:
        found |= {"operations": kernels(job.sizes), "host": host(job.depths)}
    return found
