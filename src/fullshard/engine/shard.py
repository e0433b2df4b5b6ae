"""fs.shard: makes a plan from a model and a configuration, and an engine that runs it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import ShardConfig
from fullshard.config.values import TransportKind, WrapKind
from fullshard.engine._torch_compat import plain, storage_key
from fullshard.engine.attributes import ModuleTensors, tensors_in
from fullshard.engine.axes import one_place
from fullshard.engine.cuts import check_cuts
from fullshard.engine.engine import ATTRIBUTE, NO_DDP, Engine, engine_of
from fullshard.engine.homes import DeviceHomes, compute_device
from fullshard.engine.initial import InitialValues, place_others
from fullshard.engine.model_spec import (
    NO_MESHES,
    chosen_modules,
    has_memory,
    places_of,
    spec_of,
)
from fullshard.engine.modules import apply_dtypes, apply_recompute, convert_reentrant
from fullshard.engine.optimizers import WATCHED
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.placing import Masters
from fullshard.engine.replicas import check_equal_start
from fullshard.engine.state import hook_loading
from fullshard.engine.tracing import trace_order
from fullshard.errors import ConfigError, EngineError, UnsupportedModelError
from fullshard.planner.mesh import ROWS, Mesh, Topology, mesh_of
from fullshard.planner.plan import Plan, make_plan, units_of
from fullshard.planner.schedule import Recorder, Sync
from fullshard.planner.spec import matches
from fullshard.planner.units import UnitSettings
from fullshard.transport.base import Transport, home_of
from fullshard.transport.groups import all_values, make_transport, own_group, resolve_transport

logger = logging.getLogger(__name__)

Recut = Callable[[Mapping[str, nn.Parameter], Plan, int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class ShardInputs:
    """Further inputs of `shard_model`.

    Attributes:
        sample: Arguments of forward, traced for the order of units; None: learned in the first
            step.
        weights: A Hugging Face folder for a model on meta; None: the model's initialisation.
        settings: Overrides per unit, by module name ("" is the root).
        alone: Whether only this rank has the model, despite a process group.
        recut: Called with parameters by name, the plan and this rank; returns (n_local,) values of
            existing shards by first name. None: every parameter must be whole.
    """

    sample: Any = None
    weights: Any = None
    settings: Mapping[str, UnitSettings] = field(default_factory=dict)
    alone: bool = False
    recut: Recut | None = None


NOTHING = ShardInputs()
LARGE_BYTES = 64 << 20  # of a model that is worth a search for deleted ones


def shard_model(
    model: nn.Module,
    config: ShardConfig,
    topology: Topology,
    recorder: Recorder,
    given: ShardInputs = NOTHING,
) -> Engine:
    """Shards a model in place over the default process group.

    Args:
        model: A model with whole parameters on one device, equal on all ranks; or on meta.
        config: The configuration.
        topology: Number and order of ranks.
        recorder: Records every event.
        given: Sample, weights and overrides.

    Raises:
        ConfigError: Mesh, units or process group do not fit.
        UnsupportedModelError: A part of the model cannot be sharded.
    """
    if torch.is_inference_mode_enabled():
        raise EngineError(
            "fs.shard inside torch.inference_mode(): expected a call outside, because tensors "
            "created inside cannot be trained. Use it around evaluations only."
        )
    refuse_nested_engine(model)
    refuse_shared_memory(model, _storage_keys(model))
    if given.recut is None:
        _refuse_parts(model)
    device = compute_device(model)
    if config.transport is not TransportKind.FAKE:
        _check_world(alone=given.alone)
    mesh = mesh_of(config, topology)
    experts = _meshes_of_experts(model, config, mesh)
    refuse_sample(given.sample, max(one.inner for one in (mesh, *experts.values())))
    kind = resolve_transport(config, [mesh, *experts.values()], device)
    config = ShardConfig.of(config, transport=kind)
    plan = plan_model(model, config, topology, given.settings, experts)
    if given.sample is not None:
        plan = trace_order(model, plan, given.sample)
    meshes = dict.fromkeys([plan.mesh, *(unit.mesh for unit in plan.units)])
    if ROWS[plan.strategy].hybrid and plan.mesh.replicate == 1 and config.replicate is None:
        _say_one_host(plan)
    transports = {mesh: make_transport(config, mesh) for mesh in meshes}
    check_equal_start(model, plan, config, transports[plan.mesh], device)
    _free_deleted(plan)
    homes = DeviceHomes.of(plan.homes, device, config.offload)
    masters = Masters(homes, home_of(transports), plan.units)
    values = _values(model, plan, transports, masters, given.weights)
    if given.recut is not None:
        shards = given.recut(places_of(model), plan, transports[plan.mesh].rank)
        masters.reads |= {name: lambda to, n=name: to.copy_(shards.pop(n)) for name in shards}
    engine = Engine(model, plan, config, transports, recorder, masters)
    if values is not None:
        place_others(model, values, device)
    object.__setattr__(model, ATTRIBUTE, engine)
    object.__setattr__(model, "_ddp_params_and_buffers_to_ignore", _NoDDP())  # read by DDP
    apply_dtypes(model, config)
    apply_recompute(model, plan.recompute, config.activation_checkpointing.kind)
    convert_reentrant(model)
    engine.handles += hook_loading(model, engine)
    WATCHED.add(engine)
    return engine


class _NoDDP:
    """Makes DDP fail at once; it would wait for ranks whose shards differ."""

    def __iter__(self) -> Any:
        raise EngineError(NO_DDP)


def plan_model(
    model: nn.Module,
    config: ShardConfig,
    topology: Topology,
    settings: Mapping[str, UnitSettings] | None = None,
    experts: Mapping[str, Mesh] = NO_MESHES,
) -> Plan:
    """Makes the plan of a module, which may be on meta; `experts`: their meshes by name.

    Of a model that is not cut over the configured axes yet, it is the plan of one place on them.
    """
    place = one_place(model, config)
    model, experts = place.model, {**experts, **place.meshes(config, topology)}
    spec = spec_of(model, config.ignore, experts, place.parts)
    return make_plan(spec, config, topology, _chosen(model, config), settings)


def check_units(model: nn.Module, config: ShardConfig) -> None:
    """Raises what `plan_model` raises about units, before other axes cut the parameters."""
    spec = spec_of(model, config.ignore).without(config.ignore)
    units_of(spec, config, _chosen(model, config))


def _chosen(model: nn.Module, config: ShardConfig) -> tuple[str, ...] | None:
    if isinstance(config.wrap, WrapKind | tuple):
        return None
    return chosen_modules(model, cast("Callable[[nn.Module], bool]", config.wrap))


def _meshes_of_experts(model: nn.Module, config: ShardConfig, mesh: Mesh) -> dict[str, Mesh]:
    """Checks DTensors against the axes of the mesh; returns the meshes of experts, by name.

    A collective if there are experts.
    """
    rank = dist.get_rank() if mesh.world_size > 1 and dist.is_initialized() else 0
    place = mesh.place(rank)
    ranks = mesh.order or range(mesh.world_size)
    first = place - place % mesh.inner
    params = [(n, p) for n, p in places_of(model).items() if not matches(n, config.ignore)]
    data, inner = ranks[place % mesh.inner :: mesh.inner], ranks[first : first + mesh.inner]
    experts = check_cuts(params, data, inner)
    kinds = list(dict.fromkeys(experts.values()))
    all_kinds = all_values(kinds, own_group("all", [range(mesh.world_size)])) if kinds else []
    groups = [set(every) for every in zip(*all_kinds, strict=True)]
    meshes = dict(zip(kinds, map(mesh.of_experts, groups), strict=True))
    return {name: meshes[ranks] for name, ranks in experts.items()}


def refuse_sample(sample: Any, num_ranks: int) -> None:
    """Refuses a sample for a model that other axes of so many ranks cut."""
    if sample is not None and num_ranks > 1:
        raise ConfigError(
            f"sample: expected a mesh of only the axes replicate and shard; got {num_ranks} ranks "
            "along others, which is not yet supported with a sample. Leave it out; the first step "
            "then records the order of units."
        )


def _values(
    model: nn.Module, plan: Plan, transports: dict[Mesh, Transport], masters: Masters, weights: Any
) -> InitialValues | None:
    """The initial values of a model on meta; None if it has values."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        if weights is not None:
            raise ConfigError(
                f"weights: expected a model on meta; got {weights!r} for a model that has "
                "values. Build it under torch.device('meta'), or leave weights out."
            )
        return None
    values = InitialValues(model, plan, transports, masters)
    if weights is None:
        values.initialise(transports[plan.mesh])
    else:
        values.read(weights)
    return values


def _say_one_host(plan: Plan) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(
            "%s: all %d ranks are on one host, so there is one copy, sharded over all of them "
            "(replicate 1). Set replicate for more copies.",
            *(plan.strategy, plan.mesh.world_size),
        )


def refuse_nested_engine(model: nn.Module) -> None:
    if hasattr(model, ATTRIBUTE):
        raise EngineError(
            f"fs.shard: expected a model that was not sharded; {type(model).__name__} is. Call "
            "fs.shard once per model."
        )
    for name, module in model.named_modules():
        if name and hasattr(module, ATTRIBUTE):
            raise EngineError(
                f"fs.shard: {name} inside {type(model).__name__} is already sharded. Shard the "
                "outermost model only; its units are found automatically."
            )
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            logger.warning(
                "%s: in evaluation, its outputs at positions of src_key_padding_mask are those of "
                "training. torch sets them to 0 on a fast path, which hooks turn off.",
                name or type(module).__name__,
            )


def refuse_shared_memory(model: nn.Module, params: Mapping[int, str]) -> None:
    """Refuse buffers that are views of a parameter, and warn about such attributes.

    They keep the current values. An attribute may be set again in each forward, or by a hook.
    `params`: the parameters' names, by `storage_key`.
    """

    def owner_of(tensor: torch.Tensor) -> str | None:
        if isinstance(tensor, nn.Parameter) or not has_memory(tensor):
            return None
        return params.get(storage_key(plain(tensor)))

    for name, buffer in model.named_buffers():
        if (owner := owner_of(buffer)) is not None:
            raise UnsupportedModelError(
                f"{name}: expected a buffer with its own memory; it shares that of {owner!r}, "
                "which fs.shard cuts. Register a copy, or compute it in forward."
            )
    for path, module in model.named_modules():
        found = {} if module._forward_pre_hooks else ModuleTensors([module]).named()
        for name, held in found.items():
            for owner in filter(None, map(owner_of, tensors_in(held))):
                logger.warning(
                    "fs.shard: %s shares the memory of %s, and keeps its current values unless "
                    "each forward computes it. Register a copy (clone) if this is intended.",
                    f"{path}.{name}".lstrip("."),
                    owner,
                )


def _storage_keys(model: nn.Module) -> dict[int, str]:
    named = ((name, plain(param)) for name, param in model.named_parameters())
    return {storage_key(param): name for name, param in named if has_memory(param)}


def _refuse_parts(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, ShardedParameter):
            raise EngineError(
                f"fs.shard: expected a whole model; {name} was cut with another model that shares "
                "it, or by an fs.shard that failed. Put models that share parts into one module "
                "(nn.ModuleDict), shard that, and call its parts. After a failure, build it again."
            )


def _free_deleted(plan: Plan) -> None:
    """Frees models that were deleted, before the memory of a large one is allocated.

    They are cycles of Python objects, which Python searches for when many objects were created.
    """
    if WATCHED.has_owners and sum(row.num_bytes for row in plan.memory) >= LARGE_BYTES:
        gc.collect()


def _check_world(*, alone: bool) -> None:
    """Checks that this rank does not train apart from the others of its launch.

    Args:
        alone: Whether the model's process group has only this rank.

    Raises:
        ConfigError: The launch has more ranks than the model's process group.
    """
    have = 1 if alone else dist.get_world_size() if dist.is_initialized() else 0
    launch = read_launch_environment()
    if launch is not None and launch.world_size > max(have, 1):
        raise ConfigError(
            f"WORLD_SIZE: expected a process group of the {launch.world_size} ranks of "
            f"{launch.launcher}; the model has {f'one of {have}' if have else 'none'}. Call "
            "torch.distributed.init_process_group for all of them first, and pass the outermost "
            "module no smaller process_group. To train in smaller groups on purpose, delete the "
            "launcher's variables, such as RANK and WORLD_SIZE, from os.environ before."
        )


def reset(model: nn.Module) -> None:
    """Close a step that an exception left open (the next forward does so automatically)."""
    engine_of(model).runtime.reset()


def no_sync(model: nn.Module, *, outer_only: bool = False) -> Any:
    """Context in which every backward keeps its gradients on this rank, unreduced.

    Until the next backward outside, the `p.grad` of parameters with such a gradient can be dropped
    (`zero_grad`), but reading it and `optimizer.step()` raise an EngineError.

    Args:
        model: A sharded model.
        outer_only: Reduce over the shard axis; only the sum over replicas waits for the next
            backward outside. Stores a shard of the gradients instead of whole gradients.
    """
    gradients = engine_of(model).gradients
    return gradients.no_sync(gradients.inner_sync if outer_only else Sync.NONE)
