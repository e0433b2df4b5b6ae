"""Sharding before an engine exists, and resharding when the model changes between steps.

    cut_early         shards parameters without a plan or a collective
    reclaim           shards parameters that users created from shards
    put_back_shards   copies shards that the user moved back into the flat buffers
    replace_engines   one new engine takes over values, gradients and optimizer states

`fs.shard` raises an error if parameters changed between steps. The interfaces of this package allow
such changes (a dtype, another Parameter object, `requires_grad`) through `Engine.on_change`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import Transport as TransportKind
from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import ATTRIBUTE, Engine
from fullshard.engine.model_spec import param_spec
from fullshard.engine.norms import GradientNorms
from fullshard.engine.optimizers import WATCHED
from fullshard.engine.parameter import Guarded, ShardedParameter, ShardedTensor
from fullshard.engine.placing import present, shard_shape
from fullshard.engine.record import ShardRecord
from fullshard.engine.unit import Group, Member, address_of, gather_piece
from fullshard.planner.layout import FlatLayout, Slice
from fullshard.planner.mesh import Mesh, Topology
from fullshard.planner.units import ContractRule, UnitSettings, group_params
from fullshard.transport.base import torch_dtype
from fullshard.transport.groups import copy_from_first
from fullshard.transport.select import make_transport

Local = dict[str, torch.Tensor]  # (n_local,) plain, by a parameter's first name


def cut_early(
    params: Mapping[str, nn.Parameter], mesh: Mesh, rank: int, settings: UnitSettings
) -> None:
    """Shards whole parameters in place, with the layout that their unit will have.

    Args:
        params: Parameters by name, each once, with equal values on all ranks.
        mesh: The mesh to shard over.
        rank: This rank.
        settings: Settings of the unit.
    """
    specs = [param_spec((name,), param) for name, param in params.items()]
    part = mesh.coordinates(rank)[1]
    for group in group_params(specs, ContractRule(ShardConfig(), settings), mesh.shard):
        pieces = group.layout.slices(part)
        first = params[pieces[0].name]
        dtype = torch_dtype(group.dtypes.master)
        flat = torch.zeros(group.layout.part_numel, dtype=dtype, device=first.device)
        for placement, piece in zip(group.layout.placements, pieces, strict=True):
            param = params[piece.name]
            local = flat[piece.offset : piece.offset + piece.numel]
            local.copy_(param.detach().reshape(-1)[piece.start : piece.stop])
            hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            sharded = present(param, local, piece, whole=mesh.shard == 1)
            gather = partial(_early_gather, mesh, group.layout, piece)
            sharded.record = ShardRecord(
                piece=piece,
                cut=None,
                unit="(not yet run)",
                index=-1,
                is_cut=mesh.shard > 1,
                copies=mesh.replicate,
                holders=group.layout.holders(placement),
                norms=_EarlyNorms(mesh, local.device),
                before_write=lambda: None,  # no other rank reads early shards
                gather=gather,
                post_accumulate=OrderedDict() if hooks is None else hooks,
            )


def reclaim(model: nn.Module) -> None:
    """Turns a parameter created from a shard, `nn.Parameter(torch.ones_like(p))`, into a shard."""
    for param in model.parameters():
        if type(param) is ShardedTensor:
            param.__class__ = ShardedParameter


def share_copies(model: nn.Module, world: Topology) -> None:
    """Copies the first replica's values to the other replicas of early shards. A collective."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for param in _shards(model):
        by_copies.setdefault(param.record.copies, []).append(param.to_local())
    for copies, tensors in sorted(by_copies.items()):
        mesh = Mesh(copies, world.world_size // copies, world.order)
        copy_from_first(tensors, mesh.replicate_groups())


class _EarlyNorms(GradientNorms):
    """Norms before an engine exists; the transport is created for the first one."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        super().__init__(None, device)  # type: ignore[arg-type]
        self._mesh = mesh

    def begin_clipping(self, limit: Any) -> None:
        self.meet("a clipping of early shards")  # creates the transport
        super().begin_clipping(limit)

    def all_reduce(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.transport = make_transport(ShardConfig(transport=TransportKind.DIRECT), self._mesh)
        return super().all_reduce(*args, **kwargs)


def _early_gather(
    mesh: Mesh, layout: FlatLayout, piece: Slice, local: torch.Tensor
) -> torch.Tensor:
    kind = TransportKind.DIRECT if local.device.type == "cpu" else TransportKind.C10D
    return gather_piece(make_transport(ShardConfig(transport=kind), mesh), layout, piece, local)


# ---- what changed


def put_back_shards(engine: Engine) -> None:
    """Copies moved shards (`p.data = ...` of the shard's size) back. No collective."""
    with no_guard():
        for group in engine.groups:
            for member in [] if group.is_in_place() else group.members:
                param, home = member.param, member.local(group.master)
                is_alike = (param.numel(), param.dtype) == (home.numel(), home.dtype)
                moved = address_of(param) != address_of(home) and param.device == home.device
                if is_alike and moved:
                    engine.home.before_write()
                    home.copy_(param.detach().reshape(-1))
                    whole = group.plan.layout.num_parts == 1
                    param.data = home.view(shard_shape(member.piece, whole=whole))


def needs_new_plan(engine: Engine) -> bool:
    """Whether the model has parameters outside the plan. Equal on all ranks."""
    with no_guard():
        places = (place for unit in engine.units for place in unit.places)
        return any(table.get(name) is not param for table, name, param, _ in places) or any(
            not group.is_in_place() and any(_misfits(group, m) for m in group.members)
            for group in engine.groups
        )


def _misfits(group: Group, member: Member) -> bool:
    param, piece = member.param, member.piece
    shape = shard_shape(piece, whole=group.plan.layout.num_parts == 1)
    is_other = tuple(param.shape) != shape and param.numel() != piece.numel
    is_thawed = param.requires_grad and not group.plan.trainable
    return is_other or is_thawed or param.dtype is not group.master.dtype


# ---- a new engine from old shards


def replace_engines(model: nn.Module, shard: Callable[[], Engine]) -> Engine:
    """Replaces the engines in a model by one new engine. A collective.

    Values, gradients and states of optimizers that have stepped are resharded for the new plan.

    Args:
        model: A model with engines, early shards or whole parameters.
        shard: Shards the model (`shard_model` with its arguments).
    """
    old = [_close(module) for module in model.modules() if hasattr(module, ATTRIBUTE)]
    with no_guard():
        grads: list[Any] = [param.grad for param in _shards(model)]
        kept = [grad if grad is None else grad.to_local().clone() for grad in grads]
    before = [(param, param.record) for param in _shards(model)]
    engine = shard()
    states = {id(param): state for param, state in WATCHED.states()}
    shown = {id(member.param): member.grad for member in engine.members}
    for (param, record), grad in zip(before, kept, strict=True):
        if param.record is not record:  # still in the model
            piece, own = param.record.piece, states.get(id(param), {})
            for key, state in own.items():
                if isinstance(state, Guarded):
                    own[key] = param.as_state(recut(state.to_local(), record, piece).clone())
            if grad is not None:
                _show_gradient(param, shown.get(id(param)), recut(grad, record, piece))
    del old  # alive until here, because its records gather resharded values
    return engine


def _show_gradient(param: ShardedParameter, shown: Any, local: torch.Tensor) -> None:
    with no_guard():
        if shown is not None:
            shown.copy_(local.view(shown.shape))
            param.grad = shown


def recut(local: torch.Tensor, record: ShardRecord, piece: Slice) -> torch.Tensor:
    """Returns (n_local,) values in the range of `piece`; a collective if the range changed."""
    before, local = record.piece, local.reshape(-1)
    whole = torch.Size(piece.shape).numel()
    if local.numel() == whole != before.numel:  # `p.data = whole`
        return local[piece.start : piece.stop]
    if (before.start, before.stop) == (piece.start, piece.stop):
        return local
    return record.gather(local).reshape(-1)[piece.start : piece.stop]


def shard_values(params: Mapping[str, nn.Parameter], pieces: Iterable[Slice]) -> Local:
    """Values of the existing shards, resharded for the plan.

    Args:
        params: The model's parameters, by name.
        pieces: This rank's slices in the plan, by first name.
    """
    found: Local = {}
    for piece in pieces:
        param = params[piece.name]
        if isinstance(param, ShardedParameter):
            found[piece.name] = recut(param.to_local(), param.record, piece).clone()
    return found


def _shards(model: nn.Module) -> list[ShardedParameter]:
    return [param for param in model.parameters() if isinstance(param, ShardedParameter)]


def _close(module: nn.Module) -> Engine:
    """Removes an engine from its model; the parameters stay shards."""
    engine = getattr(module, ATTRIBUTE)
    engine.runtime.reset()
    for handle in engine.handles:
        handle.remove()
    for inner in module.modules():
        vars(inner).pop("__reduce_ex__", None)
    delattr(module, ATTRIBUTE)
    return engine
