"""Modules that users mark one by one, and the engine that runs them together.

With torch's interfaces, each call makes one module a unit. Here such a call marks the module with a
`Wrapped` record, and its class gets the interface's methods. The parameters of the unit become
shards at once, without a collective. The engine is created when the outermost marked module first
runs (or is saved, loaded, clipped ...); its plan has one unit per mark.

    FSDP(layer)     layer is marked, its parameters are cut           no collective
    FSDP(model)     model is marked, the rest of them are cut         no collective
    model(x)        one plan, one engine over model                   all ranks together

Changes between steps (dtype, Parameter objects, requires_grad) also take effect there.

[Note: parameters without an engine]
Shards are made before an engine exists, and again when the model changes between steps:

    cut_early         shards parameters without a plan or a collective
    reclaim           shards parameters that users created from shards
    put_back_shards   copies shards that the user moved back into the flat buffers
    replace_engines   one new engine receives values, gradients and optimizer states

`fs.shard` raises an error if parameters changed between steps. The interfaces of this package allow
such changes (a dtype, another Parameter object, `requires_grad`) through `Engine.on_change`.

The end of this file places modules, gives values to those on meta, and copies values of rank 0.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fullshard.compat import MisuseError, MisuseValueError, NotOfferedError
from fullshard.config.schema import ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import DType, Strategy, TransportKind, WrapKind
from fullshard.engine._torch_compat import call_outside_compile, no_guard, outside_modes
from fullshard.engine.engine import ATTRIBUTE, Engine
from fullshard.engine.homes import default_device
from fullshard.engine.model_spec import (
    NEVER_CALLED,
    Memory,
    memory_of,
    param_spec,
    places_of,
    refuse_overlaps,
)
from fullshard.engine.modules import cast_tensors
from fullshard.engine.norms import GradientNorms, from_host
from fullshard.engine.optimizers import WATCHED
from fullshard.engine.parameter import Guarded, PendingGradient, ShardedParameter, ShardedTensor
from fullshard.engine.placing import present, shard_shape
from fullshard.engine.record import (
    ShardRecord,
    address_of,
    change_memory,
    sharing_of,
    take_along,
)
from fullshard.engine.shard import ShardInputs, refuse_shared_memory, shard_model
from fullshard.engine.unit import Group, Member, gather_piece
from fullshard.errors import EngineError, UnsupportedModelError
from fullshard.observe import watchdog
from fullshard.observe.hang import EventRing
from fullshard.planner.layout import FlatLayout, Slice, clean_name
from fullshard.planner.mesh import Mesh, Topology, resolve_mesh, row_of
from fullshard.planner.plan import Plan
from fullshard.planner.units import UnitSettings, group_params
from fullshard.transport.base import Home, Transport, torch_dtype
from fullshard.transport.groups import (
    all_values,
    copy_from_first,
    make_transport,
    own_group,
    topology_of,
)

MARK = "_fullshard_unit"


@dataclass(eq=False)
class Wrapped:
    """The record of a marked module.

    Attributes:
        strategy: Strategy of its unit.
        settings: Dtypes of its unit.
        options: Fields of ShardConfig for the whole model, used if it is the outermost module.
        order: Order of the ranks in its mesh; see planner.mesh.Mesh.
        ignored: Names of parameters in it that are replicated and not reduced.
        inputs: Dtype to which its floating-point arguments are cast; None casts nothing.
        root_only: Whether to cast them only if no marked module contains it.
        alone: Whether it belongs to this rank only; its parameters are then ignored.
        extra: Further values of the interface.
        module: Returns the marked module; shallow copies of it have the same record.
        around: Returns the next marked module that contains it.
        engine_ref: Returns its engine.
        check: Called with the root before an engine is created.
        on_engine: Called with the module and each new engine.
        shapes: Shapes of its parameters by name, when it was marked.
        memory: Where its parameters were stored then; empty once an engine exists.
        needs_plan: Whether the plan must be made again before the next step.
    """

    strategy: Strategy
    settings: UnitSettings
    options: dict[str, Any]
    order: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    inputs: torch.dtype | None = None
    root_only: bool = False
    alone: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], nn.Module | None] = lambda: None
    around: Callable[[], nn.Module | None] = lambda: None
    engine_ref: Callable[[], Engine | None] = lambda: None
    check: Callable[[nn.Module], None] = lambda _: None
    on_engine: list[Callable[[Any, Engine], None]] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict[str, torch.Size])
    memory: list[Memory] = field(default_factory=list[Memory])
    needs_plan: bool = False

    __reduce__ = Engine.__reduce__  # refuses deep copies and pickles of the module

    @property
    def mesh(self) -> Mesh:
        """Mesh of its parameters."""
        row = row_of(self.strategy)
        sizes = (self.options.get("replicate"), self.options.get("shard"))
        if not row.shard_params:
            sizes = (None, None)
        return resolve_mesh(row, topology(self.order), *sizes)


def topology(order: tuple[int, ...] = ()) -> Topology:
    """The ranks of the default process group, or one rank. `order`: see planner.mesh.Mesh."""
    return topology_of(dist.get_world_size() if dist.is_initialized() else 1, order)


def everyones(value: Any) -> list[Any]:
    """Returns the values of all ranks. A collective."""
    world = topology().world_size
    return all_values(value, own_group("all", [range(world)])) if world > 1 else [value]


def mesh_sizes(argument: str, sizes: list[int]) -> dict[str, int]:
    """Sizes of the replicate and shard axes.

    Args:
        argument: Name of the argument that gave the mesh.
        sizes: (shard,) or (replicate, shard).

    Raises:
        NotOfferedError: The mesh does not cover all ranks.
    """
    replicate, shard = [1, *sizes][-2:]
    world = topology().world_size
    if replicate * shard != world:
        raise NotOfferedError(
            f"{argument}: expected one that covers all {world} ranks (or one rank alone); got "
            f"{replicate} x {shard}. A subset of the ranks, as with tensor or pipeline "
            "parallelism, is not yet supported; pass None."
        )
    return {"replicate": replicate, "shard": shard}


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


# ---- marking


def mark(module: nn.Module, wrapped: Wrapped) -> None:
    """Make a module a unit: record it, cut its parameters, hook its forward."""
    check_unsharded(module)
    setattr(module, MARK, wrapped)
    wrapped.module = weakref.ref(module)
    for inner, record in marked(module):
        if inner is not module and record.around() is None:
            record.around = lambda: wrapped.module()
    before = partial(call_outside_compile, _before_forward)
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    named = nn.Module.named_parameters(module)
    whole = [(name, param) for name, param in named if type(param) is nn.Parameter]
    wrapped.memory = memory_of(whole, names_in(module, ignored_ids(module)))
    cut(module, wrapped)


def check_unsharded(module: nn.Module) -> None:
    """Check that a module to mark is not sharded by `fs.shard`; modules inside it may be.

    Raises:
        MisuseError: `fs.shard` has sharded it, alone or in a larger model.
    """
    inside = [vars(m).get(ATTRIBUTE) for m in module.modules() if m is not module]
    for inner in module.modules():
        engine = getattr(vars(inner).get("__reduce_ex__"), "__self__", None)
        if isinstance(engine, Engine) and engine.on_change is None and engine not in inside:
            raise MisuseError(
                f"{type(module).__name__}: expected a module that was not sharded; fs.shard has "
                "sharded it, alone or in a larger model. Leave out one of the two calls."
            )


def wrapped_of(module: nn.Module) -> Wrapped | None:
    """The mark of a module."""
    return vars(module).get(MARK)


def record_of(module: nn.Module) -> Wrapped:
    """The record of a marked module."""
    return vars(module)[MARK]


def marked(module: nn.Module) -> Iterator[tuple[nn.Module, Wrapped]]:
    """All marked modules at or below a module."""
    for inner in module.modules():
        record = wrapped_of(inner)
        if record is not None:
            yield inner, record


def cut(module: nn.Module, wrapped: Wrapped) -> None:
    """Cuts parameters that no inner unit has cut; skips parameters on meta."""
    ignored = ignored_ids(module)
    params: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in places_of(module).items():
        if type(param) is nn.Parameter and id(param) not in ignored:
            params.setdefault(id(param), (name, param))
    whole = dict(params.values())
    wrapped.shapes = wrapped.shapes or {name: param.shape for name, param in whole.items()}
    if whole and not any(p.is_meta or p.grad is not None for p in whole.values()):
        settings = replace(wrapped.settings, strategy=wrapped.strategy)
        cut_early(whole, wrapped.mesh, own_rank(), settings)


def ignored_ids(root: nn.Module) -> set[int]:
    """Ids of the ignored parameters at or below a module."""
    found: set[int] = set()
    for module, record in marked(root):
        places = places_of(module) if record.ignored else {}
        found |= {id(places[name]) for name in record.ignored if name in places}
    return found


def names_in(module: nn.Module, ids: set[int]) -> tuple[str, ...]:
    """Names of the parameters with these ids, the further names of tied ones too."""
    return tuple(sorted(name for name, param in places_of(module).items() if id(param) in ids))


def swap_class(module: nn.Module, interface: type, name: str) -> None:
    """Changes a module's class to a subclass of the interface and of its own class."""
    kind = type(module)
    key = (kind, interface)
    if key not in _SWAPPED:
        _SWAPPED[key] = type(name, (interface, kind), {"__module__": kind.__module__})
    try:
        module.__class__ = _SWAPPED[key]
    except TypeError as error:
        raise UnsupportedModelError(
            f"{kind.__name__}: expected a module whose class can be extended; {error}. Wrap the "
            "modules inside it, or the one around it."
        ) from error


def original_class(kind: type) -> type | None:
    """The class before `swap_class`; None for other classes."""
    return kind.__bases__[1] if kind in _SWAPPED.values() else None


def bare(kind: type, interface: type) -> Any:
    """Returns an object of a swapped class without attributes, for `copy.copy`."""
    return object.__new__(_SWAPPED[kind, interface])


_SWAPPED: dict[tuple[type, type], type] = {}  # one class for each, as in torch's FSDP2


# ---- running


def engine_for(module: nn.Module) -> Engine:
    """The engine of a marked module; creates it, or a new one after changes, if needed.

    Creating an engine is a collective.
    """
    engine = record_of(module).engine_ref()
    if engine is None:
        return build(outermost(module))
    root = outermost(module)
    if getattr(root, ATTRIBUTE, None) is engine:
        return _with_changes(root) or engine
    return engine


def outermost(module: nn.Module) -> nn.Module:
    """The outermost marked module around a module."""
    found = module
    while True:
        wrapped = wrapped_of(found)
        found = (wrapped and wrapped.module()) or found  # not a shallow copy
        around = wrapped.around() if wrapped is not None else None
        if around is None or not any(inner is found for inner in around.modules()):
            return found
        found = around


@outside_modes()
@torch.inference_mode(mode=False)
def build(root: nn.Module) -> Engine:
    """Creates the engine of all marked modules at or below a module. A collective.

    It outlives the modes and transformations in which the model runs first.
    """
    units = {name: w for name, m in root.named_modules() if (w := wrapped_of(m)) is not None}
    reclaim(root)
    for wrapped in units.values():
        wrapped.check(root)
    _refuse_aliases(root, units)
    for module, wrapped in reversed(list(marked(root))):
        cut(module, wrapped)  # parameters that were materialized or replaced after the mark
    ranks = topology(_order_of(units))
    if all(wrapped.engine_ref() is None for wrapped in units.values()):
        share_copies(root, ranks)  # as in torch, replicas start with equal values
    config = _config_of(root, units)
    check_supported(config)
    settings = {n: replace(w.settings, strategy=w.strategy) for n, w in units.items()}
    alone = all(wrapped.alone for wrapped in units.values())
    given = ShardInputs(settings=settings, alone=alone, recut=shard_values)
    world, ring = Topology(1) if alone else ranks, EventRing()
    engine = replace_engines(root, lambda: shard_model(root, config, world, ring, given))
    engine.on_change = partial(_with_changes, is_forward=True)
    for wrapped in units.values():
        wrapped.engine_ref, wrapped.needs_plan, wrapped.memory = weakref.ref(engine), False, []
    for name, wrapped in units.items():
        for tell in wrapped.on_engine:
            tell(root.get_submodule(name), engine)
    watchdog.watch(ring, [unit.title for unit in engine.plan.units])
    return engine


def _refuse_aliases(root: nn.Module, units: Mapping[str, Wrapped]) -> None:
    """Refuse parameters and buffers that shared the memory of a parameter when it was cut."""
    by_storage: dict[int, list[Memory]] = {}
    for unit, wrapped in units.items():
        for one in wrapped.memory:
            named = one._replace(name=clean_name(f"{unit}.{one.name}".lstrip(".")))
            by_storage.setdefault(one.storage.cdata, []).append(named)
    for memory in by_storage.values():
        refuse_overlaps(memory)
    cut_ones = (one for memory in by_storage.values() for one in memory if one.is_cut)
    refuse_shared_memory(root, {one.storage.cdata: one.name for one in cut_ones})


def _order_of(units: Mapping[str, Wrapped]) -> tuple[int, ...]:
    """Order of the ranks in the mesh of the marked modules.

    Raises:
        NotOfferedError: The orders differ.
    """
    orders = {wrapped.order for wrapped in units.values() if not wrapped.alone}
    if len(orders) > 1:
        raise NotOfferedError(
            "mesh: expected one order of ranks in the meshes of all units of a model; got "
            f"{sorted(orders)}. Use the same mesh for all units."
        )
    return orders.pop() if orders else ()


before_change: list[Callable[[Engine], None]] = []  # before an outermost forward or a new engine


def _with_changes(root: nn.Module, *, is_forward: bool = False) -> Engine | None:
    """Applies changes since the last step; returns the new engine, if one was created."""
    wrapped, engine = record_of(root), getattr(root, ATTRIBUTE)
    if engine.unsharded or any(unit.swapped for unit in engine.units):
        return None  # inside a forward: modules contain compute parameters
    put_back_shards(engine)
    is_new = needs_new_plan(engine)
    for call in before_change if is_forward or is_new or wrapped.needs_plan else ():
        call(engine)
    if engine.norms.waits and (is_new or wrapped.needs_plan):
        with no_guard():
            grads = [member.param.grad for member in engine.members]
        waiting = [grad for grad in grads if isinstance(grad, PendingGradient)]
        if waiting and is_new:
            raise EngineError(
                "a change of requires_grad, a dtype or a parameter: expected no gradients that "
                "no_sync deferred, because parameters are sharded again; got that of "
                f"{waiting[0].record.describe()}. Change it after the backward that sums them, or "
                "after zero_grad()."
            )
        if waiting:
            return None  # settings change once they are summed
        engine.norms.waits = False  # zero_grad() dropped them
    return build(root) if wrapped.needs_plan or is_new else None


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter is still on meta."""
    return any(param.is_meta for param in module.parameters())


def _config_of(root: nn.Module, units: Mapping[str, Wrapped]) -> ShardConfig:
    own = units[""]
    sharded = [w for w in units.values() if row_of(w.strategy).shard_params]
    base = own if own in sharded or not sharded else sharded[0]
    options = {**own.options}
    for key in ("replicate", "shard"):
        options[key] = base.options.get(key) if sharded else None
    names = {name for name in units if name and _can_be_unit(root, name)}
    chosen = {id(root.get_submodule(name)) for name in names}
    ignored = ignored_ids(root)
    places = places_of(root).items()  # all names of tied ones
    return ShardConfig.of(
        None,
        strategy=base.strategy,
        wrap=(lambda module: id(module) in chosen) if chosen else WrapKind.NONE,
        ignore=tuple(name for name, param in places if id(param) in ignored),
        **{key: value for key, value in options.items() if value is not None},
    )


def _can_be_unit(root: nn.Module, name: str) -> bool:
    """Whether the module is called; ModuleList and parts of MultiheadAttention are not."""
    path = root
    for part in name.split("."):
        if isinstance(path, nn.MultiheadAttention):
            return False
        path = getattr(path, part)
    return not isinstance(path, (*NEVER_CALLED, nn.MultiheadAttention))


def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    wrapped = record_of(module)
    if wrapped.module() is None:  # `module` is a copy that outlives it
        wrapped.module = weakref.ref(module)
    if wrapped.engine_ref() is None:
        engine = build(outermost(module))
        marked_one = wrapped.module() or module
        args, kwargs = engine.begin_call(marked_one, args, kwargs) or (args, kwargs)
    dtype = wrapped.inputs
    if dtype is not None and not (wrapped.root_only and ATTRIBUTE not in vars(module)):
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
    return args, kwargs


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, without wrapper prefixes, by its id."""
    found: dict[int, list[str]] = {}
    for name, param in places_of(model).items():
        found.setdefault(id(param), []).append(clean_name(name))
    return found


def settings_of(policy: MixedPrecision | MixedPrecisionPolicy) -> UnitSettings:
    """A unit's dtypes. Parameters are stored in theirs; reduce_dtype defaults to param_dtype."""
    given = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    compute, reduce = (x and DType(str(x).removeprefix("torch.")) for x in given)
    return UnitSettings(compute=compute, reduce=reduce, keeps_dtypes=True)


# ---- without an engine, and with a new one -------------------------------------------------------


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
    for group in group_params(specs, ShardConfig(), settings, mesh.shard):
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
                address=address_of(local),
                home=Home(),  # no other rank reads early shards
                gather=gather,
                post_accumulate=OrderedDict() if hooks is None else hooks,
            )


def reclaim(model: nn.Module) -> None:
    """Turns a parameter created from a shard, `nn.Parameter(torch.ones_like(p))`, into a shard."""
    for param in model.parameters():
        if type(param) is ShardedTensor:
            found = sharing_of(param)
            change_memory(param, None)
            param.__class__ = ShardedParameter
            if found is not None and not found.params:
                found.add(param)


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
        self.compare("a clipping of early shards")  # creates the transport
        super().begin_clipping(limit)

    def all_reduce(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.transport = early_transport(self._mesh, self.device)
        return super().all_reduce(*args, **kwargs)


def _early_gather(
    mesh: Mesh, layout: FlatLayout, piece: Slice, local: torch.Tensor
) -> torch.Tensor:
    return gather_piece(early_transport(mesh, local.device), layout, piece, local)


def early_transport(mesh: Mesh, device: torch.device) -> Transport:
    is_direct = device.type == "cpu" or mesh.world_size == 1  # NCCL sends no tensors of the host
    kind = TransportKind.DIRECT if is_direct else TransportKind.C10D
    return make_transport(ShardConfig(transport=kind), mesh)


# ---- what changed


def put_back_shards(engine: Engine) -> None:
    """Copies moved shards (`p.data = ...` of the shard's size, or whole) back. No collective.

    Tensors that shared memory with a shard before it was moved (`old = p.data`) keep their values;
    those that share it now (the value assigned) share the place that it is copied to. See
    [Note: shared memory] in engine/record.py.

    Raises:
        EngineError: A parameter has the tensor of another one.
    """
    moved: list[tuple[Member, torch.Tensor]] = []  # and its place in the buffer
    with no_guard():
        for group in engine.groups:
            placed = [] if group.is_in_place() else zip(group.members, group.addresses, strict=True)
            for member, address in placed:
                param, master = member.param, group.master
                if not isinstance(param, ShardedParameter) or _owner(param) is not param:
                    raise EngineError(
                        f"{clean_name(member.piece.name)}: expected its own tensor; got that of "
                        "another parameter (torch.utils.swap_tensors). Swap their values: "
                        "p.data, q.data = q.data, p.data."
                    )
                if address_of(param) != address and param.device == master.device:
                    value, home = _own_part(param.detach(), member.piece), member.local(master)
                    if (value.numel(), value.dtype) == (home.numel(), home.dtype):
                        moved.append((member, home))
        if not moved:
            return
        engine.home.before_write()
        values = [_own_part(member.param.detach(), member.piece) for member, _ in moved]
        masters = {group.master.untyped_storage().data_ptr() for group in engine.groups}
        values = [x.clone() if x.untyped_storage().data_ptr() in masters else x for x in values]
        for (member, home), value in zip(moved, values, strict=True):
            home.copy_(value)
            whole = member.group.plan.layout.num_parts == 1
            member.param.data = home.view(shard_shape(member.piece, whole=whole))
            take_along(member.param, home)


def _owner(param: ShardedParameter) -> Any:
    """The parameter whose tensor it was when its model was sharded; itself if that is gone."""
    member = param.record.member and param.record.member()
    return param if member is None else member.param


def needs_new_plan(engine: Engine) -> bool:
    """Whether the model has parameters outside the plan. Equal on all ranks."""
    with no_guard():
        entries = (entry for unit in engine.units for entry in unit.entries)
        return any(table.get(name) is not param for table, name, param, _ in entries) or any(
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
    old = [_close(module) for module in model.modules() if ATTRIBUTE in vars(module)]
    with no_guard():
        grads: list[Any] = [param.grad for param in _shards(model)]
        kept = [grad if grad is None else grad.to_local().clone() for grad in grads]
    before = [(param, param.record) for param in _shards(model)]
    engine = shard()
    engine.norms.rows = {key: one for e in old for key, one in e.norms.rows.items()}
    trained = [(record, param.record) for param, record in before if record.index >= 0]
    names = [record.piece.name for record, now in trained if not record.is_cut_like(now)]
    engine.replaced = weakref.WeakSet([*old, *chain.from_iterable(one.replaced for one in old)])
    for earlier in engine.replaced:
        earlier.runtime.cut_anew = earlier.runtime.cut_anew or next(map(clean_name, names), None)
    with no_guard():
        for param, record in before:
            found = sharing_of(param)
            if found is not None and record.is_cut_like(param.record):
                take_along(param, param.detach().reshape(-1))
            elif found is not None:
                found.drop(param)
    states = {id(param): state for param, state in WATCHED.states()}
    shown = {id(member.param): member.grad for member in engine.members}
    parts = [
        (param, record, grad, states.get(id(param), {}))
        for (param, record), grad in zip(before, kept, strict=True)
        if param.record is not record  # still in the model
    ]
    dtypes = _gradient_dtypes(engine.norms, parts)
    for (param, record, grad, own), dtype in zip(parts, dtypes, strict=True):
        now, stays = param.record, record.is_cut_like(param.record)
        change = partial(recut, record=record, piece=now.piece, stays=stays)
        for state in own.values():
            if isinstance(state, Guarded):  # stays the same object, which rows may follow
                made = param.as_state(change(state.to_local()).clone())
                with no_guard():
                    state.data, state.record = made.data, made.record  # type: ignore[attr-defined]
        if dtype is not None:
            empty = torch.zeros(0, dtype=dtype, device=param.device)
            _show_gradient(param, shown.get(id(param)), change(empty if grad is None else grad))
    del old  # alive until here, because its records gather resharded values
    return engine


Part = tuple[ShardedParameter, ShardRecord, torch.Tensor | None, dict[str, Any]]
_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _gradient_dtypes(norms: GradientNorms, parts: Sequence[Part]) -> list[torch.dtype | None]:
    """The dtype of each gradient that is resharded; None: there is none to reshard.

    A collective, because a rank without elements may have kept or left out a gradient alone.

    Args:
        norms: Norms of the new engine, whose transport sums over all ranks.
        parts: Parameters, each with its record, gradient and states under the old engine.

    Raises:
        EngineError: Ranks would gather different states or gradients.
    """
    counts: list[float] = []
    own_dtypes: list[torch.dtype | None] = []
    for _, record, grad, own in parts:
        num_states = sum(isinstance(state, Guarded) for state in own.values())
        own_dtypes.append(None if grad is None else grad.dtype)
        code, decides = _DTYPES.index(own_dtypes[-1]), record.piece.numel > 0
        counts += [num_states, -num_states, code * decides, decides and not code]
    stay = [record.is_cut_like(param.record) for param, record, *_ in parts]
    if all(stay):
        return own_dtypes
    rows = norms.maxima(from_host(counts, norms.device), "states to shard again").view(-1, 4)
    found: list[torch.dtype | None] = []
    for (param, *_), stays, dtype, row in zip(parts, stay, own_dtypes, rows.tolist(), strict=True):
        most, least, code, lacks = row
        if not stays and (most != -least or (code and lacks)):
            raise EngineError(
                f"{clean_name(param.record.piece.name)}: expected every rank to have its optimizer "
                "states and its gradient, because the parameter is sharded again (after a change "
                "of requires_grad, a dtype or a parameter); some ranks have none. Give the "
                "optimizer of each rank all parameters, also those without elements, and step and "
                "drop gradients on all ranks."
            )
        found.append(dtype if stays else _DTYPES[int(code)])
    return found


def _show_gradient(param: ShardedParameter, shown: Any, local: torch.Tensor) -> None:
    with no_guard():
        if shown is None:  # frozen: the plan has no memory for its gradient
            shown = param.as_state(torch.empty_like(local, dtype=param.dtype))
        shown.copy_(local.view(shown.shape))
        param.grad = shown


def recut(local: torch.Tensor, record: ShardRecord, piece: Slice, *, stays: bool) -> torch.Tensor:
    """Returns (n_local,) values in the range of `piece`; a collective unless all ranges stay.

    Args:
        local: Values in the range of `record`, or of the whole parameter.
        record: Current range of the values.
        piece: New range.
        stays: Whether the range of every rank stays, which is equal on all ranks: this rank's own
            may stay where others change.
    """
    local = _own_part(local, record.piece)
    if stays:
        return local
    return record.gather(local).reshape(-1)[piece.start : piece.stop]


def _own_part(local: torch.Tensor, piece: Slice) -> torch.Tensor:
    """(n_local,): values in the range of a piece, also of `p.data = whole`.

    Every rank cuts a whole value, because the one that has all elements cannot recognize it.
    """
    shape, whole = tuple(local.shape), torch.Size(piece.shape)
    if local.numel() != whole.numel():
        return local.reshape(-1)
    flat = (whole.numel(),)  # its shard, viewed
    if shape not in (whole, flat, (*flat, *(1 for _ in whole[1:]))):
        raise EngineError(
            f"{clean_name(piece.name)}: expected data of shape {tuple(whole)} (p.data = ...), "
            f"got {shape}. Give it the parameter's shape."
        )
    return local.reshape(-1)[piece.start : piece.stop]


def shard_values(params: Mapping[str, nn.Parameter], plan: Plan, rank: int) -> Local:
    """Values of the existing shards, resharded for the plan.

    Args:
        params: The model's parameters, by name.
        plan: The new plan, with parameters under their first names.
        rank: This rank.
    """
    found: Local = {}
    homes = {
        at.name: (group.layout.holders(at), unit.mesh.replicate * unit.mesh.inner)
        for unit in plan.units
        for group in unit.groups
        for at in group.layout.placements
    }
    for piece in plan.view(rank).all_slices():
        param, (holders, copies) = params[piece.name], homes[piece.name]
        if isinstance(param, ShardedParameter):
            record = param.record
            stays = holders == record.holders and (record.cut or copies == record.copies)
            found[piece.name] = recut(param.to_local(), record, piece, stays=bool(stays)).clone()
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


# ---- devices and initial values


def place(root: nn.Module, modules: list[nn.Module], device_id: Any) -> torch.device:
    """Returns the device of a unit and moves its modules there.

    Raises:
        MisuseValueError: The parameters are on another device of the same kind.
    """
    device = _device_of(device_id)
    have = next((p.device for p in root.parameters() if not p.is_meta), None)
    if device is None:
        return have or default_device()
    if have is not None and have.type == device.type and have != device:
        raise MisuseValueError(
            f"Inconsistent compute device and `device_id` on rank {own_rank()}: {have} vs {device}"
        )
    if have is not None and have != device:
        for module in modules:
            module._apply(
                lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False
            )
    return device


def _device_of(device_id: Any) -> torch.device | None:
    if device_id is None:
        return None
    if not torch.accelerator.is_available():
        return torch.device("cpu")  # scripts that ask for cuda on a machine without it
    device = torch.device(device_id)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def materialize(
    modules: list[nn.Module], device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Materializes modules on meta with `param_init_fn` or `reset_parameters`.

    Raises:
        MisuseValueError: `init` is not callable, or a module has no reset_parameters.
    """
    if init is not None and not callable(init):
        raise MisuseValueError(f"Expected {init} to be callable but got {type(init)}")
    for module in modules:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            continue
        if init is not None:
            init(module)
            continue
        module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise MisuseValueError(
                f"{type(module).__name__} on meta: expected reset_parameters() or param_init_fn; "
                "got neither. Pass param_init_fn."
            )
        with torch.no_grad():
            reset()


def copy_first_values(modules: list[nn.Module], ignored: set[int]) -> None:
    """Copies the values of rank 0 to all ranks, for `sync_module_states`. A collective."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in ignored:
                tensors[id(tensor)] = tensor.detach()
    copy_from_first(list(tensors.values()), [range(topology().world_size)])
