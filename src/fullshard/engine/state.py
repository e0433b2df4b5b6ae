"""The state of a sharded model: loading, unsharded blocks, contents of a save.

A save writes this rank's part of the model and its optimizer, tensor by tensor:

    model       slices of parameters, from the flat shards; whole buffers and ignored parameters
    optimizer   states with as many elements as the slice: sliced like the parameter
                scalars (a step count): equal on every rank
                states of an owner (fs.owned): whole tensors of any shape, and scalars
                anything else (factors, block scales): private to one rank, opaque

Ranks with the same elements take turns by unit, so that each writes a share.

Names of safetensors: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.cuts import Cut
from fullshard.engine.engine import Engine, close_interrupted, engine_of
from fullshard.engine.norms import Count, sample_hash
from fullshard.engine.owned import OwnedOptimizer, owns_states
from fullshard.engine.parameter import Guarded, ShardedParameter, ShardedTensor
from fullshard.engine.placing import shard_shape
from fullshard.engine.record import before_read
from fullshard.engine.unit import Member, Unit, alive
from fullshard.errors import CheckpointError, EngineError, ShardedTensorError


def num_parameters(model: nn.Module) -> int:
    """Returns the number of parameters of the full model, tied ones once, sharded or not."""
    return sum(map(numel_of, model.parameters()))


def numel_of(param: torch.Tensor) -> int:
    """Elements of a parameter of the full model."""
    return math.prod(param.record.shape if isinstance(param, ShardedParameter) else param.shape)


# Tensors of state dicts that have a storage of their own, by address, dtype and shape.
_Owned = MutableMapping[tuple[Any, ...], torch.Tensor]


def hook_loading(model: nn.Module, engine: Engine) -> list[Any]:
    """Make `load_state_dict` accept whole tensors on every rank, at any level of the model.

    It and `state_dict` also close a forward that was interrupted. See `_own_storages`.
    """
    members: dict[int, dict[str, Member]] = {}
    for unit in engine.units:
        for swap in unit.swaps:
            members.setdefault(id(swap.module), {})[swap.name] = swap.member
    found = [(module, members[id(module)]) for module in model.modules() if id(module) in members]
    weak = weakref.ref(engine)

    def close(*_: Any) -> None:
        close_interrupted(alive(weak, "state_dict"))

    handles = [model.register_load_state_dict_pre_hook(_refuse_empty)]
    handles += [m.register_load_state_dict_pre_hook(close) for m, _ in found]
    handles += [m.register_state_dict_pre_hook(close) for m, _ in found]
    owned: _Owned = weakref.WeakValueDictionary()
    for module, own in found:
        handles.append(module.register_state_dict_post_hook(partial(_own_storages, own, owned)))
    slices = [m.register_load_state_dict_pre_hook(partial(_slice_state, own)) for m, own in found]
    return handles + slices


def _refuse_empty(_model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    if not prefix and not state_dict:
        raise ShardedTensorError(
            "load_state_dict: expected whole tensors on every rank; got an empty dict, as "
            "fs.full_state_dict returns on all ranks except rank 0. Call fs.load_full_state(model, "
            "state, from_rank0=True), or fs.full_state_dict(model, rank0_only=False)."
        )


def _own_storages(
    members: dict[str, Member],
    owned: _Owned,
    _module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    """Give whole parameters in a state dict storages of their own, at the same addresses.

    They are views of one buffer. Accelerate takes views of one storage for tied weights and drops
    all but one; safetensors refuses them; torch.save writes the whole buffer.
    """
    with no_guard():
        for name, member in members.items():
            value: Any = state_dict.get(prefix + name)
            is_cut = issubclass(type(value), Guarded) and value.record.is_cut
            is_view = type(value) in (torch.Tensor, ShardedTensor) and member.cut is None
            if is_cut or not is_view or not value.numel() or not value.is_contiguous():
                continue
            address, start = value.data_ptr(), value.storage_offset() * value.itemsize
            tied = owned.get(key := (address, value.dtype, value.shape))
            if tied is not None and tied.data_ptr() == address:
                value.data = tied.data
                continue
            memory = value.untyped_storage()[start : start + value.nbytes]
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            value.data = empty.set_(memory, 0, value.shape, value.stride())
            owned[key] = value


def _slice_state(
    members: dict[str, Member],
    _module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *strict_missing_unexpected_errors: Any,
) -> None:
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    if swaps or local_metadata.get("assign_to_params_buffers"):
        option = "torch.__future__.set_swap_module_params_on_conversion" if swaps else "assign"
        raise ShardedTensorError(
            f"load_state_dict with {option}: expected False; got True, which would replace the "
            "shards by whole parameters. Leave it out, so that every rank copies its part."
        )
    for name, member in members.items():
        key, record = prefix + name, member.param.record
        is_shard = isinstance(member.param, Guarded)
        value: Any = state_dict.get(key)
        record.norms.counts[Count.LOADS] += value is not None
        if is_shard and isinstance(value, Guarded) and value.record.is_cut_like(record):
            continue
        if hasattr(value, "full_tensor"):  # a DTensor, a shard of another model
            value = state_dict[key] = value.full_tensor()
        if not isinstance(value, torch.Tensor):
            continue
        if not value.is_meta and record.norms.transport.axes.mesh.world_size > 1:
            told = zlib.crc32(f"{key} {sample_hash(value)}".encode())
            record.norms.counts[Count.VALUES] += told
        cut, shape = member.cut, tuple(value.shape)
        if not is_shard:  # inside fs.unsharded
            if cut is not None and shape == cut.shape:
                state_dict[key] = cut.show(cut.local_of(value))
        elif shape in (record.shape, record.shape or (1,)):  # torch takes (1,) for a scalar, too
            local = record.local_of(value)
            with no_guard():
                state_dict[key] = local.view(member.param.shape)
        else:  # torch would compare it with the shard's shape
            strict_missing_unexpected_errors[-1].append(
                f"size mismatch for {key}: copying a param with shape "
                f"{shape} from checkpoint, the whole shape in the sharded model is {record.shape}."
            )
            state_dict[key] = member.param.detach()


@contextmanager
def unsharded(
    model: nn.Module,
    *,
    writeback: bool = True,
    units: Sequence[Unit] | None = None,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context with whole parameters in the master dtype. A collective on entry and exit.

    Parameters sharded over other axes are the DTensors from before `fs.shard`.

    Args:
        model: A sharded model.
        writeback: Whether to keep modifications; each rank keeps its own part.
        units: Units to gather; those that are whole already do not change. None: all.
        with_grads: Whether gradients are whole too; only without other axes.
    """
    engine = engine_of(model)
    if engine.unsharded and units is None:
        raise EngineError("fs.unsharded: expected one block at a time; another is already open.")
    if any(unit.swapped for unit in engine.units):
        raise EngineError("fs.unsharded: expected no forward or backward under way; one is.")
    if not engine.unsharded:
        engine.check_params()
    asked = engine.units if units is None else units
    cut = [u for u in asked if not u.members or isinstance(u.members[0].param, ShardedParameter)]
    opened = [_Whole(unit, with_grads=with_grads) for unit in cut]
    engine.unsharded += 1
    try:
        yield
    finally:
        engine.unsharded -= 1
        unfit = _keep_assigned(opened) if writeback else []
        if writeback:
            engine.home.before_write()
        for whole in opened:
            whole.close(engine, writeback=writeback)
    if unfit:
        raise EngineError(
            f"fs.unsharded: expected data of the parameter's shape and dtype (p.data = ...); got "
            f"{unfit[0]}. Its old values were kept. Give it the same shape and dtype."
        )
    if graded := [name for whole in opened for name in whole.graded]:
        raise EngineError(
            "fs.unsharded: expected no new gradient (p.grad = ...), as optimizers step shards; got "
            f"one of {graded[0]}, which was dropped. Add its part to p.grad outside of the block; "
            "fs.sharding(p) says which."
        )


class _Whole:
    """A unit whose modules show whole parameters."""

    def __init__(self, unit: Unit, *, with_grads: bool) -> None:
        self.unit = unit
        self.buffers: list[torch.Tensor] = []
        self.graded: list[str] = []  # parameters that got whole gradients inside
        self.placed: dict[int, Any] = {}  # objects that contain the shards of DTensors
        self.grads = _whole_grads(unit) if with_grads else {}
        self.before: dict[int, Any] = {}  # `p.grad`
        for group in unit.groups:
            full = group.gather_master()
            self.buffers.append(full)
            for member in group.members:
                if member.cut is not None:
                    shown = member.cut.show(member.view(full))
                    with no_guard():
                        shard = nn.Parameter(shown, member.param.requires_grad)
                        torch.utils.swap_tensors(member.param, shard)
                    vars(member.param)["record"] = vars(shard)["record"]
                    self.placed[id(member)] = shard
                    continue
                with no_guard():
                    if with_grads:
                        member.param.grad = None  # its shape differs from the parameter's now
                    self.before[id(member)] = member.param.grad
                member.param.__class__ = nn.Parameter  # type: ignore[assignment]
                member.param.data = member.view(full)
                if with_grads:
                    member.param.grad = self.grads.get(id(member))

    def close(self, engine: Engine, *, writeback: bool) -> None:
        """Show the shards again."""
        whole = self.unit.plan.mesh.shard == 1
        for buffer, group in zip(self.buffers, self.unit.groups, strict=True):
            if writeback:
                group.master.copy_(buffer.chunk(group.plan.layout.num_parts)[self.unit.shard_index])
            for member in group.members:
                if member.cut is not None:
                    placed = self.placed[id(member)]
                    torch.utils.swap_tensors(member.param, placed)
                    member.param.requires_grad_(placed.requires_grad)
                    if placed.grad is not None:
                        self.graded.append(member.piece.name)
                    continue
                held, before = id(member) in self.grads, self.before[id(member)]
                shape = shard_shape(member.piece, whole=whole)
                with no_guard():
                    grad, member.param.grad = member.param.grad, None
                    member.param.data = member.local(group.master).view(shape)
                    member.param.grad = before
                member.param.__class__ = ShardedParameter
                if held and (grad is not None or not writeback):
                    self._put_back(engine, member, grad if writeback else None)
                elif not held and grad is not before:  # assigned again, which drops deferred ones
                    fits = whole or issubclass(type(grad), Guarded | None)
                    member.param.grad = grad if fits else None
                    self.graded += [] if fits else [member.piece.name]

    def _put_back(self, engine: Engine, member: Member, grad: torch.Tensor | None) -> None:
        shown: Any = member.grad
        if grad is not None:
            local = grad.reshape(-1)[member.piece.start : member.piece.stop]
            shown.to_local().copy_(local.view(shown.shape))
            engine.norms.mark_changed()
        with no_guard():
            member.param.grad = shown


def _keep_assigned(opened: Sequence[_Whole]) -> list[str]:
    """Copy data that was assigned (`p.data = ...`) into the buffers; returns what does not fit."""
    buffers = {x.untyped_storage().data_ptr() for whole in opened for x in whole.buffers}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    unfit: list[str] = []
    for whole in opened:
        for buffer, group in zip(whole.buffers, whole.unit.groups, strict=True):
            for member in group.members:
                shown: Any = member.param.detach()
                value = shown if member.cut is None else shown.to_local()
                place = member.view(buffer)
                if (value.shape, value.dtype) != (place.shape, place.dtype):
                    what = f"{tuple(value.shape)} of {value.dtype}"
                    unfit.append(f"{what} for {member.piece.name} of {tuple(place.shape)}")
                elif not value.is_set_to(place):
                    is_among = value.untyped_storage().data_ptr() in buffers  # of another one
                    kept.append((place, value.clone() if is_among else value))
    for place, value in kept:
        place.copy_(value)
    return unfit


def _whole_grads(unit: Unit) -> dict[int, torch.Tensor]:
    with no_guard():
        grads = [(member, member.param.grad) for member in unit.trained_members]
    return {id(member): grad.full_tensor() for member, grad in grads if grad is not None}  # type: ignore[attr-defined]


# ---- contents of a save

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, eq=False, slots=True)
class LocalPart:
    """A rank's part of one tensor.

    Attributes:
        names: (parameter or buffer,) or (parameter, state).
        shape: Global shape.
        start: First element of this rank, in row-major order.
        stop: One past the last.
        local: (stop - start,), shares memory with the model or the optimizer.
        writes: Whether this rank saves these elements.
        opaque: Whether only this rank can interpret it; its shape is then its own.
        whole: Whether it is a buffer, an ignored parameter or an owner's state, not a slice of a
            parameter; `local` may be a copy.
        cut: The cut over other axes, if it is not a contiguous range; `start` and `stop` are then
            elements of the local tensor.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    local: torch.Tensor
    writes: bool = True
    opaque: bool = False
    whole: bool = False
    cut: Cut | None = None

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""
        return dtype_name(self.local.dtype, "/".join(self.names))


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        kind: Name of the class.
        tensors: The states that are tensors.
        scalars: Parameter -> state -> a number, or a tensor of one element.
        groups: Settings of each group, with its parameters' names under "params".
    """

    kind: str
    tensors: list[LocalPart] = field(default_factory=list[LocalPart])
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def model_tensors(model: nn.Module) -> list[LocalPart]:
    """Returns every parameter and persistent buffer, tied ones once.

    Raises:
        EngineError: Parameters are whole (inside `fs.unsharded`), or have other names.
    """
    engine = engine_of(model)
    shown = {name for name, _ in model.named_parameters()}
    if engine.unsharded:
        raise EngineError("saving inside fs.unsharded: expected shards. Save outside of the block.")
    engine.check_params()
    before_read([member.param for member in engine.members])
    parts: list[LocalPart] = []
    for member in engine.members:
        piece = member.piece
        if piece.name not in shown:
            raise EngineError(
                f"{type(model).__name__}: expected {piece.name}, the name at the time of sharding; "
                "a wrapper changed it. Pass the model that was sharded; save a model of FSDP1's "
                "interface by FSDP.state_dict_type."
            )
        first = 0 if member.cut is None else member.cut.first
        span = (piece.start + (first or 0), piece.stop + (first or 0))
        shape, local = member.param.record.shape, member.local(member.group.master)
        cut, writes = member.cut if first is None else None, _writes(member, engine.rank)
        parts.append(LocalPart((piece.name,), shape, *span, local, writes, cut=cut))
    return parts + list(_others(model, engine))


def _writes(member: Member, rank: int) -> bool:
    """Whether this rank saves its elements. Replicas take turns; copies on other axes do not."""
    plan, cut = member.group.unit.plan, member.cut
    ranks = (rank,) if cut is None else cut.ranks if cut.is_first_copy else ()
    is_first = any(plan.mesh.place(other) % plan.mesh.inner == 0 for other in ranks)
    return is_first and plan.index % plan.mesh.replicate == plan.mesh.coordinates(rank)[0]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The first name of each tied parameter, by its other names."""
    groups = engine_of(model).groups
    return {n: names[0] for group in groups for names in group.plan.names for n in names[1:]}


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Results of `get_extra_state`, by key of the state dict."""
    items = model.state_dict().items()
    return {name: value for name, value in items if not isinstance(value, torch.Tensor)}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """Returns the state of a sharded model's optimizer by parameter names.

    Raises:
        CheckpointError: A parameter is not part of the model, or a state is neither tensor nor
            number.
    """
    held = {item.names[0]: item for item in model_tensors(model)}
    names = param_names(model, optimizer)
    found = OptimizerState(kind_of(optimizer))
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found.groups.append({**settings, "params": [names[id(p)] for p in group["params"]]})
    for param, states in optimizer.state.items():
        if id(param) not in names:
            raise CheckpointError(
                f"optimizer state {param!r}: expected states of the model's parameters only; this "
                f"is not one of them. {type(optimizer).__name__} cannot be saved by fs.save."
            )
        name = names[id(param)]
        for key, value in states.items():
            here = None if isinstance(value, Guarded) else owns_states(optimizer, param)
            cut = None if here is None else Cut.of(param)  # its owners all have the whole
            of = replace(held[name], writes=False) if cut and cut.part else held[name]
            _sort_in(found, of, (name, key), value, whole=here is not None)
    return found


def kind_of(optimizer: Optimizer) -> str:
    """Class name of an optimizer; for `fs.owned`, the names of the optimizers in it."""
    return optimizer.kind if isinstance(optimizer, OwnedOptimizer) else type(optimizer).__name__


def join_scalars(all_ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Join the scalar states of all owners."""
    joined: dict[str, dict[str, Any]] = {}
    for scalars in all_ranks:
        for name, values in scalars.items():
            joined.setdefault(name, {}).update(values)
    return joined


def param_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """First names of an optimizer's parameters, by identity.

    Raises:
        CheckpointError: A parameter is not part of the model, or it is no optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise CheckpointError(
            f"optimizer: expected an optimizer of torch, got {type(optimizer).__name__}. Pass "
            "other values by name: fs.save(folder, model, optimizer, step=100, epoch=2)."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    names |= {id(m.param): m.piece.name for m in engine_of(model).members}  # also in a forward
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                shape = tuple(param.shape)
                raise CheckpointError(
                    f"optimizer: expected parameters of the model that is saved; got one of shape "
                    f"{shape} that is not among them. Save it with its own model."
                )
    return names


def restore_optimizer(model: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
    """Restore an optimizer's saved states and settings.

    Args:
        model: A sharded model.
        optimizer: Optimizer of the model, with the saved groups of parameters.
        saved: The saved state, with `local` of `tensors` filled for this rank.

    Raises:
        CheckpointError: The groups have other parameters. Nothing is changed.
    """
    settings = matching_settings(model, optimizer, saved.groups)
    names = param_names(model, optimizer)
    params = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    elsewhere = {name for name, param in params.items() if owns_states(optimizer, param) is False}
    states: dict[str, dict[str, Any]] = {
        name: dict(s) for name, s in saved.scalars.items() if name not in elsewhere
    }
    for held in saved.tensors:
        name, key = held.names
        param = params[name]
        local = held.local
        sliced = isinstance(param, ShardedParameter) and not (held.opaque or held.whole)
        shown = param.as_state(local) if sliced else local.view(held.shape)
        states.setdefault(name, {})[key] = shown
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            state = states.get(names[id(param)])
            if state is not None:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (on_device or value.dim()):
                        state[key] = value.to(param.device)
                optimizer.state[param] = state


def dtype_name(dtype: object, where: str) -> str:
    """Returns the name of a dtype in safetensors.

    Raises:
        CheckpointError: safetensors does not support the dtype.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{where}: expected a dtype among {', '.join(map(str, DTYPE_NAMES))}; got {dtype}. "
            "Convert it before saving."
        )
    return DTYPE_NAMES[dtype]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1)
    assert flat.is_contiguous(), tensor.shape
    assert flat.device.type == "cpu", tensor.device
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def _others(model: nn.Module, engine: Engine) -> Iterator[LocalPart]:
    """Buffers and ignored parameters, whole, saved by the first rank."""
    cut = {name for group in engine.groups for names in group.plan.names for name in names}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if name in cut or not isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        flat = value.detach().reshape(-1)
        writes = engine.rank == 0
        yield LocalPart((name,), tuple(value.shape), 0, flat.numel(), flat, writes, whole=True)


def _sort_in(
    found: OptimizerState, of: LocalPart, names: tuple[str, str], value: Any, *, whole: bool
) -> None:
    """Add one state to the optimizer's saved state.

    Args:
        found: The optimizer's saved state.
        of: Parameter of the state.
        names: Names of the parameter and the state.
        value: Value of the state.
        whole: Whether it is a whole state of an owner.
    """
    name, key = names
    if isinstance(value, bool | int | float):
        found.scalars.setdefault(name, {})[key] = value
        return
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"optimizer state {key!r} of {name}: expected a tensor or a number; got "
            f"{type(value).__name__}, which needs a pickle. Use another optimizer."
        )
    with no_guard():
        plain = value.detach().as_subclass(torch.Tensor)
    is_shard = isinstance(value, Guarded)
    is_one = plain.dim() == 0 or (of.local.numel() != 1 and not whole)
    if not is_shard and plain.numel() == 1 and is_one:
        found.scalars.setdefault(name, {})[key] = plain
        return
    count, flat, shape = of.stop - of.start, plain.reshape(-1), tuple(plain.shape)
    is_all = count == math.prod(of.shape)
    sliced = flat.numel() == count and (is_shard or not is_all or shape == of.shape)
    if whole:
        found.tensors.append(LocalPart(names, shape, 0, flat.numel(), flat, of.writes, whole=True))
    elif sliced:
        found.tensors.append(replace(of, names=names, local=flat, whole=False))
    elif of.cut is not None:
        raise CheckpointError(
            f"optimizer state {key!r} of {name}: expected one element for each of the parameter, "
            f"which {of.cut.describe()} cuts along a later dimension; got {shape}. Use another "
            "optimizer beside tensor parallelism."
        )
    else:
        found.tensors.append(LocalPart(names, shape, of.start, of.stop, flat, opaque=True))


def matching_settings(
    model: nn.Module, optimizer: Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved settings of each of an optimizer's groups.

    Raises:
        CheckpointError: The saved groups have other parameters, or no learning rate.
    """
    names = param_names(model, optimizer)
    by_params = {frozenset(group["params"]): group for group in saved}
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        params = [names[id(p)] for p in group["params"]]
        if frozenset(params) not in by_params or len(saved) != len(optimizer.param_groups):
            raise CheckpointError(
                "optimizer: expected the groups of the checkpoint, which have "
                f"{', '.join(str(len(other['params'])) for other in saved)} parameters; got "
                f"{', '.join(str(len(g['params'])) for g in optimizer.param_groups)}, one with "
                f"{', '.join(params[:3])}{', ...' if len(params) > 3 else ''}. Build the optimizer "
                "with the same groups (a run's freeze), or load the model without it."
            )
        settings = {k: v for k, v in by_params[frozenset(params)].items() if k != "params"}
        if settings and "lr" in group and "lr" not in settings:  # optax saves no settings
            raise CheckpointError(
                f"optimizer: expected lr in the saved settings of each group; got only "
                f"{', '.join(settings)}. Copy the checkpoint again, or load the model without the "
                "optimizer."
            )
        found.append(settings)
    return found
