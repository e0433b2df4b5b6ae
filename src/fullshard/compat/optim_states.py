"""Optimizer states by parameter name: whole, as rows, or as this rank's part; and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.compat.errors import MisuseError, MisuseValueError
from fullshard.compat.state_dicts import Wanted, rows_of
from fullshard.compat.wrapping import engine_for, marked, names_of, own_rank, topology
from fullshard.engine.engine import Engine
from fullshard.engine.full_state import AS_SHARDS
from fullshard.engine.optimizers import WATCHED, loaded_state
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.parameter import Guarded, ShardedParameter
from fullshard.transport.groups import all_values, own_group

States = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: Optimizer, given: States | None, wanted: Wanted
) -> States:
    """Returns {"state": {name: {...}}, "param_groups": [...]}, the states of the unsharded model.

    A collective, except for LOCAL.

    Args:
        model: Model with the parameters; need not be marked itself.
        optim: Optimizer of these parameters.
        given: A changed `optim.state_dict()`; None: the current states.
        wanted: Options.
    """
    if isinstance(optim, OwnedOptimizer):
        optim.state_dict()  # names the functions that save its states
    engines = _engines(model)
    engine: Any = next(iter(engines), None)
    names = first_names(model)
    states = given["state"] if given is not None else None
    result: States = {"state": {}, "param_groups": []}
    held: dict[str, States] = {}
    for number, param in _numbered(optim):
        own = optim.state.get(param, {}) if states is None else states.get(number, {})
        if own:
            held[_name_of(names, param)] = own
    shards = [n for n, own in held.items() if any(isinstance(v, Guarded) for v in own.values())]
    world = max((engine.plan.mesh.world_size for engine in engines), default=1)
    if wanted.kind is not StateDictType.LOCAL_STATE_DICT and world > 1:
        shards = _agreed(shards)
    for name in [*shards, *(name for name in held if name not in set(shards))]:
        result["state"][name] = {k: _convert(v, engine, wanted) for k, v in held[name].items()}
    if given is not None and "param_groups" not in given:
        del result["param_groups"]
    for group in optim.param_groups if "param_groups" in result else ():
        settings = {key: value for key, value in group.items() if key != "params"}
        params = [_name_of(names, param) for param in group["params"]]
        result["param_groups"].append({**settings, "params": params})
    return {} if wanted.rank0_only and own_rank() != 0 else result


def _agreed(names: list[str]) -> list[str]:
    """Rank 0's names, on all ranks: the order of parameters may differ between optimizers.

    Raises:
        MisuseError: A rank has no states for one of these parameters.
    """
    said = everyones(names)
    for rank, own in enumerate(said):
        missing = [name for name in said[0] if name not in own]
        if missing:
            raise MisuseError(
                "FSDP currently requires each rank to have at least the optimizer states needed "
                "by rank 0's optimizer but some ranks are missing some of those states: expected "
                f"those of {missing[0]} on rank {rank}. Give all optimizers the same parameters."
            )
    return said[0]


def everyones(value: Any) -> list[Any]:
    """Returns the values of all ranks. A collective."""
    world = topology().world_size
    return all_values(value, own_group("all", [range(world)])) if world > 1 else [value]


def _convert(value: Any, engine: Engine, wanted: Wanted) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, Guarded):
        value = value.detach().clone()
        return value.cpu() if wanted.to_cpu else value
    if wanted.kind is StateDictType.LOCAL_STATE_DICT:
        local = value.to_local().reshape(-1).clone()  # type: ignore[attr-defined]
        return local.cpu() if wanted.to_cpu else local
    whole = value.full_tensor()  # type: ignore[attr-defined]
    if wanted.kind is StateDictType.SHARDED_STATE_DICT and torch.distributed.is_initialized():
        return rows_of(engine, whole, wanted.mesh)
    return whole.cpu() if wanted.to_cpu else whole


def state_dict_to_load(
    model: nn.Module, optim: Optimizer, state: States, *, by_name: bool = False
) -> States:
    """Converts a result of `optim_state_dict` for `optim.load_state_dict` of this rank.

    Args:
        model: The model; its strategy and number of ranks may differ.
        optim: Optimizer of the parameters.
        state: States by name.
        by_name: Whether the result has the model's own parameter names as keys, not numbers.
    """
    _engines(model)
    names = names_of(model)
    result: States = {"state": {}, "param_groups": []}
    number_of: dict[str, int] = {}
    first: dict[int, str] = {}
    params = dict(_numbered(optim))
    shown = {id(param): name for name, param in model.named_parameters()} if by_name else {}
    for number, param in params.items():
        own_names = names.get(id(param), [])
        found = next((name for name in own_names if name in state["state"]), None)
        number_of.update(dict.fromkeys(own_names, number))
        first[number] = found or (own_names[0] if own_names else "")
    for name, values in state["state"].items():  # in the same order on all ranks
        whole = {key: _whole(value) for key, value in values.items()}
        number = number_of.get(name)
        if number is not None and first[number] == name:
            made = {key: _part(params[number], value) for key, value in whole.items()}
            result["state"][shown[id(params[number])] if by_name else number] = made
    if "param_groups" not in state:
        del result["param_groups"]
    for group in state.get("param_groups", ()):
        missing = [name for name in group["params"] if name not in number_of]
        if missing:
            raise MisuseValueError(
                f"optimizer state dict: expected parameters of this optimizer; got "
                f"{missing[0]!r}, which it does not have. Give it the same parameters."
            )
        numbers = sorted(number_of[name] for name in group["params"])  # load goes by position
        keys = [shown[id(params[number])] for number in numbers] if by_name else numbers
        result["param_groups"].append({**group, "params": keys})
    return result


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(param: torch.Tensor, value: Any) -> Any:
    """This rank's part of a state."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Guarded):
        return value
    if isinstance(param, ShardedParameter):
        record, shape = param.record, tuple(value.shape)
        if (
            shape == (record.piece.numel,) and shape != record.shape
        ):  # StateDictType.LOCAL_STATE_DICT
            value = value.view(param.shape)
    return loaded_state(param, value)  # a copy: a state dict belongs to one optimizer


def rekeyed(state: States, model: nn.Module, optim: Optimizer | None, *, to_names: bool) -> States:
    """The same state dict with numbers in place of names, or names in place of numbers."""
    keys = list(state["state"])
    if keys and not (all(type(k) is str for k in keys) or all(type(k) is int for k in keys)):
        raise MisuseValueError(f"Invalid parameter keys: {state['state'].keys()}")
    if keys and (type(keys[0]) is str) == to_names:
        return state
    names = first_names(model)
    params = [p for _, p in _numbered(optim)] if optim is not None else list(model.parameters())
    table: dict[Any, Any] = {}
    for number, param in enumerate(params):
        name = _name_of(names, param)
        table.update({number: name} if to_names else {name: number})
    swap: Callable[[Any], Any] = table.__getitem__
    return {
        "state": {swap(key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": sorted(map(swap, group["params"]))}
            for group in state["param_groups"]
        ],
    }


def _numbered(optim: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Parameters as `Optimizer.state_dict` numbers them."""
    return enumerate(param for group in optim.param_groups for param in group["params"])


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by its id."""
    return {key: names[0] for key, names in names_of(model).items()}


def _name_of(names: Mapping[int, str], param: torch.Tensor) -> str:
    name = names.get(id(param))
    if name is None:
        raise MisuseValueError(
            "optimizer: expected parameters of the given model; got one of shape "
            f"{tuple(param.shape)} that it does not have. Pass the optimizer's own model."
        )
    return name


def _engines(model: nn.Module) -> list[Engine]:
    return [engine_for(module) for module, _ in marked(model)]


# ---- optimizers whose own state dicts contain rows


def show_rows(module: nn.Module, when: Callable[[], bool] = lambda: True) -> None:
    """Makes `Optimizer.state_dict()` return DTensors of rows for a marked module's parameters.

    Args:
        module: Marked module; call again once its parameters are shards.
        when: Returns whether to convert; otherwise the state dict is unchanged.
    """
    rows: _Rows = (weakref.ref(module), when)
    for param in module.parameters():
        if isinstance(param, ShardedParameter):
            setattr(param, _ROWS, rows)
    if _listen not in WATCHED.callbacks:
        WATCHED.callbacks.append(_listen)
    WATCHED.add(module)


_ROWS = "_fullshard_shows_rows"
_Rows = tuple[Callable[[], nn.Module | None], Callable[[], bool]]  # the marked module, show now?


def _listen(optimizer: Optimizer) -> None:
    if any(hasattr(param, _ROWS) for _, param in _numbered(optimizer)):
        optimizer.register_state_dict_post_hook(_give_rows)
        optimizer.register_load_state_dict_pre_hook(_take_rows)


def _give_rows(optimizer: Optimizer, state: States) -> States:
    """Converts states to DTensors of rows. A collective if there are any."""
    if AS_SHARDS.get():
        return state
    shown: States = dict(state["state"])
    engines: dict[_Rows, Engine | None] = {}
    for number, param in _numbered(optimizer):
        rows: _Rows | None = getattr(param, _ROWS, None)
        if rows is None or number not in shown:
            continue
        if rows not in engines:
            module_ref, when = rows
            module = module_ref() if when() else None
            engines[rows] = engine_for(module) if module is not None else None
        engine = engines[rows]
        if engine is not None:
            wanted, values = Wanted(StateDictType.SHARDED_STATE_DICT), shown[number].items()
            shown[number] = {key: _convert(value, engine, wanted) for key, value in values}
    return {**state, "state": shown}


def _take_rows(optimizer: Optimizer, state: States) -> States:
    """Copies this rank's parts of the states."""
    params = [param for _, param in _numbered(optimizer)]
    keys = [key for group in state["param_groups"] for key in group["params"]]  # numbers or names
    param_of = dict(zip(keys, params, strict=False))  # torch's load goes by position too
    taken = dict(state["state"])
    for key, values in taken.items():
        if key in param_of:
            taken[key] = {name: _part(param_of[key], _whole(v)) for name, v in values.items()}
    return {**state, "state": taken}
