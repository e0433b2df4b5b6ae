"""Process groups, created once per layout of ranks and shared by models; a model's transport.

A gloo group costs threads and sockets, an NCCL group hundreds of megabytes. Destroying a group
while another rank uses it would end that rank, so groups live as long as the default group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import ShardConfig
from fullshard.config.values import TransportKind
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh, Topology, order_of
from fullshard.transport._torch_compat import await_gloo_at_exit, is_gloo, new_group_of
from fullshard.transport.base import (
    TAGS_A_MODEL,
    Axes,
    FakeTransport,
    Transport,
    Works,
    check_process,
    failed_message,
)
from fullshard.transport.c10d import C10dTransport, DirectTransport
from fullshard.transport.segment import Host
from fullshard.transport.shared import SharedTransport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """A rank's process and its host."""

    pid: int
    host: Host | None


@dataclass
class _Made:
    """The objects that belong to a default process group."""

    groups: dict[Any, Any] = field(default_factory=dict)
    layouts: count[int] = field(default_factory=count)
    serials: count[int] = field(default_factory=lambda: count(1))
    processes: list[Process] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)


MADE: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()  # by default process group


def own_group(purpose: str, layout: Iterable[Sequence[int]]) -> Any:
    """Returns this rank's group of a layout; None if the rank is alone in it.

    A collective on first use: all ranks create their groups of the same layouts in the same order.

    Args:
        purpose: Groups of different purposes are independent.
        layout: The ranks of each group, in their order; every rank is in exactly one.
    """
    rows = tuple(map(tuple, layout))
    if len(rows[0]) == 1:
        return None
    made, key = _made(), (purpose, rows)
    if key not in made.groups:
        made.groups[key] = new_group_of(rows, f"fullshard_{next(made.layouts)}")
        await_gloo_at_exit()
    return made.groups[key]


@dataclass(frozen=True)
class Exchange:
    """Exchanges slices of any length between the ranks of a shard group, without copies.

    Attributes:
        ranks: Global ranks, by part.
        part: Index of this rank in `ranks`.
        group: Process group of these ranks.
    """

    ranks: tuple[int, ...]
    part: int
    group: Any

    @classmethod
    def over(cls, mesh: Mesh, rank: int) -> Exchange:
        """Creates the exchange of this rank's shard axis. A collective on first use."""
        groups = mesh.shard_groups()
        ranks = tuple(next(ranks for ranks in groups if rank in ranks))
        return cls(ranks, mesh.coordinates(rank)[1], own_group("reduce", groups))

    def run(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Run all messages. Both ranks of a message must list theirs in the same order.

        Args:
            sends: (part, contiguous (numel,) tensor) pairs.
            receives: (part, contiguous (numel,) tensor) pairs, which are written.
        """
        messages = [
            dist.P2POp(call, tensor.view(torch.uint8), self.ranks[part], self.group)
            for call, listed in ((dist.isend, sends), (dist.irecv, receives))
            for part, tensor in listed
            if tensor.numel()
        ]
        Works(dist.batch_isend_irecv(messages) if messages else ()).wait()


def exchanged_parts(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends part r of (parts, ...) to rank r of a group; returns what the ranks sent, by rank.

    Differentiable: gradients go back the same way. A collective in forward and in backward.
    """
    return _AllToAll.apply(x, group)  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    """An exchange of equal parts between all ranks, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AllToAll.apply(gradient, ctx.group), None


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' tensors; its gradient is each rank's. A collective in forward."""
    return _Sum.apply(x, group, True)  # type: ignore[no-any-return]


def shared_by(x: torch.Tensor, group: Any) -> torch.Tensor:
    """A tensor that is equal on all ranks; its gradients are summed. A collective in backward."""
    return _Sum.apply(x, group, False)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """A sum over ranks in forward, or its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, in_forward: bool) -> torch.Tensor:  # noqa: FBT001
        ctx.group, ctx.sums = group, not in_forward
        return _sum_over(x, group) if in_forward else x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_over(gradient, ctx.group) if ctx.sums else gradient, None, None


def _sum_over(x: torch.Tensor, group: Any) -> torch.Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def first_tag() -> int:
    """Returns the first message tag of a new model; equal on all ranks."""
    return TAGS_A_MODEL * next(_made().serials)


def processes(world_size: int) -> list[Process]:
    """Returns the process of every rank. A collective on first use."""
    made = _made()
    if not made.processes:
        own = Process(os.getpid(), Host.here())
        made.processes = all_values(own, own_group("all", [range(world_size)]))
    return made.processes


def topology_of(world_size: int, order: tuple[int, ...] = (), inner: int = 1) -> Topology:
    """The topology of the launcher's ranks and hosts. `order`, `inner`: see planner.mesh.Mesh."""
    environment = read_launch_environment()
    local = environment.local_world_size if environment else None
    return Topology(world_size, local if local and world_size % local == 0 else None, order, inner)


def places_of_meshes(ranks: Sequence[int], world_size: int) -> tuple[tuple[int, ...], int]:
    """`Mesh.order` and `Mesh.inner` of a device mesh, or of parts of one side by side.

    A collective if this rank's mesh has only some ranks.

    Args:
        ranks: Ranks of this rank's mesh, row by row.
        world_size: Number of all ranks.

    Raises:
        ConfigError: The meshes do not contain every rank exactly once.
    """
    if len(ranks) == world_size or not dist.is_initialized():
        return order_of(ranks), 1
    found = all_values(list(ranks), own_group("all", [range(world_size)]))
    meshes = sorted(set(map(tuple, found)))
    if len({len(mesh) for mesh in meshes}) > 1:
        meshes = [tuple(ranks)]  # refused
    return order_of(list(chain.from_iterable(zip(*meshes, strict=True)))), len(meshes)


def _run(collective: Callable[..., None], *args: Any, **settings: Any) -> None:
    try:
        collective(*args, **settings)
    except RuntimeError as error:
        raise failed_message(error, "a message between ranks") from error


def all_values(value: Any, group: Any) -> list[Any]:
    """Returns the values of all ranks of a group. A collective."""
    said: list[Any] = [None] * dist.get_world_size(group)
    _run(dist.all_gather_object, said, value, group=group)
    return said


def first_value(value: Any, group: Any) -> Any:
    """Returns the value of a group's first rank; None is a group of this rank alone. A collective.

    `all_values` would allocate as many bytes for every rank.
    """
    said = [value]
    if group is not None:
        _run(dist.broadcast_object_list, said, group=group, group_src=0)
    return said[0]


def copy_from_first(tensors: Sequence[torch.Tensor], layout: Sequence[Sequence[int]]) -> None:
    """Overwrite tensors with those of the first rank of the group. A collective of all ranks.

    Args:
        tensors: Tensors with equal shapes and dtypes on all ranks of a group.
        layout: The ranks of each group.
    """
    group = own_group("all", map(sorted, layout))
    if group is not None:
        first = next(ranks[0] for ranks in layout if dist.get_rank() in ranks)
        for tensor in tensors:
            dist.broadcast(tensor, first, group=group)


def _made() -> _Made:
    made = MADE.setdefault(dist.group.WORLD, _Made())
    check_process(made.process)
    return made


# ---- the transport of a model --------------------------------------------------------------------


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
    name = backend_for(device)
    if name == "none" or (device.type == "cuda" and name == "gloo"):
        other = {"cpu": "cpu:gloo,cuda:nccl, or move the model to the GPU"}
        raise ConfigError(
            f"process group: expected a backend for {device.type}; got {name}. "
            f"Initialise it with {other.get(device.type, 'nccl, or move the model to the CPU')}."
        )
    if device.type == "cpu" and backend_for(torch.device("cuda")) == "nccl" and not dist.get_rank():
        logger.warning(
            "fs.shard: the model is on the CPU and will be trained there, although the process "
            "group has NCCL. To train on GPUs, move it first: model.to('cuda')."
        )
    if asked in (TransportKind.DIRECT, TransportKind.SHARED) and name != "gloo":
        raise ConfigError(f"transport: {asked} expects gloo; got {name}. Use c10d or auto.")
    if asked is TransportKind.SHARED or (asked is TransportKind.AUTO and name == "gloo"):
        obstacle = _why_not_shared(meshes, device)
        if obstacle is None:
            return TransportKind.SHARED
        if asked is TransportKind.SHARED:
            raise ConfigError(f"transport: shared expects {obstacle} Use direct or auto.")
        return TransportKind.DIRECT
    return asked if asked is not TransportKind.AUTO else TransportKind.C10D


def backend_for(device: torch.device) -> str:
    """The default process group's backend for tensors of a device; "none" if it has none."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config().split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "none")


def _why_not_shared(meshes: Sequence[Mesh], device: torch.device) -> str | None:
    """Return the requirement of a shared home that is missing here; None if it is possible."""
    if device.type != "cpu":
        return f"a model on the CPU; it is on {device}."
    if meshes[0].shard == 1:
        return "a shard axis of several ranks; it has one here."
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

    def shard_values(value: Any) -> list[Any]:
        said = all_values(value, axes.world_group)
        return [said[rank] for rank in axes.shard_ranks]

    pids = [processes(mesh.world_size)[rank].pid for rank in axes.shard_ranks]
    return SharedTransport(axes, pids, shard_values, gathers=config.offload is not None)
