"""fs.shard: from a model and a configuration to a plan and an engine that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import Transport as TransportKind
from fullshard.config.values import WrapKind
from fullshard.engine._torch_compat import register_guard_types
from fullshard.engine.collectives import make_transport, resolve_transport
from fullshard.engine.engine import ATTRIBUTE, Engine, engine_of
from fullshard.engine.model_spec import chosen_modules, spec_of
from fullshard.engine.optimizers import watch_optimizers
from fullshard.engine.order import trace_order
from fullshard.engine.parameter import ShardedGradient, ShardedParameter, ShardedTensor
from fullshard.engine.state import hook_loading
from fullshard.errors import ConfigError, EngineError, UnsupportedModelError
from fullshard.planner.events import Recorder
from fullshard.planner.mesh import Topology
from fullshard.planner.plan import Plan, make_plan


def shard_model(
    model: nn.Module,
    config: ShardConfig,
    topology: Topology,
    recorder: Recorder,
    *,
    sample: Any = None,
) -> Engine:
    """Shard a model in place over the default process group.

    Args:
        model: Whole parameters, equal on all ranks, on one device.
        config: How.
        topology: How many ranks there are; checked against the process group.
        recorder: Told of every event.
        sample: Arguments of forward, traced for the order of units; None learns it in step one.

    Raises:
        ConfigError: Mesh, units or process group do not fit.
        UnsupportedModelError: The model holds something that cannot be sharded.
    """
    if hasattr(model, ATTRIBUTE):
        raise EngineError(
            f"fs.shard: expected a model that was not sharded; {type(model).__name__} is. "
            "Call fs.shard once a model."
        )
    _refuse_nested_engine(model)
    _check_devices(model)
    if config.transport is not TransportKind.FAKE:
        _check_world(topology)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    kind = resolve_transport(config.transport, topology.world_size, device)
    config = ShardConfig.of(config, transport=kind)
    plan = plan_model(model, config, topology)
    if sample is not None:
        plan = trace_order(model, plan, sample)
    transport = make_transport(config, plan.mesh)
    register_guard_types(ShardedParameter, ShardedGradient, ShardedTensor)
    engine = Engine(model, plan, config, transport, recorder)
    object.__setattr__(model, ATTRIBUTE, engine)
    hook_loading(model, engine)
    watch_optimizers(engine)
    return engine


def plan_model(model: nn.Module, config: ShardConfig, topology: Topology) -> Plan:
    """The plan for a module, which may be on meta."""
    chosen = None
    if not isinstance(config.wrap, WrapKind | tuple):
        chosen = chosen_modules(model, cast("Callable[[nn.Module], bool]", config.wrap))
    return make_plan(spec_of(model, config.ignore), config, topology, chosen)


def plan_of(model: nn.Module) -> Plan:
    """The plan that a sharded model runs."""
    return engine_of(model).plan


def _refuse_nested_engine(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name and hasattr(module, ATTRIBUTE):
            raise EngineError(
                f"fs.shard: {name} inside {type(model).__name__} is sharded already. "
                "Shard the outermost model alone; its units are found inside."
            )


def _check_devices(model: nn.Module) -> None:
    on_meta = [name for name, param in model.named_parameters() if param.is_meta]
    if on_meta:
        others = f" and {len(on_meta) - 1} more" if len(on_meta) > 1 else ""
        raise UnsupportedModelError(
            f"{on_meta[0]}{others}: expected parameters with values; got some on meta. "
            "Initialising a meta model shard by shard is not yet supported; materialise it first "
            "(model.to_empty, then its own initialisation or load_state_dict)."
        )
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        devices.setdefault(param.device, name)
    if len(devices) > 1:
        (one, first), (other, second), *_ = devices.items()
        raise UnsupportedModelError(
            f"{second}: expected all parameters on one device; it is on {other}, {first} on {one}. "
            "Move the model before fs.shard."
        )


def _check_world(topology: Topology) -> None:
    initialized = dist.is_available() and dist.is_initialized()
    have = dist.get_world_size() if initialized else 1
    if have != topology.world_size:
        raise ConfigError(
            f"WORLD_SIZE: expected a process group of {topology.world_size} ranks; there is "
            f"{'one of ' + str(have) if initialized else 'none'}. Call "
            "torch.distributed.init_process_group before fs.shard."
        )


def reset(model: nn.Module) -> None:
    """Close what an exception left open. Automatic at the next forward; here for users."""
    engine_of(model).runtime.reset()


def no_sync(model: nn.Module) -> Any:
    """Context: every backward inside keeps its gradients on this rank, unreduced."""
    return engine_of(model).gradients.no_sync()
