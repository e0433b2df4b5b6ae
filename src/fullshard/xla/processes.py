"""The processes of a run on XLA; each is one rank with its own device."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fullshard.errors import ConfigError, raise_together, untrusted
from fullshard.xla.plan import EXPERT, SHARD


def join(rank: int, world_size: int, publish: Callable[[], str], *, wide: bool = False) -> None:
    """Connects the processes; must run before any other use of jax.

    Args:
        rank: Rank of this process.
        world_size: Number of processes; with 1 there is no rendezvous.
        publish: Returns the coordinator's address, equal on all processes.
        wide: Whether to enable float64.

    Raises:
        ConfigError: A process has more than one device, or none, or compiles nothing.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            "JAX_DISABLE_JIT: expected false, because a step is one compiled program, which takes "
            "minutes without the compiler; got true. Unset it."
        )
    jax.config.update("jax_enable_x64", wide)
    jax.config.update("jax_enable_preemption_service", False)  # the run handles signals
    # Checks of a user's own functions, which ours do not pass; they change no result.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_check_tracer_leaks", False)
    if world_size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Concurrent programs share one gloo group, whose collectives need one order. Each program
        # is awaited before the next starts.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(publish(), world_size, rank)
    count = num_devices()
    if count != world_size:
        raise ConfigError(
            f"launch.num_processes: expected one process per device; got {world_size} processes "
            f"and {count} devices. Set it to {count}, or hide devices."
        )


def num_devices() -> int:
    """Number of devices of all processes.

    Raises:
        ConfigError: jax can use no platform here, or not the one that a variable asks for.
    """
    expected = "a platform with a device that jax can use here"
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    key = "JAX_PLATFORMS" if asked else "backend"
    advice = "Unset it, or set another." if asked else "Use backend: torch, or mend jax."
    with untrusted(key, expected, ConfigError, advice):
        return jax.device_count()


def connect(mesh: Mesh) -> None:
    """Connects the processes along each axis now instead of in the first step.

    gloo prints a line to standard output that no setting disables, so standard output is closed
    meanwhile. Does nothing in a single process or without gloo.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    ones = jax.make_array_from_callback(
        mesh.devices.shape,
        NamedSharding(mesh, P(*mesh.axis_names)),
        lambda _: np.ones((1,) * mesh.devices.ndim),
    )
    with _no_stdout():
        both = tuple(axis for axis in axes if axis in (SHARD, EXPERT))  # other arrays than experts
        for along in dict.fromkeys([tuple(axes), both or tuple(axes), *((axis,) for axis in axes)]):
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
    """Simulates several CPU devices in this process. Must run before any other use of jax."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def leave() -> None:
    """Wait for all processes at the end of a run. Does nothing in a single process."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()


def place_alike(what: str, tree: Any, shardings: Any) -> Any:
    """Places values that all processes have; jax compares them between processes.

    Raises:
        ConfigError: They differ.
    """

    def is_key(leaf: Any) -> bool:
        return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)

    def whole(new: jax.Array, old: Any) -> jax.Array:
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if is_key(old) else new

    data = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)
    try:
        return jax.tree.map(whole, jax.device_put(data, shardings), tree)
    except AssertionError as error:
        raise ConfigError(
            f"{what}: expected the same values on all processes; got values that differ. Make them "
            "from one seed, and give only the batch of each process its own values."
        ) from error


T = TypeVar("T")


def all_values(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order. A collective."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size]))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    pairs = zip(rows, sizes.reshape(-1), strict=True)
    return [pickle.loads(bytes(row[: int(size)])) for row, size in pairs]


def lead(do: Callable[[], T]) -> T:
    """Return the first process's result of `do`, which only it calls. A collective."""
    result: Any = agree(lambda: do() if jax.process_index() == 0 else None)
    return all_values(result)[0]


def agree(do: Callable[[], T]) -> T:
    """Returns the result of `do`. If it fails in one process, all raise. A collective."""
    return raise_together(all_values, jax.process_index(), do)
