"""Selects a transport and creates its process groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.schema import ShardConfig
from fullshard.config.values import Transport as TransportKind
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh
from fullshard.transport._torch_compat import is_gloo
from fullshard.transport.base import Axes, Transport
from fullshard.transport.c10d import C10dTransport
from fullshard.transport.direct import DirectTransport
from fullshard.transport.fake import FakeTransport
from fullshard.transport.groups import first_tag, own_group, processes, tell_everyone
from fullshard.transport.shared.home import SharedTransport


def resolve_transport(
    config: ShardConfig, meshes: Sequence[Mesh], device: torch.device
) -> TransportKind:
    """Resolves `auto`. A collective if the world is larger than 1.

    `shared` if the ranks of a shard axis are on one host and compute on its CPU; otherwise `direct`
    on gloo or for a single rank; otherwise `c10d`.

    Args:
        config: The configuration.
        meshes: The mesh of the model, and those of experts.
        device: The device that computes.

    Raises:
        ConfigError: The process group's backend does not serve the device or the transport.
    """
    asked = config.transport
    if asked is TransportKind.FAKE:
        return asked
    if meshes[0].world_size == 1:
        return TransportKind.DIRECT
    backend = dist.get_backend_config().split(",")
    serving = {entry.partition(":")[0]: entry.partition(":")[2] for entry in backend}
    name = serving.get(device.type, dist.get_backend())
    if device.type == "cuda" and name == "gloo":
        raise ConfigError(
            "process group: expected a backend for cuda; got gloo. "
            "Initialise it with nccl, or move the model to the CPU."
        )
    if asked in (TransportKind.DIRECT, TransportKind.SHARED) and name != "gloo":
        raise ConfigError(f"transport: {asked} expects gloo; got {name}. Use c10d or auto.")
    if asked is TransportKind.SHARED or (asked is TransportKind.AUTO and name == "gloo"):
        obstacle = _why_not_shared(config, meshes, device)
        if obstacle is None:
            return TransportKind.SHARED
        if asked is TransportKind.SHARED:
            raise ConfigError(f"transport: shared expects {obstacle} Use direct or auto.")
        return TransportKind.DIRECT
    return asked if asked is not TransportKind.AUTO else TransportKind.C10D


def _why_not_shared(
    config: ShardConfig, meshes: Sequence[Mesh], device: torch.device
) -> str | None:
    """Returns what a shared home needs and lacks here; None if it is possible."""
    if device.type != "cpu":
        return f"a model on the CPU; it is on {device}."
    if meshes[0].shard == 1:
        return "parameters that are cut; here every rank holds them whole."
    if config.offload is not None:
        return f"offload to be left out, since everything is on the host; got {config.offload}."
    places = processes(meshes[0].world_size)
    for ranks in chain.from_iterable(mesh.shard_groups() for mesh in meshes):
        if places[ranks[0]].host is None:
            return f"Linux with memfd_create and pidfd_open; rank {ranks[0]} has none."
        for rank in ranks:
            if places[rank].host != places[ranks[0]].host:
                return (
                    "the ranks that share a copy on one host (and in one container); "
                    f"ranks {ranks[0]} and {rank} are not."
                )
    return None


def make_transport(config: ShardConfig, mesh: Mesh) -> Transport:
    """Creates the resolved transport over groups of this mesh's axes.

    A collective if the world is larger than 1; all ranks call it in the same order.
    """
    kind = config.transport
    if config.symmetric_memory and kind is not TransportKind.C10D and mesh.world_size > 1:
        raise ConfigError(f"symmetric_memory: expected transport c10d on NCCL; got {kind}.")
    if kind is TransportKind.FAKE:
        return FakeTransport(Axes.of(mesh, 0))
    if kind is TransportKind.DIRECT and mesh.world_size == 1:  # no communication, on any device
        return DirectTransport(Axes.of(mesh, 0))
    groups: dict[str, Any] = {"world_group": own_group("all", [range(mesh.world_size)])}
    if kind not in (TransportKind.DIRECT, TransportKind.SHARED):
        groups["gather_group"] = own_group("gather", mesh.shard_groups())
        groups["reduce_group"] = own_group("reduce", mesh.shard_groups())
        groups["replicate_group"] = own_group("replicate", mesh.replicate_groups())
        groups["first_tag"] = first_tag() if is_gloo(groups["world_group"]) else 0
        axes = Axes.of(mesh, dist.get_rank(), **groups)
        return C10dTransport(axes, config.reduction, symmetric=config.symmetric_memory)
    # messages have tags, so one group serves both axes
    axes = Axes.of(mesh, dist.get_rank(), **groups, first_tag=first_tag())
    if kind is TransportKind.DIRECT or mesh.shard == 1:
        return DirectTransport(axes)

    def tell_all(value: Any) -> list[Any]:
        said = tell_everyone(value, axes.world_group)
        return [said[rank] for rank in axes.shard_ranks]

    pids = [processes(mesh.world_size)[rank].pid for rank in axes.shard_ranks]
    return SharedTransport(axes, pids, tell_all)
