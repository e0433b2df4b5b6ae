"""Full states of a model and its optimizer, saved from and loaded by one rank.

They equal those of one process, so `torch.save` and DDP scripts can use them directly.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import nn

from fullshard.config.values import DType, parse
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.optimizers import WATCHED, loaded_state, states_made
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.parameter import Guarded, params_of
from fullshard.engine.state import param_names, tied_names
from fullshard.errors import CheckpointError, EngineError, untrusted
from fullshard.transport.base import torch_dtype
from fullshard.transport.groups import copy_from_first

AT_ONCE = 8  # tensors of rank 0 that other ranks store whole
SMALL = tuple(range(2, 10))  # shape of a tensor on which an optimizer is tried
WHOLE = "Pass model.state_dict() and optimizer.state_dict() of one process."
States = dict[str, Any]
# Whether state dicts contain shards also where the interfaces of FSDP1 and FSDP2 convert them.
AS_SHARDS: ContextVar[bool] = ContextVar("AS_SHARDS", default=False)


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | str | None = None, rank0_only: bool = True
) -> dict[str, torch.Tensor]:
    """Returns the unsharded `state_dict()` with whole tensors on the CPU. A collective.

    Units are gathered one after another. No rank stores more than one unit and the result, which
    with `rank0_only` exists only on rank 0.

    Args:
        model: A sharded model.
        dtype: Dtype of floating point tensors, or its name; None keeps the master dtype.
        rank0_only: Other ranks get {}.

    Raises:
        ConfigError: The dtype is not floating point.
    """
    engine = engine_of(model)
    kind: Any = dtype
    if kind is not None and not getattr(kind, "is_floating_point", False):
        kind = torch_dtype(parse(DType, kind, "fs.full_state_dict: dtype"))
    if engine.unsharded:
        raise EngineError(
            "fs.full_state_dict inside fs.unsharded: expected shards; the parameters are whole "
            "here. Call model.state_dict()."
        )
    engine.check_params()
    keep = not rank0_only or engine.rank == 0
    whole = {name: _to_cpu(tensor, kind) for name, tensor in whole_params(engine) if keep}
    result: dict[str, Any] = {}
    for name, shown in _of_shards(model.state_dict).items():
        # Values that are not aliases of parameters were computed by a hook of the state dict.
        is_changed = isinstance(shown, Guarded) and not params_of(shown)
        value: Any = shown.full_tensor() if is_changed else shown
        shape = value.record.shape_of(value) if isinstance(value, Guarded) else None
        if keep:
            own = None if shape is None else whole[value.record.piece.name].view(shape)
            result[name] = _to_cpu(value, kind) if own is None else own
    return result


def whole_params(
    engine: Engine, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter's first name and whole value, a view that must be copied at once.

    A collective: every rank must consume all. One flat buffer is gathered at a time.

    Args:
        engine: Engine of the model.
        wanted: First names; None: all.
    """
    for group in engine.groups:
        members = [m for m in group.members if wanted is None or m.piece.name in wanted]
        full = group.gather_master() if members else None
        for member in members:
            assert full is not None
            local = member.view(full)
            yield member.piece.name, local if member.cut is None else member.cut.whole_of(local)


def _to_cpu(tensor: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(tensor, torch.Tensor):  # a module's get_extra_state
        return tensor
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wanted, copy=True)


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True
) -> dict[str, Any]:
    """The `state_dict()` that the optimizer would have in one process, on the CPU. A collective.

    Args:
        model: A sharded model.
        optimizer: Elementwise optimizer of its parameters.
        rank0_only: Return {} on all other ranks.
    """
    engine = engine_of(model)
    engine.agree(lambda: param_names(model, optimizer))
    given = engine.agree(lambda: _of_shards(optimizer.state_dict))
    return whole_states(model, given, rank0_only=rank0_only)


def _of_shards(state_dict: Callable[[], States]) -> States:
    """The state dict of a model or optimizer with shards as values. Not a collective."""
    token = AS_SHARDS.set(True)
    try:
        return state_dict()
    finally:
        AS_SHARDS.reset(token)


def whole_states(model: nn.Module, given: States, *, rank0_only: bool = True) -> States:
    """Returns an optimizer's `state_dict()` with full states on the CPU. A collective."""
    engine = engine_of(model)
    keys = engine.all_values([(number, *values) for number, values in given["state"].items()])
    if any(own != keys[0] for own in keys):
        raise EngineError(
            "fs.full_optimizer_state_dict: expected optimizers with the same states in the same "
            "order on every rank; they differ. Give all optimizers the same parameters."
        )
    keeps = engine.rank == 0 or not rank0_only
    states: dict[Any, States] = {}
    for number, values in given["state"].items():
        for key, value in values.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if keeps:
                states.setdefault(number, {})[key] = _to_cpu(whole, None)
    return {**given, "state": states} if keeps else {}


def load_full_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state: dict[str, Any] | None = None,
    *,
    from_rank0: bool = False,
) -> None:
    """Load the state dicts of a model and an optimizer from one process. A collective.

    Args:
        model: A sharded model.
        state: Whole tensors by name; a tied one may be left out.
        optimizer: Optimizer of its parameters, with the groups of the saved one.
        optimizer_state: Whole state dict of the optimizer.
        from_rank0: Rank 0's states are broadcast tensor by tensor; other ranks may give {}.

    Raises:
        CheckpointError: Names or groups differ; nothing was changed.
    """
    engine = engine_of(model)
    given = {"model": state, "optimizer": optimizer_state}
    shown = _of_first(engine, given) if from_rank0 else given
    engine.agree(lambda: _check_model(model, shown["model"]))
    param_of = engine.agree(lambda: _checked_params(optimizer, shown["optimizer"]))
    names = list(shown["model"])
    for at in range(0, len(names), AT_ONCE):
        few = names[at : at + AT_ONCE]
        part = {name: _whole(engine, shown, given, ("model", name)) for name in few}
        model.load_state_dict(part, strict=False)
    if optimizer is None:
        return
    states: dict[Any, States] = {}
    for number, values in shown["optimizer"]["state"].items():
        for key in values:
            value = _whole(engine, shown, given, ("optimizer", "state", number, key))
            if isinstance(value, torch.Tensor):
                value = loaded_state(param_of[number], value)
            states.setdefault(number, {})[key] = value
    optimizer.load_state_dict({**shown["optimizer"], "state": states})
    WATCHED.look(optimizer)


def _of_first(engine: Engine, tree: Any) -> Any:
    """Broadcasts rank 0's states with meta tensors in place of values."""

    def shown() -> bytes:
        with untrusted("fs.load_full_state", "states that can be pickled", advice=WHOLE):
            return pickle.dumps(_without_values(tree))

    return pickle.loads(engine.lead(shown))


def _without_values(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.empty_like(tree, device="meta")
    if isinstance(tree, Mapping):
        return {key: _without_values(value) for key, value in tree.items()}
    return tree


def _whole(engine: Engine, shown: Any, given: Any, path: tuple[Any, ...]) -> Any:
    """Return this rank's value, or rank 0's by broadcast if `shown` is from rank 0."""
    like = reduce(getitem, path, shown)
    if shown is given or not isinstance(like, torch.Tensor):
        return like
    first = engine.rank == 0
    value = reduce(getitem, path, given) if first else torch.empty_like(like, device=engine.device)
    value = value.detach().to(engine.device).contiguous()
    if engine.plan.mesh.world_size > 1:
        copy_from_first([value], [range(engine.plan.mesh.world_size)])
    return value


def _check_model(model: nn.Module, state: Any) -> None:
    """Checks that `state` is a full state of the model, before anything is written."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            "fs.load_full_state: expected state to be a mapping of names to whole tensors; got "
            f"{type(state).__name__}. {WHOLE}"
        )
    own, first = model.state_dict(), tied_names(model)
    have = {first.get(name, name) for name in state}
    missing = sorted(name for name in own if first.get(name, name) not in have)
    unknown = sorted(map(str, set(state) - set(own)))
    if missing or unknown:
        raise CheckpointError(
            f"fs.load_full_state: expected the names of {type(model).__name__}.state_dict(); "
            f"missing: {missing[:3] or 'none'}, unknown: {unknown[:3] or 'none'}. Pass the whole "
            "state of the same model; with from_rank0=True, only rank 0 needs it."
        )
    for name, value in state.items():
        _check_value(name, value, own[name], _shape(own[name]))


def _checked_params(optimizer: torch.optim.Optimizer | None, state: Any) -> dict[Any, torch.Tensor]:
    """Returns the optimizer's parameters by their numbers in matching full states."""
    if optimizer is None and state is None:
        return {}
    if optimizer is None or state is None:
        raise CheckpointError(
            "fs.load_full_state: expected optimizer and optimizer_state together; got one of "
            "them. Pass both, or load the model without the optimizer."
        )
    if isinstance(optimizer, OwnedOptimizer):
        optimizer.load_state_dict(state)  # raises an error: it has no full state
    kind, origin = type(optimizer).__name__, "fs.load_full_state: optimizer_state"
    with untrusted(origin, f"state and param_groups of {kind}.state_dict()", advice=WHOLE):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        given = [len(group["params"]) for group in state["param_groups"]]
        if sizes != given:
            raise CheckpointError(
                f"fs.load_full_state: expected groups of {sizes} parameters, as {kind} has; got "
                f"{given}. Create the optimizer with the groups of the saved one."
            )
        param_of: dict[Any, torch.Tensor] = {}
        left = dict(state["state"])
        for group, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
            tried: dict[int, Any] = {}
            for number, param in zip(theirs["params"], group["params"], strict=True):
                param_of[number] = param
                values, shape = left.pop(number, {}), _shape(param)
                dims = len(shape)
                if dims not in tried:
                    small = torch.zeros(SMALL[:dims], dtype=param.dtype, device=param.device)
                    tried[dims] = states_made(optimizer, group, theirs, small)
                if tried[dims] is not None:
                    _check_states(f"parameter {number} of {kind}", values, shape, *tried[dims])
        if left:
            raise CheckpointError(
                f"{origin}: expected states of parameters {list(param_of)[:3]}...; got some of "
                f"{list(left)[:3]}, which are not in any group. {WHOLE}"
            )
    return param_of


def _check_states(
    of: str, values: States, shape: tuple[int, ...], fresh: States, stepped: States
) -> None:
    """Checks a parameter's states against those that the optimizer creates."""
    have = {key for key, value in values.items() if value is not None}  # as in older SGD
    if have not in (set(fresh), set(stepped)):
        raise CheckpointError(
            f"fs.load_full_state: {of}: expected states {sorted(stepped)}, which that optimizer "
            f"makes; got {sorted(map(str, have))}. {WHOLE}"
        )
    for key in have:
        found = tuple(getattr(stepped[key], "shape", ()))
        sizes = list(zip(found, SMALL, shape, strict=False))
        is_like = len(found) == len(shape) and all(n in (1, small) for n, small, _ in sizes)
        if is_like and (math.prod(found) > 1 or not shape):  # Adafactor's rows are (n, 1)
            whole = tuple(full if n > 1 else 1 for n, _, full in sizes)
            _check_value(f"{key} of {of}", values[key], stepped[key], whole)
        elif math.prod(found) == 1 and math.prod(getattr(values[key], "shape", ())) != 1:
            _check_value(f"{key} of {of}", values[key], stepped[key], ())


def _check_value(name: str, value: Any, like: Any, shape: tuple[int, ...]) -> None:
    """Checks that a value is a full tensor of this shape, of the same kind as `like`."""
    if not isinstance(like, torch.Tensor):  # from get_extra_state, or a count
        return
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or _shape(value) != shape or _kind(value) != _kind(like):
        got = f"{_kind(value)} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise CheckpointError(
            f"fs.load_full_state: expected {name} in the shape of the whole tensor, {shape}, with "
            f"{_kind(like)} values; got {got}. Pass its whole state."
        )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the full tensor, over all axes of the mesh."""
    return tuple(getattr(tensor, "record", tensor).shape)


def _kind(tensor: torch.Tensor) -> str:
    real = "floating point" if tensor.is_floating_point() else "integer"
    return "complex" if tensor.is_complex() else real
