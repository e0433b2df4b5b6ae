"""State dicts of marked modules and of their optimizers: full tensors, DTensors of rows, or parts.

    full      full tensors, gathered one flat buffer after another
    sharded   DTensors, Shard(0): each rank's rows, from the same gathers
    local     (n_local,) plain tensors of this rank, for the same ranks and strategy

A state dict is converted once, by the outermost marked module of the call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.compat import MisuseError, MisuseValueError, rows
from fullshard.compat.wrapping import (
    before_change,
    cut,
    engine_for,
    everyones,
    has_meta,
    ignored_ids,
    marked,
    names_of,
    outermost,
    own_rank,
    record_of,
)
from fullshard.engine._torch_compat import no_guard
from fullshard.engine.engine import Engine
from fullshard.engine.full_state import AS_SHARDS, whole_params
from fullshard.engine.homes import default_device
from fullshard.engine.model_spec import places_of
from fullshard.engine.optimizers import WATCHED, loaded_state
from fullshard.engine.owned import OwnedOptimizer
from fullshard.engine.parameter import Guarded, ShardedParameter
from fullshard.engine.record import BEFORE_READ
from fullshard.planner.layout import clean_name


@dataclass(frozen=True)
class Wanted:
    """Options of a state dict.

    Attributes:
        kind: Kind of the values of sharded parameters.
        to_cpu: Whether to copy values to the CPU.
        rank0_only: Whether other ranks get an empty state dict.
        mesh: Device mesh of the DTensors; None: one is created for the engine's mesh.
        follow: Whether the DTensors follow later changes of the weights.
    """

    kind: StateDictType = StateDictType.FULL_STATE_DICT
    to_cpu: bool = False
    rank0_only: bool = False
    mesh: Any = None
    follow: bool = False


def asked_by_torch() -> bool:
    """Whether torch's `get_state_dict`, `set_state_dict` or similar functions are on the stack.

    They set the state-dict type of torch's own FSDP1 class. On other modules they call only
    `state_dict()`, as a script that needs full tensors does, so the stack is the only difference.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != TORCHS_STATE_DICTS:
        frame = frame.f_back
    return frame is not None


TORCHS_STATE_DICTS = "torch.distributed.checkpoint.state_dict"


_busy: list[int] = []  # the outermost call converts the values of the inner ones


def state_dict(
    module: nn.Module, wanted: Wanted, inner: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The `state_dict()` of a marked module. A collective, except for LOCAL.

    Args:
        module: Marked module.
        wanted: Options.
        inner: `state_dict` of its original class.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    if _busy or AS_SHARDS.get():
        return inner(*args, **kwargs)
    engine = engine_for(module)
    with rows.inside(_busy), ExitStack() as shown:

        def take(*_: Any) -> None:
            shards = {} if engine.unsharded else _shards_in(module)
            with torch.inference_mode(mode=False), torch.no_grad():
                values = convert(engine, shards, wanted)
            if wanted.follow:
                values = {
                    key: rows.follow(engine, shards[key], shards[key], value)
                    if isinstance(value, DTensor)
                    else value
                    for key, value in values.items()
                }
            shown.enter_context(_shown(module, {id(shards[key]): values[key] for key in values}))

        handle = module.register_state_dict_pre_hook(take)  # after the user's, which may write
        try:
            result = inner(*args, **kwargs)
        finally:
            handle.remove()
    if engine.unsharded:
        return result
    if wanted.rank0_only and own_rank() != 0:
        prefix = prefix_of(args, kwargs)
        for key in [key for key in result if key.startswith(prefix)]:
            del result[key]
    elif wanted.to_cpu:
        for key, value in result.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                result[key] = value.cpu()
    return result


def _shards_in(module: nn.Module) -> dict[str, Any]:
    found = nn.Module.named_parameters(module)
    return {name: param for name, param in found if isinstance(param, Guarded)}


@contextmanager
def _shown(module: nn.Module, values: Mapping[int, Any]) -> Generator[None]:
    """Shows values in the place of parameters, by their id, to hooks of `state_dict` too."""
    modules = (m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule))
    places = [m._parameters for m in modules]
    shown = [(at, name, at[name]) for at in places for name in at if id(at[name]) in values]
    for at, name, param in shown:
        at[name] = values[id(param)]
    try:
        yield
    finally:
        for at, name, param in shown:
            at[name] = param


def prefix_of(args: Any, kwargs: Any) -> str:
    """The `prefix` of a call of `state_dict`."""
    return kwargs.get("prefix", args[1] if len(args) > 1 else "")


def convert(engine: Engine, shards: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Converts values for a state dict; a tied parameter has one value."""
    if wanted.kind is StateDictType.LOCAL_STATE_DICT:
        return {key: value.to_local().reshape(-1).clone() for key, value in shards.items()}
    keep = not wanted.rank0_only or own_rank() == 0
    names = {value.record.piece.name for value in shards.values()}
    made: dict[str, Any] = {}
    as_rows = (
        wanted.kind is StateDictType.SHARDED_STATE_DICT and dist.is_initialized()
    )  # otherwise there is one rank
    for name, whole in whole_params(engine, names):
        if as_rows:
            made[name] = rows.rows_of(engine, whole, wanted.mesh)
        elif keep:
            made[name] = whole.detach().to("cpu" if wanted.to_cpu else whole.device, copy=True)
    return {key: made[v.record.piece.name] for key, v in shards.items() if keep or made}


# ---- models on meta


def rows_on_meta(
    module: nn.Module, on: Any, inner: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The `state_dict()` of a marked module on meta: DTensors without values.

    Args:
        module: Marked module; some of its parameters may have values.
        on: Mesh of the DTensors; None: created for the module's mesh.
        inner: `state_dict` of its original class.
        args: The call's.
        kwargs: The call's.
    """
    if _busy or not dist.is_initialized():
        return inner(*args, **kwargs)
    with rows.inside(_busy):
        result = inner(*args, **kwargs)
    mesh = record_of(module).mesh
    on = on if on is not None else rows.device_mesh(mesh, default_device().type)
    prefix = prefix_of(args, kwargs)
    ignored = ignored_ids(module)
    for name, param in places_of(module).items():
        key = prefix + clean_name(name)
        value = result.get(key)
        if isinstance(value, torch.Tensor) and id(param) not in ignored:
            whole = value.full_tensor() if isinstance(value, Guarded) else value  # type: ignore[attr-defined]
            result[key] = rows.own_rows(whole, on, mesh, own_rank())
    return result


def take_values(root: nn.Module, state: dict[str, Any]) -> None:
    """Loads values into a marked module on meta and shards them, one unit after another.

    A collective if values are DTensors. In `state`, loaded values are replaced by the parameters.

    Args:
        root: Marked module; its parameters are replaced, as with torch's `assign=True`.
        state: Full tensors or DTensors, by `root`'s names.
    """
    names = {id(module): name for name, module in root.named_modules()}
    for module, wrapped in reversed(list(marked(root))):
        start = names[id(module)] + "." if names[id(module)] else ""
        made: dict[int, nn.Parameter] = {}  # by the old parameter, so that tied ones stay tied
        taken: dict[str, nn.Parameter] = {}
        for name, param in places_of(module).items():
            key = clean_name(start + name)
            value: Any = state.get(key)
            piece = param.record.piece if isinstance(param, ShardedParameter) else None
            shape = tuple(param.shape if piece is None else piece.shape)
            if (
                not isinstance(value, torch.Tensor)
                or isinstance(value, Guarded)
                or value.shape != shape
            ):
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if piece is not None:  # sharded by an earlier call
                local = param.to_local()  # type: ignore[attr-defined]
                local.copy_(whole.detach().reshape(-1)[piece.start : piece.stop].view(local.shape))
                taken[key] = param
                continue
            if not param.is_meta:
                continue
            if id(param) not in made:
                made[id(param)] = nn.Parameter(whole.detach(), param.requires_grad)
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._parameters[leaf] = taken[key] = made[id(param)]
        cut(module, wrapped)
        state.update(taken)
    for name, module in root.named_modules():
        for leaf, buffer in module._buffers.items():
            value = state.get(clean_name(f"{name}.{leaf}" if name else leaf))
            if buffer is not None and buffer.is_meta and isinstance(value, torch.Tensor):
                module._buffers[leaf] = value


def take_local(engine: Engine, state: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Makes a module load state dicts of `StateDictType.LOCAL_STATE_DICT`."""
    for name, param in module.named_parameters(remove_duplicate=False):
        key = prefix + clean_name(name)
        value = state.get(key)
        if not isinstance(param, ShardedParameter) or not isinstance(value, torch.Tensor):
            continue
        with no_guard():
            fits = value.dim() == 1 and value.numel() == param.numel()
        if fits and not isinstance(value, DTensor):
            state[key] = param.as_state(value.detach().to(engine.device))


class HoldsShards:
    """Overrides of nn.Module's methods for shards. For classes before nn.Module in the MRO."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Converts a gradient together with its parameter; torch would convert it in place."""
        module: Any = self
        shards = [param for param in module.parameters() if isinstance(param, ShardedParameter)]
        held = [(param, param.grad) for param in shards if param.grad is not None]
        for param, _ in held:
            param.grad = None
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for param, grad in held:
            with torch.no_grad():
                param.grad = fn(grad)
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        if not has_meta(outermost(module)):
            engine_for(module)  # follows later changes
        return super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]


# ---- optimizer states ----------------------------------------------------------------------------
# Optimizer states by parameter name: whole, as rows, or as this rank's part; and back.

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


def _convert(value: Any, engine: Engine, wanted: Wanted) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, Guarded):
        if wanted.follow:
            return value
        value = value.detach().clone()
        return value.cpu() if wanted.to_cpu else value
    if wanted.kind is StateDictType.LOCAL_STATE_DICT:
        local = value.to_local().reshape(-1).clone()  # type: ignore[attr-defined]
        return local.cpu() if wanted.to_cpu else local
    whole = value.full_tensor()  # type: ignore[attr-defined]
    if wanted.kind is StateDictType.SHARDED_STATE_DICT and torch.distributed.is_initialized():
        return rows.rows_of(engine, whole, wanted.mesh)
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


def always() -> bool:
    """Whether a state dict shows rows, which those of torch's FSDP2 always do."""
    return True


def show_rows(module: nn.Module, when: Callable[[], bool] = always) -> None:
    """Makes `Optimizer.state_dict()` return DTensors of rows for a marked module's parameters.

    Args:
        module: Marked module; call again once its parameters are shards.
        when: Returns whether to convert; otherwise the state dict is unchanged.
    """
    shown: _Shown = (weakref.ref(module), when)
    for param in module.parameters():
        if isinstance(param, ShardedParameter):
            setattr(param, _SHOWN, shown)
    if _listen not in WATCHED.callbacks:
        WATCHED.callbacks.append(_listen)
        WATCHED.before_step.append(rows.before_step)
        before_change.append(rows.before_change)
        BEFORE_READ.append(rows.before_read)
    WATCHED.add(module)


_SHOWN = "_fullshard_shows_rows"
_Shown = tuple[Callable[[], nn.Module | None], Callable[[], bool]]  # the marked module, show now?


_LISTENED: WeakSet[Optimizer] = WeakSet()


def _listen(optimizer: Optimizer) -> None:
    is_shown = any(hasattr(param, _SHOWN) for _, param in _numbered(optimizer))
    if is_shown and optimizer not in _LISTENED:
        _LISTENED.add(optimizer)
        optimizer.register_state_dict_post_hook(_give_rows)
        optimizer.register_load_state_dict_pre_hook(_take_rows)


def _give_rows(optimizer: Optimizer, state: States) -> States:
    """Converts states to DTensors of rows. A collective if there are any."""
    if AS_SHARDS.get():
        return state
    result: dict[Any, Any] = dict(state["state"])
    engines: dict[_Shown, Engine | None] = {}
    for number, param in _numbered(optimizer):
        shown: _Shown | None = getattr(param, _SHOWN, None)
        if shown is None or number not in result:
            continue
        if shown not in engines:
            module_ref, when = shown
            module = module_ref() if when() else None
            engines[shown] = engine_for(module) if module is not None else None
        engine = engines[shown]
        if engine is not None:
            wanted = Wanted(StateDictType.SHARDED_STATE_DICT, follow=shown[1] is always)
            held = result[number]
            result[number] = {key: _convert(value, engine, wanted) for key, value in held.items()}
            for key, value in result[number].items() if wanted.follow else ():
                if isinstance(value, DTensor) and isinstance(held[key], Guarded):
                    result[number][key] = rows.follow(engine, held[key], param, value)
    return {**state, "state": result}


def _take_rows(optimizer: Optimizer, state: States) -> States:
    """Copies this rank's parts of the states."""
    params = [param for _, param in _numbered(optimizer)]
    keys = [key for group in state["param_groups"] for key in group["params"]]  # numbers or names
    param_of = dict(zip(keys, params, strict=False))  # torch's load goes by position too
    held = {(key, name): v for key, values in state["state"].items() for name, v in values.items()}
    plain = rows.unfollowed(held, params)
    taken = {key: {n: plain[key, n] for n in values} for key, values in state["state"].items()}
    for key, values in taken.items():
        if key in param_of:
            param = param_of[key]
            taken[key] = {name: _part(param, _whole(v)) for name, v in values.items()}
            for name, own in optimizer.state.get(param, {}).items():
                if rows.shard_of(held.get((key, name))) is own:  # kept rows go on following it
                    taken[key][name] = own.copy_(taken[key][name])
    return {**state, "state": taken}
