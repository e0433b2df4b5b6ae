"""Several processes as one machine: each a rank, with devices of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fullshard.errors import ConfigError


def join(rank: int, world_size: int, publish: Callable[[], str], *, wide: bool = False) -> None:
    """Meet the other processes; before anything else that jax does.

    Args:
        rank: This process.
        world_size: All of them; 1 meets nobody.
        publish: Gives the coordinator's address, the same to all.
        wide: Whether float64 is computed with.

    Raises:
        ConfigError: There is more than one device a process.
    """
    jax.config.update("jax_enable_x64", wide)
    jax.config.update("jax_enable_preemption_service", False)  # signals are the run's affair
    if world_size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Programs in flight side by side share one gloo group, in which their collectives must
        # have one order: each is awaited before the next begins.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(publish(), world_size, rank)
    if jax.device_count() != world_size:
        raise ConfigError(
            f"launch.num_processes: expected one process a device; got {world_size} processes "
            f"and {jax.device_count()} devices. Set it to {jax.device_count()}, or hide devices."
        )


def connect(mesh: Mesh) -> None:
    """Connect the processes along each axis now, rather than in the first step.

    gloo prints a line about it to standard output, which no setting turns off: standard output is
    closed meanwhile. Does nothing in one process, or where gloo is not used.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    ones = jax.make_array_from_callback(
        mesh.devices.shape, NamedSharding(mesh, P(*mesh.axis_names)), lambda _: np.ones((1, 1))
    )
    with _no_stdout():
        for along in dict.fromkeys([tuple(axes), *((axis,) for axis in axes)]):
            total = jax.shard_map(
                partial(jax.lax.psum, axis_name=along),
                mesh=mesh,
                in_specs=P(*mesh.axis_names),
                out_specs=P(*(None if axis in along else axis for axis in mesh.axis_names)),
            )
            jax.block_until_ready(jax.jit(total)(ones))


@contextmanager
def _no_stdout() -> Generator[None]:
    sys.stdout.flush()
    real = os.dup(1)
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(real, 1)
        os.close(real)


def play(num_devices: int) -> None:
    """Be several CPU devices in this process; before anything else that jax does."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def leave() -> None:
    """Where all processes are at their end. Does nothing in one that is alone."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
