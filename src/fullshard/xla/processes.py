"""Several processes as one machine: each a rank, with devices of its own."""

from __future__ import annotations

from collections.abc import Callable

import jax

from fullshard.errors import ConfigError
from fullshard.planner.arrays import REDUCE, ArraysPlan


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


def check_reductions(table: ArraysPlan) -> None:
    """Refuse what hangs on gloo: several all-reduces of a program, which wait for each other.

    Two of them are always there, one after the other; they are no trouble.

    Raises:
        ConfigError: The plan has more.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    if table.collectives()[REDUCE].count <= 2:
        return
    whole = [array.name for array in table.arrays if array.cut.dim is None]
    why = f"{whole[0]} is whole on every rank" if whole else "there are replicas"
    raise ConfigError(
        f"sharding.strategy: expected full_shard or shard_grad_op over all ranks, all arrays cut, "
        f"with backend: jax on several CPU processes, where XLA's all-reduces can hang; got "
        f"{table.strategy}, and {why}. Choose such a strategy, num_processes=1 or backend: torch."
    )


def leave() -> None:
    """Where all processes are at their end. Does nothing in one that is alone."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
