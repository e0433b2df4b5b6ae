"""Whole tensors out of shards and into them: full state dicts, loading, unsharded blocks."""

from __future__ import annotations

from collections.abc import Iterator
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
        dtype: Of floating point tensors; None keeps the master dtype.
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
    for unit in engine.units:
        for group in unit.groups:
            full = engine.gather_group(unit, group)
            if not keep:
                continue
            for member in group.members:
                stop = member.offset + member.numel
                tensor = full[member.offset : stop].view(member.piece.shape)
                whole[member.piece.name] = _to_cpu(tensor, dtype)
    if not keep:
        return {}
    result = {}
    for name, value in model.state_dict().items():
        is_shard = isinstance(value, _Guarded)
        result[name] = whole[value.record.piece.name] if is_shard else _to_cpu(value, dtype)
    return result


def _to_cpu(tensor: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(tensor, torch.Tensor):  # a module's get_extra_state
        return tensor
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wanted, copy=True)


def hook_loading(model: nn.Module, engine: Engine) -> None:
    """Let `load_state_dict` take whole tensors on every rank, at any level of the model."""
    members: dict[int, dict[str, Member]] = {}
    for unit in engine.units:
        for swap in unit.swaps:
            members.setdefault(id(swap.module), {})[swap.name] = swap.member
    for module in model.modules():
        if id(module) in members:
            module.register_load_state_dict_pre_hook(partial(_slice_state, members[id(module)]))


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
        if not isinstance(value, torch.Tensor) or isinstance(value, _Guarded) or inside_unsharded:
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
def unsharded(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, every parameter is whole, in its master dtype. A collective at both ends.

    Args:
        model: Sharded.
        writeback: Keep what was written into the parameters; each rank keeps its own part.
    """
    engine = engine_of(model)
    if engine.unsharded:
        raise EngineError("fs.unsharded: expected one block at a time; it is open already.")
    if any(unit.swapped for unit in engine.units):
        raise EngineError("fs.unsharded: expected no forward or backward under way; one is.")
    engine.check_params()
    whole = [_show_whole(engine, unit) for unit in engine.units]
    engine.unsharded = True
    try:
        yield
    finally:
        engine.unsharded = False
        if writeback:
            engine.home.before_write()
        for unit, buffers in zip(engine.units, whole, strict=True):
            _show_shards(unit, buffers if writeback else None)


def _show_whole(engine: Engine, unit: Unit) -> list[torch.Tensor]:
    buffers = []
    for group in unit.groups:
        full = engine.gather_group(unit, group)
        buffers.append(full)
        for member in group.members:
            stop = member.offset + member.numel
            member.param.__class__ = nn.Parameter  # type: ignore[assignment]
            member.param.data = full[member.offset : stop].view(member.piece.shape)
    return buffers


def _show_shards(unit: Unit, buffers: list[torch.Tensor] | None) -> None:
    whole = unit.plan.mesh.shard == 1
    for index, group in enumerate(unit.groups):
        if buffers is not None:
            own = buffers[index].chunk(group.plan.layout.num_parts)[unit.part]
            group.master.copy_(own)
        for member in group.members:
            piece = member.piece
            local = group.master[piece.offset : piece.offset + piece.numel]
            member.param.data = local.view(shard_shape(piece, whole=whole))
            member.param.__class__ = ShardedParameter
