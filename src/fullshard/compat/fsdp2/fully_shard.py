"""torch's `fully_shard` and `FSDPModule` interfaces on this engine.

    before   from torch.distributed.fsdp import fully_shard
    after    from fullshard.compat.fsdp2 import fully_shard

`fully_shard` is called bottom-up and works in place; classes become `FSDP<Name>`.
`docs/migrate/fsdp2.md` lists the differences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateDictType,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.compat import (
    MisuseAssertionError,
    MisuseError,
    MisuseValueError,
    NotOfferedError,
    rows,
    state_dicts,
)
from fullshard.compat.state_dicts import HoldsShards, Wanted
from fullshard.compat.wrapping import (
    Wrapped,
    bare,
    check_unsharded,
    engine_for,
    has_meta,
    ignored_ids,
    mark,
    marked,
    mesh_sizes,
    names_in,
    original_class,
    outermost,
    record_of,
    settings_of,
    swap_class,
    topology,
    wrapped_of,
)
from fullshard.config.values import Strategy
from fullshard.engine._torch_compat import call_outside_compile
from fullshard.engine.engine import Engine
from fullshard.engine.homes import default_device
from fullshard.engine.model_spec import NEVER_CALLED
from fullshard.engine.modules import cast_output
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import unsharded
from fullshard.launch.rendezvous import init_process_group
from fullshard.planner.mesh import order_of
from fullshard.planner.schedule import Sync
from fullshard.transport.groups import backend_for


def _refused(name: str) -> Any:
    """A method that raises an error."""

    def method(*_: Any, **__: Any) -> None:
        raise NotOfferedError(
            f"{name}: expected the engine's own collectives, and gradients that each backward "
            "reduces. Choose among transports with fullshard.shard(transport=...); defer "
            "reductions with set_requires_gradient_sync(False)."
        )

    return method


class UnshardHandle:
    """The result of `unshard(async_op=True)`."""

    def wait(self) -> None:
        """Returns at once, because the parameters are already gathered."""


class FSDPModule(HoldsShards, nn.Module, TorchFSDPModule):
    """The methods of a sharded module: all of torch's. It is an instance of torch's class too.

    Helpers that check for torch's class therefore do not skip our modules. torch's class is the
    last base, so none of its own methods runs.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates a slice of a sharded Sequential, which has the original class."""
        original = original_class(cls)
        if original is not None and (args or kwargs):
            return original(*args, **kwargs)
        return object.__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the effect of `unshard`: the plan gathers the parameters again."""
        if _OPEN:
            call_outside_compile(_close_open, self)
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise MisuseAssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args, *state = super().__reduce_ex__(protocol)
        if make.__module__ == "copyreg":  # not a way of its own; pickle finds no swapped class
            make, args = bare, (original_class(type(self)), FSDPModule)
        return (make, args, *state)

    # ---- parameters

    def unshard(  # pyright: ignore[reportIncompatibleMethodOverride]  our own handle
        self, async_op: bool = False
    ) -> UnshardHandle | None:
        """Shows full parameters until `reshard` or the next forward. A collective.

        No effect inside a forward or backward, where the plan gathers ahead.
        """
        engine = engine_for(self)
        index = engine.index_of.get(id(self))
        is_busy = any(unit.swapped for unit in engine.units)
        if index is not None and self not in _OPEN and not is_busy:
            _OPEN[self] = None
            stack = record_of(self).extra["open"] = ExitStack()
            units = [engine.units[index]]
            stack.enter_context(unsharded(outermost(self), writeback=False, units=units))
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Shows shards again."""
        _close(self)

    # ---- gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backwards reduce gradients or defer the reduction to a later backward.

        Reduction is deferred only while no unit is set to reduce; otherwise all units reduce, and
        the sums are the same.
        """
        self._set("sync", requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backwards also sum over replicas or defer that sum."""
        self._set("all_reduce", requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: each backward is complete."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the divisor of this unit's gradient sums, in place of the number of ranks."""
        record_of(self).extra["shared"]["divisor"] = factor
        self._apply_setters()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def _set(self, key: str, value: Any, *, recurse: bool) -> None:
        for module, wrapped in marked(self):
            if recurse or module is self:
                wrapped.extra[key] = value
        self._apply_setters()

    def _apply_setters(self) -> None:
        engine = record_of(self).engine_ref()
        if engine is not None:
            _apply_settings(outermost(self), engine)

    # ---- the plan

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether units reshard after forward, from the next step on."""
        if not isinstance(reshard_after_forward, bool):
            raise MisuseValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for module, wrapped in marked(self):
            if recurse or module is self:
                wrapped.strategy = _strategy(reshard_after_forward, wrapped.options)
        record_of(outermost(self)).needs_plan = True

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """No effect: the plan's slots are empty between steps."""

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Sets how many units forward gathers ahead, in execution order."""
        self._look_ahead("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Sets how many units backward gathers ahead, in execution order."""
        self._look_ahead("backward_prefetch", modules)

    def _look_ahead(self, key: str, modules: list[Any]) -> None:
        _check_all(modules)
        depth = max(len(modules), record_of(outermost(self)).options.get(key) or 1)
        self._plan_with(key, depth, instead_of=1)

    def _plan_with(self, key: str, value: int, *, instead_of: int) -> None:
        """Sets an option of the whole model, from the next step on."""
        root = record_of(outermost(self))
        if root.options.get(key, instead_of) != value:
            root.options[key], root.needs_plan = value, True

    def set_post_optim_event(self, event: Any) -> None:
        """Makes the next forward wait for an event, for an optimizer on another stream."""

        def wait(*_: Any) -> None:
            handle.remove()
            event.wait()

        handle = outermost(self).register_forward_pre_hook(wait, prepend=True)

    # ---- methods without a counterpart

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: backward gathers only the units that it needs."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: reductions are always sums, divided afterwards."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: buffers are the plan's."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Allocates the slots of the whole model in NCCL's symmetric memory."""
        if backend != "NCCL":
            raise MisuseValueError(f"set_symm_mem_for_comm: expected backend NCCL; got {backend}.")
        self._plan_with("symmetric_memory", True, instead_of=False)

    def set_reduce_scatter_unused_params(self, *_: Any, **__: Any) -> None:
        """No effect: parameters without a gradient on a rank always contribute zero."""

    def set_reduce_scatter_max_input_buffers(self, *_: Any, **__: Any) -> None:
        """No effect: buffers are the plan's."""

    def set_separate_reduce_scatter_group(self, *_: Any, **__: Any) -> None:
        """No effect: gathers and reductions always have separate groups."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect."""

    def reset_iter_state(self) -> None:
        """Resets state left by an exception. The next forward does this automatically."""
        engine = record_of(self).engine_ref()
        if engine is not None:
            engine.runtime.reset()

    set_custom_all_gather = _refused("set_custom_all_gather")
    set_custom_reduce_scatter = _refused("set_custom_reduce_scatter")
    set_all_reduce_hook = _refused("set_all_reduce_hook")
    finalize_backward = _refused("finalize_backward")  # torch 2.15

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Refused: torch 2.15 has it."""
        if enabled:
            _refused("set_manual_backward_finalization")()

    # ---- state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """DTensors of each rank's rows. A collective, except for a model on meta."""
        mesh = record_of(self).extra["mesh"]
        if has_meta(outermost(self)):
            return state_dicts.rows_on_meta(self, mesh, super().state_dict, args, kwargs)
        _close_open(self)
        wanted = Wanted(StateDictType.SHARDED_STATE_DICT, mesh=mesh, follow=True)
        return state_dicts.state_dict(self, wanted, super().state_dict, args, kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads DTensors or full tensors; a model on meta needs `assign=True`.

        Only one unit is gathered at a time. A model with values copies, even with `assign`.
        """
        _close_open(self)
        state = rows.unfollowed(state_dict, self.parameters())
        if assign and has_meta(self):
            state_dicts.take_values(self, state)
            _show_placements(self)
        return super().load_state_dict(state, strict=strict, assign=has_meta(self) and assign)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the objects of parameters on meta, so that ties and optimizers stay right."""
        _close_open(self)
        rows.settle(self.parameters())
        tables = [module._parameters for module in self.modules()]
        entries = [(at, name, param) for at in tables for name, param in at.items()]
        places = [(at, name, p) for at, name, p in entries if p is not None and p.is_meta]
        result = super()._apply(*args, **kwargs)
        for at, name, param in places:
            new: Any = at[name]
            if new is not param and param.is_meta:
                torch.utils.swap_tensors(param, new)
                vars(param).update(vars(new))
            at[name] = param
        return result


_OPEN: Any = WeakIdKeyDictionary()  # modules that `unshard` shows whole; their record can end it


def _check_all(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise MisuseValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  torch's
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  torch's
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Makes a module, or each of several modules, a unit, in place.

    Args:
        module: A module with a forward, or a list of them.
        mesh: None for all ranks, or a mesh with one axis, or (replicate, shard).
        reshard_after_forward: False keeps the unit gathered until its backward. An int counts as
            True.
        shard_placement_fn: No effect: units are flat buffers, sharded independently of dimensions.
        mp_policy: Dtypes of this unit.
        offload_policy: Read from the outermost unit.
        ignored_params: Parameters that stay whole on every rank; their gradients are not reduced.
        dp_mesh_dims: Names of the data-parallel axes. The other axes must have one rank.

    Returns:
        The argument `module`.
    """
    given = list(module) if isinstance(module, list | tuple) else [module]
    modules = [getattr(one, "_orig_mod", one) for one in given]  # inside of torch.compile(module)
    mesh = mesh if dp_mesh_dims is None else _data_parallel(mesh, dp_mesh_dims)
    if mesh is None:
        init_process_group()  # as torch's, if a launcher started this process
    sizes = _sizes(mesh)
    _check_reshard(reshard_after_forward, sizes)
    ignored = {id(param) for param in ignored_params or ()}
    for one in modules:
        _check_module(one, ignored)
        _check_placements(one, ignored, shard_placement_fn)
    shared: dict[str, Any] = {}
    for one in modules:
        _move(one, mesh, ignored)
        mark_unit(one, _strategy(reshard_after_forward, sizes), sizes, mp_policy, ignored)
        wrapped = record_of(one)
        wrapped.extra.update(mesh=mesh, shared=shared)
        if isinstance(offload_policy, CPUOffloadPolicy):
            wrapped.options["offload"] = "cpu"
        _show_placements(one)
    return module


fully_shard.state = wrapped_of  # type: ignore[attr-defined] as on torch's modules


def mark_unit(
    module: nn.Module,
    strategy: Strategy,
    options: dict[str, Any],
    policy: MixedPrecisionPolicy,
    ignored: set[int],
) -> None:
    """Makes a module a unit."""
    kind = type(module)
    wrapped = Wrapped(
        strategy=strategy,
        settings=settings_of(policy),
        options={key: value for key, value in options.items() if key != "order"},
        order=options.get("order", ()),
        ignored=names_in(module, ignored),
        inputs=policy.param_dtype if policy.cast_forward_inputs else None,
        extra={"mesh": None, "shared": {}},
        check=_check_values,
    )
    wrapped.on_engine.append(_on_engine)
    swap_class(module, FSDPModule, f"FSDP{kind.__name__}")
    mark(module, wrapped)
    if policy.output_dtype is not None:
        module.register_forward_hook(functools.partial(cast_output, policy.output_dtype))
    state_dicts.show_rows(module)


def _data_parallel(mesh: Any, dims: Any) -> Any:
    """The data-parallel axes of a mesh as (shard,) or (replicate, shard); several are flattened."""
    given = [dims.replicate_names, dims.shard_names]
    wide = [tuple(name for name in part if mesh[name].size() > 1) for part in given]
    names = (*wide[0], *wide[1])
    if math.prod(mesh[name].size() for name in names) != mesh.size():
        raise NotOfferedError(
            f"dp_mesh_dims: expected axes that cover all ranks of the mesh; got {dims}, {mesh}. "
            "With tensor parallelism use fullshard.shard."
        )
    if [*map(len, wide)] in ([0, 1], [1, 1]):
        return mesh[names]
    made = vars(mesh).setdefault("_fullshard_axes", {})  # one for all units of a model
    key = tuple(wide)
    if key not in made:
        sizes = [math.prod(mesh[name].size() for name in part) for part in wide]
        others = [name for name in mesh.mesh_dim_names if name not in names]
        order = [mesh.mesh_dim_names.index(name) for name in (*names, *others)]
        ranks = mesh.mesh.permute(order).reshape(sizes if wide[0] else -1)
        made[key] = DeviceMesh(
            mesh.device_type, ranks, mesh_dim_names=("dp_replicate", "dp_shard")[-ranks.ndim :]
        )
    return made[key]


def _sizes(mesh: Any) -> dict[str, Any]:
    if mesh is None:
        return {}
    if mesh.ndim not in (1, 2):
        raise MisuseValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise MisuseAssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    sizes = mesh_sizes("mesh", [mesh.size(axis) for axis in range(mesh.ndim)])
    return {**sizes, "order": order_of(mesh.mesh.flatten().tolist())}


def _strategy(reshard_after_forward: Any, sizes: dict[str, Any]) -> Strategy:
    frees = reshard_after_forward is None or bool(reshard_after_forward)
    if (sizes.get("replicate") or 1) > 1:
        return Strategy.HYBRID_SHARD if frees else Strategy.HYBRID_SHARD_ZERO2
    return Strategy.FULL_SHARD if frees else Strategy.SHARD_GRAD_OP


def _move(module: nn.Module, mesh: Any, ignored: set[int]) -> None:
    """Moves parameters and buffers to this rank's device, as torch's `fully_shard` does."""
    device = default_device()
    if mesh is not None:
        wanted = mesh.device_type
    else:  # gloo serves the CPU only
        has_group = torch.distributed.is_initialized()
        wanted = "cpu" if has_group and backend_for(device) in ("gloo", "none") else device.type
    for tensor in (*module.parameters(), *module.buffers()) if wanted == device.type else ():
        is_apart = tensor.is_meta or id(tensor) in ignored or isinstance(tensor, ShardedParameter)
        if not is_apart and tensor.device != device:
            tensor.data = tensor.to(device)


def _check_reshard(value: Any, sizes: dict[str, Any]) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise MisuseValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value}"
        )
    shard = sizes.get("shard") or topology().world_size
    if value < 1 or shard % value:
        raise MisuseValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{shard}, not {value}"
        )


def _check_module(module: Any, ignored: set[int]) -> None:
    if not isinstance(module, nn.Module):
        raise MisuseValueError(f"fully_shard expects nn.Module but got {type(module)}")
    if isinstance(module, NEVER_CALLED) and type(module).forward is nn.Module.forward:
        raise MisuseValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    if wrapped_of(module) is not None:
        raise MisuseAssertionError(
            "Each distinct composable distributed API can only be applied to a module once. The "
            f"following APIs have already been applied to the following module: "
            f"['fully_shard']\n{module}"
        )
    check_unsharded(module)
    for name, param in module.named_parameters():
        if id(param) not in ignored and not isinstance(param, ShardedParameter):
            _check_param(name, param)


def _check_param(name: str, param: nn.Parameter) -> None:
    if is_lazy(param):
        raise NotOfferedError(
            f"{name}: expected a parameter with a shape; got a lazy one. Run the module once "
            "before fully_shard."
        )
    if isinstance(param, DTensor):
        raise NotOfferedError(
            f"{name}: expected a plain parameter; got a DTensor of {param.device_mesh}. Use "
            "fullshard.shard, which combines with tensor parallelism."
        )
    if param.dim() == 0:
        raise MisuseValueError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {name} to a 1D tensor with numel equal to 1."
        )
    if not param.is_contiguous():
        raise NotOfferedError(
            f"FSDP does not support non-contiguous parameters yet: {name}, {param.shape=}, "
            f"{param.stride()=}. Make it contiguous before, or pass it in ignored_params."
        )


def _check_placements(
    module: nn.Module, ignored: set[int], place: Callable[[nn.Parameter], Any] | None
) -> None:
    for param in module.parameters() if place is not None else ():
        if id(param) in ignored or isinstance(param, ShardedParameter):
            continue
        wanted = place(param)  # type: ignore[misc]
        if wanted is not None and not -param.ndim <= wanted.dim < param.ndim:
            raise MisuseAssertionError(
                f"Shard dim {wanted.dim} is invalid for {param.ndim}D tensor: {param.shape}"
            )


def _check_values(root: nn.Module) -> None:
    left: list[list[str]] = []  # in the order in which units are wrapped
    seen: set[int] = set()
    places = list(root.named_parameters())
    for unit, _ in reversed(list(marked(root))):
        own = {id(param) for param in unit.parameters() if id(param) not in seen}
        seen |= own
        names = [name for name, param in places if param.is_meta and id(param) in own]
        if names:
            left.insert(0, names)
    if left:
        raise MisuseError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {left[0]} and those of {len(left) - 1} other "
            "units.\nFor example, call module.to_empty(device) to materialize to device and call "
            "module.reset_parameters() on each module to initialize values."
        )


def _on_engine(module: nn.Module, engine: Engine) -> None:
    if outermost(module) is module:
        _apply_settings(module, engine)
        state_dicts.show_rows(module)
        _show_placements(module)


def _show_placements(root: nn.Module) -> None:
    """Sets `param.placements` and `param.device_mesh`, the form of parameters in state dicts.

    Scripts use them to distribute a checkpoint's tensors.
    """
    wrapped = record_of(root)
    mesh, on = wrapped.mesh, wrapped.extra["mesh"]
    if on is None and mesh.replicate == 1 and torch.distributed.is_initialized():
        on = rows.device_mesh(mesh, default_device().type)
    if on is None:
        return
    ignored = ignored_ids(root)
    for param in root.parameters():
        if id(param) not in ignored:
            shown: Any = param
            shown.device_mesh = on
            shown.placements = rows.placements_of(mesh, on.ndim, param.dim())


def _apply_settings(root: nn.Module, engine: Engine) -> None:
    """Applies the setters' values to the engine of the outermost module."""
    all_of = [wrapped.extra for _, wrapped in marked(root)]
    if not any(extra.get("sync", True) for extra in all_of):
        engine.gradients.sync = Sync.NONE
    elif not any(extra.get("all_reduce", True) for extra in all_of):
        engine.gradients.sync = engine.gradients.inner_sync
    else:
        engine.gradients.sync = Sync.ALL
    for module, wrapped in marked(root):
        if id(module) in engine.index_of:
            unit = engine.units[engine.index_of[id(module)]]
            unit.divisor = wrapped.extra.get("shared", {}).get("divisor")  # FSDP1's has none


def _close_open(module: nn.Module) -> None:
    """Shows shards everywhere in the model."""
    for inner in outermost(module).modules() if _OPEN else ():
        _close(inner)


def _close(module: nn.Module) -> None:
    if module in _OPEN:
        del _OPEN[module]
        record_of(module).extra.pop("open").close()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method other than forward run with full parameters.

    Raises:
        MisuseValueError: The module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise MisuseValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = vars(module).get("forward")
        object.__setattr__(module, "forward", method)  # the hooks of forward run around it
        try:
            return module(*args, **kwargs)
        finally:
            if before is None:
                vars(module).pop("forward", None)
            else:
                object.__setattr__(module, "forward", before)

    object.__setattr__(module, method_name, call)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """No effect: models of one process share no buffers."""
    _check_all(modules)
