"""Choosing a transport, and making its process groups."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from fullshard.config.schema import ShardConfig
from fullshard.config.values import Transport as TransportKind
from fullshard.engine.collectives.base import Axes, Transport
from fullshard.engine.collectives.c10d import C10dTransport
from fullshard.engine.collectives.direct import DirectTransport
from fullshard.engine.collectives.fake import FakeTransport
from fullshard.engine.collectives.groups import first_tag, own_group
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh


def resolve_transport(asked: TransportKind, world_size: int, device: torch.device) -> TransportKind:
    """What `auto` means here: direct exchange on gloo and without peers, else c10d.

    Raises:
        ConfigError: The process group's backend does not serve the device or the transport.
    """
    if asked is TransportKind.FAKE:
        return asked
    if world_size == 1:
        return TransportKind.DIRECT
    backend = dist.get_backend_config().split(",")
    serving = {entry.partition(":")[0]: entry.partition(":")[2] for entry in backend}
    name = serving.get(device.type, dist.get_backend())
    if device.type == "cuda" and name == "gloo":
        raise ConfigError(
            "process group: expected a backend for cuda; got gloo. "
            "Initialise it with nccl, or move the model to the CPU."
        )
    direct = asked is TransportKind.DIRECT
    if direct and name != "gloo":
        raise ConfigError(
            f"transport: direct expects gloo; the process group is {name}. Use c10d or auto."
        )
    if direct or (asked is TransportKind.AUTO and name == "gloo"):
        return TransportKind.DIRECT
    return TransportKind.C10D


def make_transport(config: ShardConfig, mesh: Mesh) -> Transport:
    """The resolved transport, over groups of this mesh's axes.

    A collective where the world is larger than 1: every rank calls it in the same order.
    """
    match config.transport:
        case TransportKind.FAKE:
            return FakeTransport(_axes(mesh, 0))
        case TransportKind.DIRECT if mesh.world_size == 1:  # nothing travels, on any device
            return DirectTransport(_axes(mesh, 0))
        case TransportKind.DIRECT:  # messages carry tags: one group serves both axes
            world = own_group("all", [range(mesh.world_size)], 0)
            axes = replace(
                _axes(mesh, dist.get_rank()),
                world_group=world,
                first_tag=first_tag(),
            )
            return DirectTransport(axes)
        case _:
            axes = _axes(mesh, dist.get_rank())
            shards, replicas = axes.replicate_index, axes.shard_index
            axes = replace(
                axes,
                gather_group=own_group("gather", mesh.shard_groups(), shards),
                reduce_group=own_group("reduce", mesh.shard_groups(), shards),
                replicate_group=own_group("replicate", mesh.replicate_groups(), replicas),
                world_group=own_group("all", [range(mesh.world_size)], 0),
            )
            return C10dTransport(axes, config.reduction)


def _axes(mesh: Mesh, rank: int) -> Axes:
    """A rank's place in the mesh, without process groups."""
    replicate_index, shard_index = mesh.coordinates(rank)
    return Axes(
        mesh=mesh,
        rank=rank,
        shard_ranks=tuple(mesh.shard_groups()[replicate_index]),
        replicate_ranks=tuple(mesh.replicate_groups()[shard_index]),
    )
