"""Several processes as one machine: each a rank, with devices of its own."""

from __future__ import annotations

from collections.abc import Callable

import jax

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


def play(num_devices: int) -> None:
    """Be several CPU devices in this process; before anything else that jax does."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def leave() -> None:
    """Where all processes are at their end. Does nothing in one that is alone."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
