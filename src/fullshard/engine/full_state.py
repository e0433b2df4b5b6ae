"""Whole states of a model and its optimizer, out to one rank and in from one rank.

They are what one process would have: `torch.save` and DDP scripts take them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.engine.agreement import agree, tell
from fullshard.engine.engine import Engine, engine_of
from fullshard.engine.optimizers import WATCHED, cut_state
from fullshard.engine.owned import holds_whole
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import param_names, tied_names
from fullshard.errors import CheckpointError, EngineError
from fullshard.transport.groups import copy_from_first

States = dict[str, Any]


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool
) -> States:
    """The `state_dict()` that the optimizer would have in one process, on the CPU. A collective."""
    engine = engine_of(model)
    agree(engine, lambda: param_names(model, optimizer))
    return whole_states(model, agree(engine, optimizer.state_dict), rank0_only=rank0_only)


def whole_states(model: nn.Module, given: States, *, rank0_only: bool = True) -> States:
    """An optimizer's `state_dict()` with every state whole, on the CPU. A collective."""
    engine = engine_of(model)
    keys = tell(engine, [(number, *values) for number, values in given["state"].items()])
    if any(own != keys[0] for own in keys):
        raise EngineError(
            "fs.full_optimizer_state_dict: expected optimizers with the same states in the same "
            "order on every rank; got others. Give all optimizers the same parameters."
        )
    keeps = engine.rank == 0 or not rank0_only
    states: dict[Any, States] = {}
    for number, values in given["state"].items():
        for key, value in values.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if keeps:
                is_tensor = isinstance(whole, torch.Tensor)
                kept = whole.detach().to("cpu", copy=True) if is_tensor else whole
                states.setdefault(number, {})[key] = kept
    return {**given, "state": states} if keeps else {}


def load_full_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    optimizer_state: States | None,
    *,
    from_rank0: bool,
) -> None:
    """Load whole states; each rank keeps its part, one unit at a time. A collective."""
    engine = engine_of(model)
    named = _of_first(engine, dict(state)) if from_rank0 else dict(state)
    given = optimizer_state or {"state": {}, "param_groups": []}
    shown = _of_first(engine, given) if from_rank0 else given
    agree(engine, lambda: _check_names(model, named))
    param_of = agree(engine, lambda: _checked_params(optimizer, shown))
    for names in _by_unit(engine, named):
        part = {name: _whole(engine, named[name], state.get(name), from_rank0) for name in names}
        model.load_state_dict(part, strict=False)
    if optimizer is None:
        return
    states: dict[Any, States] = {}
    for number, values in shown["state"].items():
        for key, like in values.items():
            own = given["state"].get(number, {}).get(key)
            value = _whole(engine, like, own, from_rank0)
            param = param_of[number]
            if isinstance(value, torch.Tensor):
                place = param.device if value.dim() else "cpu"  # where torch keeps counts of steps
                value = value.detach().to(place, copy=True)  # belongs to this optimizer alone
                if isinstance(param, ShardedParameter):
                    value = cut_state(param, value, sliced=value.dim() > 0)
            states.setdefault(number, {})[key] = value
    optimizer.load_state_dict({**shown, "state": states})
    WATCHED.look(optimizer)


def _of_first(engine: Engine, tree: Any) -> Any:
    """Rank 0's states on every rank, with meta tensors in place of values."""
    return tell(engine, _without_values(tree) if engine.rank == 0 else None)[0]


def _without_values(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.empty_like(tree, device="meta")
    if isinstance(tree, Mapping):
        return {key: _without_values(value) for key, value in tree.items()}
    return tree


def _whole(engine: Engine, like: Any, own: Any, from_rank0: bool) -> Any:  # noqa: FBT001
    """This rank's own value, or rank 0's by broadcast."""
    if not from_rank0 or not isinstance(like, torch.Tensor):
        return like
    value = own if engine.rank == 0 else torch.empty_like(like, device=engine.device)
    value = value.detach().to(engine.device).contiguous()
    if engine.plan.mesh.world_size > 1:
        copy_from_first([value], [range(engine.plan.mesh.world_size)])
    return value


def _by_unit(engine: Engine, named: Mapping[str, Any]) -> Iterator[list[str]]:
    left = dict.fromkeys(named)
    for unit in engine.units:
        names = [n for group in unit.groups for many in group.plan.names for n in many if n in left]
        for name in names:
            del left[name]
        yield names
    yield list(left)


def _check_names(model: nn.Module, state: Mapping[str, Any]) -> None:
    wanted, first = set(model.state_dict()), tied_names(model)
    have = {first.get(name, name) for name in state}
    missing = sorted(name for name in wanted if first.get(name, name) not in have)
    unknown = sorted(set(state) - wanted)
    if missing or unknown:
        raise CheckpointError(
            f"fs.load_full_state: expected the names of {type(model).__name__}.state_dict(); "
            f"missing: {missing[:3] or 'none'}, unknown: {unknown[:3] or 'none'}. Give the whole "
            "state of the same model; rank 0 alone may have it with from_rank0=True."
        )


def _checked_params(
    optimizer: torch.optim.Optimizer | None, state: States
) -> dict[Any, torch.Tensor]:
    """The optimizer's parameters by their number in whole states that fit them."""
    if optimizer is None:
        return {}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in state["param_groups"]]
    if sizes != given:
        raise CheckpointError(
            f"fs.load_full_state: expected groups of {sizes} parameters, as "
            f"{type(optimizer).__name__} has; got {given}. Make the optimizer as the saved one."
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    param_of = dict(zip(numbers, params, strict=True))
    for number, values in state["state"].items():
        param = param_of[number]
        shape = param.record.shape if isinstance(param, ShardedParameter) else param.shape
        for key, value in values.items():
            found = tuple(getattr(value, "shape", ()))
            if (
                found not in (tuple(shape), tuple(param.shape), (), (1,))
                and holds_whole(optimizer, param) is None
            ):
                raise CheckpointError(
                    f"fs.load_full_state: expected {key} of parameter {number} in the shape of the "
                    f"parameter, {tuple(shape)}, got {found}. Give its whole state."
                )
    return param_of
