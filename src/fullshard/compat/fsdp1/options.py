"""Translates FSDP's arguments: strategy, mesh, dtypes, devices, initial values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from fullshard.compat import MisuseTypeError, MisuseValueError, NotOfferedError
from fullshard.compat.wrapping import mesh_sizes, topology, wrapped_of
from fullshard.config.values import Strategy, parse
from fullshard.planner.mesh import order_of, row_of

STRATEGIES = {member: Strategy[member.name.removeprefix("_")] for member in ShardingStrategy}


def strategy_of(value: Any) -> ShardingStrategy:
    """Returns torch's enum member, also for its name.

    Raises:
        ConfigError: There is no such strategy; names the nearest.
    """
    if isinstance(value, ShardingStrategy):
        return value
    found = parse(Strategy, "full_shard" if value is None else value, "sharding_strategy")
    members = {strategy: member for member, strategy in STRATEGIES.items()}
    if found not in members:
        raise MisuseValueError(
            f"sharding_strategy: expected one of {', '.join(m.name for m in STRATEGIES)}; got "
            f"{value!r}. FSDP has no other."
        )
    return members[found]


def mesh_options(strategy: Strategy, process_group: Any, device_mesh: Any) -> dict[str, Any]:
    """Returns axis sizes and rank order from process groups or a device mesh.

    Raises:
        MisuseValueError: Both were given, or a value of another type.
        NotOfferedError: The groups do not cover all ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise MisuseValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass "
            "only one of them."
        )
    if not torch.distributed.is_initialized():
        return {}  # one process, with any placeholder for its group
    hybrid = row_of(strategy).hybrid
    if hybrid and process_group is None and device_mesh is None:
        return {}  # shards within a host, replicates across hosts
    if hybrid and device_mesh is not None and device_mesh.ndim != 2:
        raise MisuseValueError(f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}")
    if device_mesh is not None:
        sizes = [device_mesh.size(axis) for axis in range(device_mesh.ndim)]
        order = order_of(device_mesh.mesh.flatten().tolist())
        return {**mesh_sizes("device_mesh", sizes), "order": order}
    if hybrid:
        if not isinstance(process_group, tuple) or len(process_group) != 2:
            raise MisuseValueError(
                "Expected process_group to be passed in as either None or "
                f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}"
            )
        found = mesh_sizes("process_group", [process_group[1].size(), process_group[0].size()])
        _check_order(process_group[0], found["shard"])
        return found
    if process_group is None or is_alone(process_group):
        return {}
    group = process_group[0] if isinstance(process_group, tuple) else process_group
    ranks = torch.distributed.get_process_group_ranks(group)
    return {**mesh_sizes("process_group", [1, group.size()]), "order": order_of(ranks)}


def _check_order(shard_group: Any, shard: int) -> None:
    """Checks the rank order; a rank knows the order of its own groups only.

    Raises:
        NotOfferedError: The ranks of the shard group are not adjacent.
    """
    ranks = torch.distributed.get_process_group_ranks(shard_group)
    first = min(ranks) // shard * shard
    if ranks != list(range(first, first + shard)):
        raise NotOfferedError(
            f"process_group: expected shard groups of neighbouring ranks, such as {first} to "
            f"{first + shard - 1}; got {ranks}. Pass the ranks as device_mesh=DeviceMesh(...)."
        )


def is_alone(process_group: Any) -> bool:
    """Whether a unit belongs to this rank alone, as an expert of a mixture."""
    if process_group is None or isinstance(process_group, tuple):
        return False
    return process_group.size() == 1 and topology().world_size > 1


# ---- ignored


def ignored_params(
    root: nn.Module, modules: Iterable[Any] | None, states: Iterable[Any] | None
) -> set[int]:
    """Ids of the ignored parameters of a wrapped module.

    Raises:
        MisuseValueError: Both arguments were given, or have wrong types.
        MisuseTypeError: `modules` is not iterable.
    """
    if modules is not None and states is not None:
        raise MisuseValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just "
            "pass ignored_states."
        )
    given = _as_list(modules if states is None else states)
    what, kinds = "ignored_modules expects nn.Module", (nn.Module,)
    if states is not None:
        what, kinds = "ignored_states expects all nn.Parameter or all nn.Module", _KINDS
    if not any(all(isinstance(one, kind) for one in given) for kind in kinds):
        found = sorted({type(one) for one in given}, key=repr)
        raise MisuseValueError(f"{what} list elements but got types {found}")
    if given and isinstance(given[0], nn.Parameter):
        return {id(one) for one in given}
    return _params_of_modules(root, given)


_KINDS = (nn.Parameter, nn.Module)


def _as_list(given: Any) -> list[Any]:
    try:
        return list(given or ())
    except TypeError as error:
        raise MisuseTypeError(
            f"`ignored_modules` should be an iterable of `torch.nn.Module`s but got {type(given)}"
        ) from error


def _params_of_modules(root: nn.Module, modules: list[nn.Module]) -> set[int]:
    found: set[int] = set()
    for one in modules:
        if wrapped_of(one) is not None:
            raise MisuseValueError("`ignored_modules` should not include FSDP modules")
        if one is root:
            warnings.warn(
                "Trying to ignore the top-level module passed into the FSDP constructor itself "
                f"will result in all parameters being ignored and is not well-supported: {root}",
                stacklevel=5,
            )
        for module in _unmarked(one):
            found |= {id(param) for param in module._parameters.values() if param is not None}
    return found


def _unmarked(root: nn.Module) -> list[nn.Module]:
    """The modules at or below a module, excluding marked ones and their contents."""
    found, left = [], [root]
    while left:
        module = left.pop(0)
        if wrapped_of(module) is None:
            found.append(module)
            left += module.children()
    return found


def own_modules(root: nn.Module, ignored: set[int]) -> list[nn.Module]:
    """The modules whose parameters a unit manages, without inner units and ignored modules."""
    found = _unmarked(root)
    return [module for module in found if ignored.isdisjoint(map(id, module._parameters.values()))]


def auto_wrap(
    root: nn.Module, policy: Any, ignored: set[int], given: dict[str, Any], wrapper: type
) -> None:
    """Wraps the modules inside `root` that a policy selects.

    Raises:
        MisuseValueError: A module inside is wrapped already.
    """
    for name, module in root.named_modules():
        if wrapped_of(module) is not None:
            raise MisuseValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )
    params = {param for param in root.parameters() if id(param) in ignored}
    ids = {module: {id(param) for param in module.parameters()} for module in root.modules()}
    modules = {module for module, own in ids.items() if own and own <= ignored}
    _auto_wrap(root, policy, modules, params, {**given, "ignored_states": params}, wrapper)
