"""torch's `FullyShardedDataParallel` interface on this engine.

    before   from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    after    from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP

`FSDP(module, ...)` is a wrapper around the module, as in torch: `.module` is the module. Parameters
and state dicts have the module's own names. `docs/migrate/fsdp1.md` lists the differences and
reasons.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fullshard.compat import (
    MisuseAssertionError,
    MisuseError,
    MisuseValueError,
    NoSuchPartError,
    NotOfferedError,
    state_dicts,
)
from fullshard.compat.fsdp1 import options
from fullshard.compat.fsdp1.options import TrainingState, auto_wrap
from fullshard.compat.state_dicts import HoldsShards, Wanted
from fullshard.compat.wrapping import (
    Wrapped,
    copy_first_values,
    engine_for,
    everyones,
    ignored_ids,
    mark,
    marked,
    materialize,
    names_in,
    outermost,
    own_rank,
    place,
    record_of,
    settings_of,
)
from fullshard.config.environment import current_variables
from fullshard.engine import clip
from fullshard.engine._torch_compat import graph_task_id
from fullshard.engine.engine import Engine
from fullshard.engine.full_state import whole_params
from fullshard.engine.model_spec import places_of
from fullshard.engine.state import unsharded
from fullshard.planner.layout import clean_name
from fullshard.planner.mesh import row_of
from fullshard.planner.schedule import Sync

logger = logging.getLogger(__name__)

FSDP_PREFIX = "_fsdp_wrapped_module."
_FLAT = ("_handle", "_all_handles", "_flat_param", "params")  # scripts search for this attribute
# Arguments that inner modules do not get from auto_wrap_policy.
_OURS = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")
_HOMOGENEOUS = {  # torch requires one value per model: (stored, given)
    "use_orig_params": "_use_orig_params",
    "limit_all_gathers": "limit_all_gathers",
    "full_in_eval": "_use_full_prec_in_eval",
}


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_FULL = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)


class FullyShardedDataParallel(HoldsShards, nn.Module):
    """A module whose parameters, gradients and optimizer states are sharded over the ranks.

    The arguments are torch's, with these differences:

    Args:
        module: The module to wrap.
        process_group: None, a group of all ranks, (shard group, replicate group), or a group of
            this rank alone, whose unit stays whole and is not reduced (experts of a mixture).
        sharding_strategy: Strategy of this unit; units of one model may differ.
        cpu_offload: Read from the outermost unit.
        auto_wrap_policy: Selects the inner modules that are units; None: this module is one unit.
        backward_prefetch: BACKWARD_PRE gathers one unit ahead; BACKWARD_POST and None do not.
        mixed_precision: Dtypes of this unit. Gradients are always accumulated in float32.
        ignored_modules: Modules that stay whole on every rank; their gradients are not reduced.
        param_init_fn: Initialises modules on meta; None: their reset_parameters().
        device_id: Device to which the module is moved first.
        sync_module_states: Whether to broadcast rank 0's values.
        forward_prefetch: No effect: the engine always gathers one unit ahead in forward.
        limit_all_gathers: No effect: the plan's slots bound the memory.
        use_orig_params: No effect: the module's own parameters are always visible.
        ignored_states: Ignored modules or parameters.
        device_mesh: A mesh with one axis, or (replicate, shard).
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _OURS}
        given["sharding_strategy"] = options.strategy_of(sharding_strategy)
        given["cpu_offload"] = cpu_offload or CPUOffload()
        super().__init__()
        self._set_up(module, given, auto_wrap_policy, (ignored_modules, ignored_states))

    def _set_up(
        self, module: nn.Module, given: dict[str, Any], policy: Any, to_ignore: tuple[Any, Any]
    ) -> None:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            warnings.warn(
                "FSDP will not all-gather parameters for containers that do not implement "
                f"forward: {module}",
                stacklevel=4,
            )
        strategy = options.STRATEGIES[given["sharding_strategy"]]
        group, mesh = given["process_group"], given["device_mesh"]
        sizes = options.mesh_options(strategy, group, mesh)
        order = sizes.pop("order", ())
        ignored = options.ignored_params(module, *to_ignore)
        if policy is not None:
            auto_wrap(module, policy, ignored, given, FullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        if options.is_alone(group):
            own = options.own_modules(self, ignored)
            ignored |= {id(p) for m in own for p in m._parameters.values() if p is not None}
        modules = options.own_modules(self, ignored)
        device = place(self, modules, given["device_id"])
        materialize(modules, device, given["param_init_fn"])
        if given["sync_module_states"]:
            copy_first_values(modules, ignored)
        precision = given["mixed_precision"] or MixedPrecision()
        everywhere = precision.cast_forward_inputs
        casts = everywhere or precision.cast_root_forward_inputs
        looks_ahead = given["backward_prefetch"] is BackwardPrefetch.BACKWARD_PRE
        wrapped = Wrapped(
            strategy=strategy,
            settings=settings_of(precision),
            options={
                **sizes,
                "offload": "cpu" if given["cpu_offload"].offload_params else None,
                "backward_prefetch": int(looks_ahead),
            },
            order=order,
            ignored=names_in(self, ignored),
            alone=options.is_alone(group),
            inputs=precision.param_dtype if casts else None,
            root_only=not everywhere,
            extra={
                **given,
                "full_in_eval": current_variables().get("FSDP_USE_FULL_PREC_IN_EVAL") == "1",
                "state_dict": _FULL,
            },
            check=_check_before_run,
        )
        self._is_started = False
        wrapped.on_engine.append(FullyShardedDataParallel._start)
        mark(self, wrapped)
        state_dicts.show_rows(self, when=state_dicts.asked_by_torch)
        if isinstance(group, tuple):
            group, self._inter_node_pg = group
        self.process_group: Any = group if group is not None else torch.distributed.group.WORLD
        alone = self.process_group is None
        self.rank = 0 if alone else self.process_group.rank()
        self.world_size = 1 if alone else self.process_group.size()
        self.register_load_state_dict_post_hook(_clean_keys)
        self.compute_device = device
        self.mixed_precision = precision
        for name in ("sharding_strategy", "cpu_offload", "backward_prefetch", "forward_prefetch"):
            setattr(self, name, given[name])
        self.limit_all_gathers = given["limit_all_gathers"]
        self._comm_hook: Any = None
        self._comm_hook_state: Any = None

    # ---- the wrapper

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpoint wrapper."""
        wrapped = self._fsdp_wrapped_module
        return getattr(wrapped, "_checkpoint_wrapped_module", wrapped)

    @property
    def training_state(self) -> TrainingState:
        """The phase of the model: idle, forward or backward."""
        engine = record_of(self).engine_ref()
        if engine is None:
            return TrainingState.IDLE
        if engine.unsharded:
            return TrainingState.SUMMON_FULL_PARAMS
        busy = any(unit.swapped for unit in engine.units)
        return TrainingState.FORWARD_BACKWARD if busy else TrainingState.IDLE

    @property
    def _state_dict_type(self) -> StateDictType:
        return record_of(self).extra["state_dict"].state_dict_type

    def __getattr__(self, name: str) -> Any:
        """Forwards missing attributes to the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            if name in _FLAT:
                raise NoSuchPartError(
                    f"{name}: expected an attribute of this module; flat parameters do not exist "
                    "here. parameters() are the module's own; p.to_local() is this rank's part, "
                    "p.full_tensor() the whole, p.grad the reduced gradient."
                ) from None
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields them under the module's own names."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(FSDP_PREFIX, ""), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields them under the module's own names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(FSDP_PREFIX, ""), buffer

    def train(self, mode: bool = True) -> FullyShardedDataParallel:
        """Switches the mode; FSDP_USE_FULL_PREC_IN_EVAL=1 evaluates in the stored dtype."""
        super().train(mode)
        wrapped = record_of(self)
        low = wrapped.extra.get("in_training")
        if wrapped.extra["full_in_eval"] and (low is None) is not mode:
            if low is None:
                wrapped.extra["in_training"] = (wrapped.settings, wrapped.inputs)
                wrapped.settings, wrapped.inputs = settings_of(MixedPrecision()), None
            else:
                wrapped.settings, wrapped.inputs = wrapped.extra.pop("in_training")
            self._cast_buffers(low=mode)
            record_of(outermost(self)).needs_plan = True
        return self

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        if self.training_state not in (state if isinstance(state, list) else [state]):
            raise MisuseValueError(
                f"expected to be in states {state} but current state is {self.training_state}"
            )

    def check_is_root(self) -> bool:
        """Whether no other FSDP module contains it."""
        return outermost(self) is self

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The FSDP modules at or below a module."""
        found: list[Any] = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [inner for inner in found if outermost(inner) is inner] if root_only else found

    def _start(self, engine: Engine) -> None:
        """Casts the unit's buffers, and warns about float16 without a gradient scaler."""
        state_dicts.show_rows(self, when=state_dicts.asked_by_torch)  # may be new parameters
        if self._is_started:
            return
        self._is_started = True
        if "in_training" not in record_of(self).extra:
            self._cast_buffers(low=True)
        if self.mixed_precision.param_dtype is torch.float16 and not _has_scaler():
            warnings.warn(
                "FSDP: param_dtype is float16 and there is no gradient scaler, so small gradients "
                "become zero. Create a ShardedGradScaler() before the training loop, or use "
                "bfloat16.",
                stacklevel=2,
            )
        if len(engine.units) == 1 and own_rank() == 0:
            logger.info(
                "FSDP: the model is one unit, gathered as a whole. Pass auto_wrap_policy (such as "
                "ModuleWrapPolicy({Block})) to gather it block by block."
            )

    def _cast_buffers(self, *, low: bool) -> None:
        """Casts buffers to buffer_dtype, or back."""
        dtype = self.mixed_precision.buffer_dtype
        own = options.own_modules(self._fsdp_wrapped_module, ignored_ids(self))
        for module in own if dtype is not None else ():
            before = vars(module).setdefault(BUFFER_DTYPES, {})
            for leaf, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    stored = before.setdefault(leaf, buffer.dtype)
                    module._buffers[leaf] = buffer.to(dtype if low else stored)

    # ---- training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Context in which backwards accumulate unreduced gradients on each rank."""
        if not self.check_is_root():
            raise MisuseError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        with engine_for(self).gradients.no_sync(Sync.NONE):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients to a global norm of at most `max_norm`; returns the norm before."""
        engine = engine_for(self)
        if not self.check_is_root():
            raise MisuseError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        if any(unit.swapped for unit in engine.units):
            raise MisuseAssertionError("clip_grad_norm_: expected no forward or backward under way")
        if all(param.grad is None for param in self.parameters()):
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {own_rank()} with no gradients -- "
                "returning the total norm in the default dtype torch.float32",
                stacklevel=2,
            )
            return torch.zeros((), dtype=torch.float32, device=engine.device)
        return clip.clip_grad_norm_(self, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces gradients with a hook.

        It is called as `hook(state, full)` under NO_SHARD, otherwise as `hook(state, full, part)`.
        The hook receives the flat buffer of one unit after another, in reduce_dtype. It must divide
        too.
        """
        if not self.check_is_root():
            raise MisuseAssertionError("register_comm_hook can only be called on a root instance.")
        modules = self.fsdp_modules(self)
        for module in modules:
            if row_of(record_of(module).strategy).hybrid:
                raise MisuseAssertionError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{module.sharding_strategy}"
                )
            if module._comm_hook is not None:
                raise MisuseAssertionError("A communication hook is already registered")
        if not callable(hook):
            raise MisuseValueError(f"The communication hook must be callable but got {hook}")
        for module in modules:
            module._comm_hook, module._comm_hook_state = hook, state
        wrapped = record_of(self)
        wrapped.on_engine.append(lambda _, engine: engine.reduce_with(partial(hook, state)))
        engine = wrapped.engine_ref()
        if engine is not None:
            engine.reduce_with(partial(hook, state))

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Applies `fn` to every module, with full parameters."""
        self._assert_state(TrainingState.IDLE)
        with self.summon_full_params(self):
            return _apply_below(self, fn)

    # ---- full parameters

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Context with full parameters. A collective on entry and exit."""
        if with_grads and offload_to_cpu:
            raise NotOfferedError(
                "summon_full_params: with_grads=True, offload_to_cpu=True is not "
                "supported. Leave one of the two out."
            )
        if writeback and rank0_only:
            raise NotOfferedError(
                "writeback=True and rank0_only=True is not supported yet: the other ranks would "
                "not see what the first one writes. Pass writeback=False, or rank0_only=False."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters "
                "being redundantly copied to CPU memory for GPUs sharing the same CPU memory, "
                "which risks CPU OOM. We recommend using offload_to_cpu=True with rank0_only=True.",
                stacklevel=3,
            )
        with contextlib.ExitStack() as stack:
            for engine, inside in _engines(module):
                _check_can_summon(inside[0], engine)
                if offload_to_cpu and any(unit.plan.mesh.shard == 1 for unit in engine.units):
                    raise NotOfferedError(
                        "offload_to_cpu=True and NO_SHARD is not supported yet: parameters are "
                        "whole where they are. Leave offload_to_cpu out."
                    )
                if offload_to_cpu and engine.device.type != "cpu":
                    warnings.warn(
                        "summon_full_params: offload_to_cpu=True has no effect; whole parameters "
                        f"are on {engine.device}. For a copy on the CPU call "
                        "fullshard.full_state_dict(model).",
                        stacklevel=3,
                    )
                chosen = {engine.index_of.get(id(one)) for one in inside[: None if recurse else 1]}
                units = [unit for unit in engine.units if unit.plan.index in chosen]
                if rank0_only and own_rank() != 0:
                    names = {m.piece.name for u in units for g in u.groups for m in g.members}
                    for _ in whole_params(engine, names):
                        pass  # only takes part in the collective
                    continue
                root = outermost(inside[0])
                stack.enter_context(
                    unsharded(root, writeback=writeback, units=units, with_grads=with_grads)
                )
            yield

    # ---- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict of the current type (FULL_STATE_DICT by default).

        It is always sharded for torch.distributed.checkpoint.state_dict, as with torch's class.
        """
        wanted = _wanted(record_of(self))
        if state_dicts.asked_by_torch():
            wanted = Wanted(StateDictType.SHARDED_STATE_DICT, mesh=wanted.mesh)
        state = state_dicts.state_dict(self, wanted, super().state_dict, args, kwargs)
        prefix = state_dicts.prefix_of(args, kwargs)
        _rename(state, prefix + FSDP_PREFIX, prefix)
        _restore_buffer_dtypes(self, state, prefix)
        return state

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the attribute name that keys omit."""
        return {"": FSDP_PREFIX.removesuffix(".")}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._state_dict_type is StateDictType.LOCAL_STATE_DICT:
            state_dicts.take_local(engine_for(self), state_dict, prefix, self)
        _rename(state_dict, prefix, prefix + FSDP_PREFIX)
        return super()._load_from_state_dict(state_dict, prefix, *rest)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the state-dict type; returns the previous settings."""
        model_kind, optim_kind = _CONFIGS[state_dict_type]
        configs: Any = state_dict_config or model_kind(), optim_state_dict_config or optim_kind()
        names = "state_dict_config", "optim_state_dict_config"
        for what, wanted, got in zip(names, (model_kind, optim_kind), configs, strict=True):
            if type(got) is not wanted:
                raise MisuseError(f"Expected {what} of type {wanted} but got {type(got)}")
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for _, wrapped in marked(module):
            for config in configs if wrapped.extra["device_mesh"] is not None else ():
                if hasattr(config, "_use_dtensor"):  # settings in torch's form
                    config._use_dtensor = True
            wrapped.extra["state_dict"] = StateDictSettings(state_dict_type, *configs)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the FSDP modules at or below a module.

        Raises:
            MisuseAssertionError: The settings differ.
        """
        found: StateDictSettings | None = None
        for _, wrapped in marked(module):
            one = wrapped.extra["state_dict"]
            if found is not None and one != found:
                raise MisuseAssertionError(
                    f"All FSDP modules must have the same state dict settings.Got {one} and "
                    f"{found}."
                )
            found = one
        return found or _FULL

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Context that sets the state-dict type."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for _, wrapped in marked(module):
                wrapped.extra["state_dict"] = before

    # ---- optimizer state dicts

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's states by parameter name, of the current type."""
        return state_dicts.optim_state_dict(model, optim, optim_state_dict, _optim_wanted(model))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Converts a state dict for `optim.load_state_dict`."""
        state = optim_state_dict
        if _optim_wanted(model).rank0_only:
            state = _from_rank0(state, group)
        made = state_dicts.state_dict_to_load(model, optim, state, by_name=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Full states by parameter name, on the CPU."""
        _warn_optim_input(optim_input)
        wanted = Wanted(to_cpu=True, rank0_only=rank0_only)
        return state_dicts.optim_state_dict(model, optim, None, wanted)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """States by parameter name, as DTensors of rows."""
        return state_dicts.optim_state_dict(
            model, optim, None, Wanted(StateDictType.SHARDED_STATE_DICT)
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a result of `full_optim_state_dict` on all ranks."""
        optim = _optimizer_of(model, optim, optim_input)
        return state_dicts.state_dict_to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """This rank's part of a result of `sharded_optim_state_dict`."""
        return state_dicts.state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part of a result of `full_optim_state_dict` on rank 0."""
        optim = _optimizer_of(model, optim, optim_input)
        state = _from_rank0(full_optim_state_dict, group)
        return state_dicts.state_dict_to_load(model, optim, state)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Converts a state dict's keys between names and numbers."""
        if optim_input is not None:
            optim = _optimizer_of(model, optim, optim_input)
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        return state_dicts.rekeyed(optim_state_dict, model, optim, to_names=to_names)


# ---- helpers


def _apply_below(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`nn.Module.apply` without the `apply` of inner FSDP modules."""
    for child in module.children():
        _apply_below(child, fn)
    fn(module)
    return module


def _check_before_run(root: nn.Module) -> None:
    for module, wrapped in marked(root):
        places = places_of(module)
        for name, shape in wrapped.shapes.items():
            new = places.get(name)
            if type(new) is nn.Parameter and new.shape != shape:
                raise MisuseError(
                    f"Cannot writeback when the parameter shape changes: {clean_name(name)} is "
                    f"expected to have {tuple(shape)} as when it was wrapped; got "
                    f"{tuple(new.shape)}. Change shapes before FSDP(...)."
                )
    for name, shown in _HOMOGENEOUS.items():
        values = {wrapped.extra[name] for _, wrapped in marked(root) if name in wrapped.extra}
        if len(values) > 1:
            raise MisuseValueError(
                f"Expects one homogeneous value for {shown} but got both {values}."
            )


def _clean_keys(_: nn.Module, incompatible: Any) -> None:
    for keys in incompatible:
        keys[:] = [key.replace(FSDP_PREFIX, "") for key in keys]


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Replaces a prefix of keys and keeps their order."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key[len(old) :]] = state.pop(key)


def _wanted(wrapped: Wrapped, *, optim: bool = False) -> Wanted:
    settings: StateDictSettings = wrapped.extra["state_dict"]
    config = settings.optim_state_dict_config if optim else settings.state_dict_config
    kind = settings.state_dict_type
    if kind is StateDictType.LOCAL_STATE_DICT and wrapped.extra["device_mesh"] is not None:
        raise MisuseError(
            "DeviceMesh is not compatible with LOCAL_STATE_DICT. Use SHARDED_STATE_DICT."
        )
    to_cpu = getattr(config, "offload_to_cpu", False)
    rank0_only = getattr(config, "rank0_only", False)
    return Wanted(kind, to_cpu, rank0_only, wrapped.extra["device_mesh"])


def _optim_wanted(model: nn.Module) -> Wanted:
    for _, wrapped in marked(model):
        return _wanted(wrapped, optim=True)
    return Wanted()


def _from_rank0(state: Any, group: Any = None) -> Any:
    """Broadcasts rank 0's value. A collective."""
    if options.is_alone(group):
        return state
    return everyones(state if own_rank() == 0 else None)[0]


def _optimizer_of(model: nn.Module, optim: Any, optim_input: Any) -> torch.optim.Optimizer:
    """An optimizer that numbers parameters like the user's."""
    _warn_optim_input(optim_input, stacklevel=4)
    if optim is not None:
        return optim
    given = list(optim_input) if optim_input is not None else list(model.parameters())
    # SGD modifies groups
    copied: list[Any] = [dict(one) if isinstance(one, dict) else one for one in given]
    return torch.optim.SGD(copied, lr=0.0)


def _warn_optim_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You "
            "may remove it from your code without changing its functionality.",
            FutureWarning,
            stacklevel=stacklevel,
        )


def _engines(module: nn.Module) -> list[tuple[Engine, list[nn.Module]]]:
    """The engines of a module, each with its FSDP modules, outer ones first."""
    found: dict[int, tuple[Engine, list[nn.Module]]] = {}
    for inner, _ in marked(module):
        engine = engine_for(inner)
        found.setdefault(id(engine), (engine, []))[1].append(inner)
    return list(found.values())


def _check_can_summon(module: nn.Module, engine: Engine) -> None:
    if any(unit.swapped for unit in engine.units) or graph_task_id() != -1:
        raise MisuseAssertionError("Cannot manually unshard parameters during forward/backward")
    index = engine.index_of.get(id(module))
    members = [] if index is None else [m for g in engine.units[index].groups for m in g.members]
    if members and type(members[0].param) is nn.Parameter:
        raise MisuseAssertionError(
            "Cannot manually unshard parameters when already unsharding parameters"
        )


BUFFER_DTYPES = "_fullshard_buffer_dtypes"  # dtypes of a module's buffers before they were cast


def _restore_buffer_dtypes(root: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Restores the buffers' original dtypes in a state dict."""
    for name, module in root.named_modules():
        for leaf, dtype in vars(module).get(BUFFER_DTYPES, {}).items():
            key = prefix + clean_name(f"{name}.{leaf}" if name else leaf)
            if key in state:
                state[key] = state[key].to(dtype)


def _has_scaler() -> bool:
    scalers = (torch.amp.GradScaler,)
    return any(issubclass(type(one), scalers) and one.is_enabled() for one in gc.get_objects())
