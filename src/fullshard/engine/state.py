"""Whole tensors out of shards and into them: full state dicts, loading, unsharded blocks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.parameter import ShardedParameter, _Guarded
from fullshard.engine.presentation import shard_shape
from fullshard.engine.unit import Member, Unit
from fullshard.errors import EngineError, ShardedTensorError


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, rank0_only: bool = True
) -> dict[str, torch.Tensor]:
    """The keys of the unsharded `state_dict()` with whole tensors on the CPU. A collective.

    Units are gathered one after another, so that no rank ever holds more than one unit beside the
    result, and with `rank0_only` only rank 0 holds that.

    Args:
        model: Sharded.
        dtype: Dtype of floating point tensors; None keeps the master dtype.
        rank0_only: Other ranks get {}.
    """
    engine = engine_of(model)
    if engine.unsharded:
        raise EngineError(
            "fs.full_state_dict inside fs.unsharded: expected shards; the parameters are whole "
            "here. Call model.state_dict()."
        )
    engine.check_params()
    keep = not rank0_only or engine.rank == 0
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in whole_params(engine):
        if keep:
            whole[name] = _to_cpu(tensor, dtype)
    if not keep:
        return {}
    result = {}
    for name, value in model.state_dict().items():
        is_shard = isinstance(value, _Guarded)
        result[name] = whole[value.record.piece.name] if is_shard else _to_cpu(value, dtype)
    return result


def whole_params(
    engine: Engine, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's first name and whole value, a view that is to be copied at once.

    A collective: every rank takes all of them. One flat buffer is whole at a time.

    Args:
        engine: Engine of the model.
        wanted: First names; None: all.
    """
    for unit in engine.units:
        for group in unit.groups:
            members = [m for m in group.members if wanted is None or m.piece.name in wanted]
            if not members:
                continue
            full = engine.gather_group(unit, group)
            for member in members:
                stop = member.offset + member.numel
                yield member.piece.name, full[member.offset : stop].view(member.piece.shape)


def _to_cpu(tensor: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(tensor, torch.Tensor):  # a module's get_extra_state
        return tensor
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wanted, copy=True)


def hook_loading(model: nn.Module, engine: Engine) -> list[Any]:
    """Let `load_state_dict` take whole tensors on every rank, at any level of the model."""
    members: dict[int, dict[str, Member]] = {}
    for unit in engine.units:
        for swap in unit.swaps:
            members.setdefault(id(swap.module), {})[swap.name] = swap.member
    return [
        module.register_load_state_dict_pre_hook(partial(_slice_state, members[id(module)]))
        for module in model.modules()
        if id(module) in members
    ]


def _slice_state(
    members: dict[str, Member],
    _module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *strict_missing_unexpected_errors: Any,
) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise ShardedTensorError(
            "load_state_dict(assign=True): expected assign=False; assigning would replace the "
            "shards by whole parameters. Leave assign out: every rank copies its own part."
        )
    for name, member in members.items():
        value = state_dict.get(prefix + name)
        inside_unsharded = not isinstance(member.param, _Guarded)
        gather = getattr(value, "full_tensor", None)
        is_cut_alike = (
            isinstance(value, _Guarded)
            and not inside_unsharded
            and value.record.is_cut_like(member.param.record)  # pyright: ignore
        )
        if gather is not None and not is_cut_alike:  # a DTensor, a shard of another model
            value = state_dict[prefix + name] = gather()
        if not isinstance(value, torch.Tensor) or is_cut_alike or inside_unsharded:
            continue
        piece = member.piece
        if tuple(value.shape) == tuple(piece.shape):
            local = value.detach().reshape(-1)[piece.start : piece.stop]
            with no_guard():
                state_dict[prefix + name] = local.view(member.param.shape)
        else:  # torch would compare with the shard's shape
            strict_missing_unexpected_errors[-1].append(
                f"size mismatch for {prefix + name}: copying a param with shape "
                f"{tuple(value.shape)} from checkpoint, the whole shape in the sharded model is "
                f"{tuple(piece.shape)}."
            )
            state_dict[prefix + name] = member.param.detach()


@contextmanager
def unsharded(
    model: nn.Module,
    *,
    writeback: bool = True,
    units: Sequence[Unit] | None = None,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, every parameter is whole, in its master dtype. A collective at both ends.

    Args:
        model: Sharded.
        writeback: Keep what was written into the parameters; each rank keeps its own part.
        units: Only these; those that are whole already stay as they are. None: all.
        with_grads: Gradients are whole too.
    """
    engine = engine_of(model)
    if engine.unsharded and units is None:
        raise EngineError("fs.unsharded: expected one block at a time; it is open already.")
    if any(unit.swapped for unit in engine.units):
        raise EngineError("fs.unsharded: expected no forward or backward under way; one is.")
    if not engine.unsharded:
        engine.check_params()
    asked = engine.units if units is None else units
    opened = [_Whole(engine, unit, with_grads) for unit in asked if not _is_whole(unit)]
    engine.unsharded += 1
    try:
        yield
    finally:
        engine.unsharded -= 1
        if writeback:
            engine.home.before_write()
        for whole in opened:
            whole.close(engine, writeback=writeback)


def _is_whole(unit: Unit) -> bool:
    members = [member for group in unit.groups for member in group.members]
    return bool(members) and not isinstance(members[0].param, ShardedParameter)


class _Whole:
    """A unit whose parameters are shown whole."""

    def __init__(self, engine: Engine, unit: Unit, with_grads: bool) -> None:  # noqa: FBT001
        self.unit = unit
        self.buffers: list[torch.Tensor] = []
        self.grads = _whole_grads(engine, unit) if with_grads else {}
        for group in unit.groups:
            full = engine.gather_group(unit, group)
            self.buffers.append(full)
            for member in group.members:
                stop = member.offset + member.numel
                if with_grads:
                    with no_guard():
                        member.param.grad = None  # its shape is not the parameter's now
                member.param.__class__ = nn.Parameter  # type: ignore[assignment]
                member.param.data = full[member.offset : stop].view(member.piece.shape)
                if with_grads:
                    member.param.grad = self.grads.get(id(member))

    def close(self, engine: Engine, *, writeback: bool) -> None:
        """Show the shards again."""
        whole = self.unit.plan.mesh.shard == 1
        for buffer, group in zip(self.buffers, self.unit.groups, strict=True):
            if writeback:
                group.master.copy_(buffer.chunk(group.plan.layout.num_parts)[self.unit.part])
            for member in group.members:
                piece = member.piece
                local = group.master[piece.offset : piece.offset + piece.numel]
                held = id(member) in self.grads
                grad = member.param.grad if held else None
                if held:
                    member.param.grad = None
                member.param.data = local.view(shard_shape(piece, whole=whole))
                member.param.__class__ = ShardedParameter
                if held and (grad is not None or not writeback):
                    self._put_back(engine, member, grad if writeback else None)

    def _put_back(self, engine: Engine, member: Member, grad: torch.Tensor | None) -> None:
        shown: Any = member.grad
        if grad is not None:
            local = grad.reshape(-1)[member.piece.start : member.piece.stop]
            shown.to_local().copy_(local.view(shown.shape))
            engine.norms.mark_changed()
        with no_guard():
            member.param.grad = shown


def _whole_grads(engine: Engine, unit: Unit) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for group in unit.trained:
        for member in group.members:
            with no_guard():
                grad: Any = member.param.grad
                local = None if grad is None else grad.to_local().reshape(-1)
            if local is not None:
                found[id(member)] = engine.gather_member(unit, group, member, local)
    return found
