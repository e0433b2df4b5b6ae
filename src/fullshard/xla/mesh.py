"""The mesh of XLA devices, with the planner's axis names and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from fullshard.config.values import Strategy
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh, Topology, resolve_mesh, row_of

REPLICATE, SHARD = "replicate", "shard"
AXES = (REPLICATE, SHARD)
# Per platform: the latency-hiding scheduler and asynchronous collectives.
_OVERLAP: dict[str, dict[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_multi_streamed_windowed_einsum": True,
    },
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_decompose_all_gather_einsum": True,
        "xla_tpu_decompose_einsum_reduce_scatter": True,
    },
}


def make_mesh(
    replicate: int | None = None,
    shard: int | None = None,
    *,
    strategy: Strategy = Strategy.FULL_SHARD,
    devices: Sequence[Any] | None = None,
) -> DeviceMesh:
    """Makes a mesh with the axes ('replicate', 'shard'); adjacent devices share a shard group.

    Args:
        replicate: Number of replicas of each shard. None: derived from the strategy.
        shard: Number of devices that share one copy. None: derived from the strategy.
        strategy: no_shard has one copy per device; hybrid strategies shard within a process.
        devices: Devices of the mesh. None: all that jax sees.

    Raises:
        ConfigError: The sizes do not multiply to the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    local = len([device for device in found if device.process_index == found[0].process_index])
    topology = Topology(len(found), local if len(found) % local == 0 else None)
    sizes = resolve_mesh(row_of(strategy), topology, replicate, shard)
    shape = (sizes.replicate, sizes.shard)
    if all(hasattr(device, "coords") for device in found):  # TPUs: ordered by their network
        placed = create_device_mesh(shape, found, allow_split_physical_axes=True)
    else:
        placed = np.array(found).reshape(shape)
    return DeviceMesh(placed, AXES, axis_types=(AxisType.Auto,) * 2)


def with_auto_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh with axes of type Auto, which XLA's partitioner shards over."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return DeviceMesh(mesh.devices, mesh.axis_names, axis_types=auto)


def sizes_of(mesh: DeviceMesh) -> Mesh:
    """Returns the planner's mesh for a device mesh.

    Raises:
        ConfigError: The mesh has other axes.
    """
    if tuple(mesh.axis_names) != AXES:
        raise ConfigError(
            f"mesh: expected the axes {AXES}; got {tuple(mesh.axis_names)}. Make it with "
            "fullshard.jax.make_mesh; for axes of your own there are shard_fsdp and jax.jit."
        )
    return Mesh(mesh.shape[REPLICATE], mesh.shape[SHARD])


def live_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the axes longer than 1; collectives over the others are no-ops."""
    return tuple(axis for axis in AXES if mesh.shape[axis] > 1)


def compiler_options_for(mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the backend's XLA options that overlap collectives with computation."""
    devices: Any = getattr(mesh, "devices", None)  # abstract meshes have no devices
    return _OVERLAP.get(devices.flat[0].platform, {}) if devices is not None else {}
