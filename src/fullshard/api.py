"""The public functions. They connect the layers and contain no logic of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import loading, saving
from fullshard.checkpoint.storage import storage_path
from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import TransportKind
from fullshard.engine import shard as engine_shard
from fullshard.engine import state
from fullshard.engine.axes import cut_over_axes
from fullshard.engine.clip import clip_grad_norm_ as clip_grad_norm_
from fullshard.engine.clip import global_norm as global_norm
from fullshard.engine.cuts import EXPERT_AXES
from fullshard.engine.engine import engine_of
from fullshard.engine.full_state import full_optimizer_state_dict as full_optimizer_state_dict
from fullshard.engine.full_state import full_state_dict as full_state_dict
from fullshard.engine.full_state import load_full_state as load_full_state
from fullshard.engine.model_spec import meta_model
from fullshard.engine.owned import owned as owned
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.shard import no_sync as no_sync
from fullshard.engine.shard import reset as reset
from fullshard.engine.state import num_parameters as num_parameters
from fullshard.errors import ConfigError, ShardedTensorError
from fullshard.formats import orbax
from fullshard.observe import watchdog
from fullshard.observe.hang import EventRing
from fullshard.planner.mesh import Topology
from fullshard.planner.optimizers import of_bytes
from fullshard.planner.plan import Plan
from fullshard.transport.groups import places_of_meshes, topology_of

# Axes of a configuration without their sizes.
AXES: dict[str, Any] = {"replicate": None, "shard": None, "expert": 1, "tensor": 1}
MESH_AXES = {  # names of the axes that fs.shard accepts: ours and other tools'
    **dict.fromkeys(("replicate", "dp_replicate"), "replicate"),
    **dict.fromkeys(("shard", "dp_shard", "fsdp"), "shard"),
    **dict.fromkeys(EXPERT_AXES, "expert"),
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """The place of a shard in its parameter.

    Attributes:
        name: The parameter's first name.
        shape: Its global shape.
        start: This rank's first element, in row-major order of `local_shape`.
        stop: One past this rank's last element.
        unit: The unit that gathers it.
        local_shape: Its shape on this rank after other axes of the mesh cut it; `shape` without
            such axes.
        placements: DTensor's placement of each other axis: {"tensor": "Shard(dim=0)"}.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    unit: str
    local_shape: tuple[int, ...]
    placements: Mapping[str, str]


def shard(
    model: nn.Module,
    config: ShardConfig | Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    sample: Any = None,
    weights: Any = None,
    **overrides: Any,
) -> nn.Module:
    """Shard a model in place over the ranks of the default process group.

    With `tensor` or `expert`, transformers' own plans cut a Hugging Face model first. Ranks of a
    tensor axis must see the same batch, and the optimizer must be created afterwards
    (docs/mesh.md).

    Args:
        model: Model with whole parameters that are equal on all ranks.
        config: A ShardConfig, a mapping of its fields, or None for the defaults.
        mesh: None, sizes (replicate, shard), or a torch DeviceMesh with axes of these names: all
            of it, or its part `mesh["replicate", "shard"]` where the parameters are DTensors along
            its other axes. An axis named expert, along which experts are DTensors, belongs to the
            ranks that share dense parameters: `mesh["shard", "expert"]` (docs/mesh.md).
        sample: Example arguments of forward (a mapping, a sequence or one value), traced under
            fake tensors to find the order of units. None: the first step records it.
        weights: A Hugging Face folder for a model on meta, or a checkpoint, read by each rank's
            byte ranges. None: the model's own initialisation, with the random numbers of an
            unsharded model.
        **overrides: Fields of ShardConfig.

    Returns:
        The same model. Its parameters are shards, its forward and backward gather and reduce.

    Raises:
        ConfigError: A setting is impossible; nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"fs.shard: expected a torch.nn.Module; got {type(model).__name__}. Shard each model "
            "separately, or put the layers into a module whose forward calls them."
        )
    settings = ShardConfig.of(config, **overrides)
    check_supported(settings)
    is_path = isinstance(weights, str | PathLike)
    checkpoint = Path(weights) if is_path and loading.is_checkpoint(weights) else None
    given = engine_shard.ShardInputs(sample, None if checkpoint else weights)
    if mesh is None and settings.tensor * settings.expert > 1:
        engine_shard.refuse_nested_engine(model)  # before parameters are replaced
        engine_shard.refuse_sample(sample, settings.tensor * settings.expert)
        engine_shard.check_units(model, settings)
        mesh = cut_over_axes(model, settings, _topology(settings, None))
        settings = settings.model_copy(update=AXES)
    settings = _with_mesh(settings, mesh)
    ring = EventRing()
    engine = engine_shard.shard_model(model, settings, _topology(settings, mesh), ring, given)
    watchdog.watch(ring, [unit.title for unit in engine.plan.units])
    if checkpoint is not None:
        loading.load(checkpoint, model, None)
    return model


def plan(
    model_or_config: Any,
    config: ShardConfig | Mapping[str, Any] | None = None,
    *,
    world_size: int,
    local_world_size: int | None = None,
    optimizer_bytes: float | None = None,
    **overrides: Any,
) -> Plan:
    """Plan what `shard` would do on `world_size` ranks, without ranks, weights or a GPU.

    Args:
        model_or_config: A module (on meta or not), a transformers configuration, or a mapping with
            `model_type`.
        config: As for `shard`.
        world_size: Total number of ranks.
        local_world_size: Number of ranks per host; None: all.
        optimizer_bytes: Bytes of optimizer state per trainable element; None: as AdamW.
        **overrides: Fields of ShardConfig.
    """
    settings = ShardConfig.of(config, **overrides)
    model = model_or_config
    if not isinstance(model, nn.Module):
        model = meta_model(model)
    found = engine_shard.plan_model(model, settings, Topology(world_size, local_world_size))
    return found if optimizer_bytes is None else found.trained_by(of_bytes(optimizer_bytes))


def unsharded(model: nn.Module, writeback: bool = True) -> Any:  # noqa: FBT001, FBT002 contract
    """Context in which every parameter is whole. A collective at both ends."""
    return state.unsharded(model, writeback=writeback)


def save(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    wait: bool = True,
    **state: Any,
) -> Path:
    """Save a checkpoint that any number of ranks and any strategy can load. A collective.

    Args:
        folder: Folder that all ranks see, or a URL of an object store (`s3://bucket/run`).
        model: Sharded model.
        optimizer: Optimizer of its parameters.
        step: With a step, the checkpoint is `folder/step-00000100`; without, `folder` itself.
        wait: Return when the checkpoint is complete. False: return when its state is copied; the
            rest happens in the background, one save at a time, and `fs.wait()` or the next save
            raises its error.
        **state: Numbers, texts, lists, mappings, tensors, objects with `state_dict()`. Values that
            differ between ranks are saved per rank, and restored on the same number of ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It could not be written; earlier complete checkpoints are untouched.
    """
    settings = saving.SaveSettings(step=step, wait=wait)
    return saving.save(storage_path(folder), model, optimizer, state, settings)


def wait() -> None:
    """Wait until no save is running.

    Raises:
        CheckpointError: The last save failed.
    """
    saving.SAVES.wait()


def load(
    path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint. Each rank reads only the bytes of its shards. A collective.

    Args:
        path: A checkpoint; a folder of step-* folders, of which the newest complete and undamaged
            one is loaded (skipped ones are logged); or a tree of arrays that orbax wrote, for a
            model without optimizer.
        model: Model that is sharded with any strategy over any number of ranks.
        optimizer: Optimizer of the same class and groups as the saved one. With an optimizer, the
            ranks' random generators are restored too, on the same number of ranks.

    Returns:
        The saved `state` (objects as their state dicts), and "step".

    Raises:
        CheckpointError: There is no checkpoint, or it belongs to another model; names the tensor.
    """
    return orbax.load(storage_path(path), model, optimizer)


def memory_stats(model: nn.Module) -> dict[str, dict[str, int]]:
    """Bytes that the engine allocated on this rank: {kind: {"now", "peak"}, "total": ...}."""
    return engine_of(model).memory_stats()


def sharding(param: torch.Tensor) -> Sharding:
    """Name, global shape, range and unit of a shard.

    Raises:
        ShardedTensorError: The tensor is not a parameter of a sharded model.
    """
    if not isinstance(param, ShardedParameter):
        raise ShardedTensorError(
            f"fs.sharding: expected a parameter of a sharded model; got {type(param).__name__}."
        )
    record, piece = param.record, param.record.piece
    by_axis = record.cut.by_axis if record.cut is not None else {}
    span, shape = (piece.start, piece.stop), tuple(piece.shape)
    return Sharding(piece.name, record.shape, *span, record.unit, shape, by_axis)


def _with_mesh(settings: ShardConfig, mesh: Any) -> ShardConfig:
    """Set the sizes of the axes from `mesh`."""
    if mesh is None:
        return settings
    if any(getattr(settings, axis) != nothing for axis, nothing in AXES.items()):
        raise ConfigError(
            f"mesh: expected a mesh or the sizes of its axes ({', '.join(AXES)}); got both. Drop "
            "one."
        )
    if isinstance(mesh, Sequence) and not isinstance(mesh, str):
        sizes = list(mesh)
        if len(sizes) == 1:
            sizes = [1, *sizes]
        if len(sizes) != 2:
            raise ConfigError(f"mesh: expected (replicate, shard) or (shard,); got {tuple(mesh)}.")
        return ShardConfig.of(settings, replicate=sizes[0], shard=sizes[1])
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None or not set(names) <= set(MESH_AXES):
        raise ConfigError(
            "mesh: expected a DeviceMesh with axes among replicate, shard and expert; got "
            f"{names or type(mesh).__name__}. Pass the part with these axes: mesh['shard'] or "
            "mesh['replicate', 'shard']. Parameters may be DTensors along others."
        )
    axes: Any = mesh
    sizes = {"replicate": 1, "shard": 1, "expert": 1}
    given = [MESH_AXES[name] for name in names]
    if given != [name for name in sizes if name in given]:
        raise ConfigError(
            "mesh: expected axes in the order (replicate, shard, expert), so that neighbouring "
            f"ranks share a shard group; got ({', '.join(names)})."
        )
    sizes |= {name: axes.size(i) for i, name in enumerate(given)}
    shard = sizes["shard"] * sizes["expert"]
    return ShardConfig.of(settings, replicate=sizes["replicate"], shard=shard)


def _topology(settings: ShardConfig, mesh: Any) -> Topology:
    """The ranks of the process group or environment; under `fake`, those of the configuration."""
    if settings.transport is TransportKind.FAKE:
        return Topology((settings.replicate or 1) * (settings.shard or 1))
    if dist.is_initialized():
        world = dist.get_world_size()
    else:
        environment = read_launch_environment()
        world = environment.world_size if environment else 1
    ranks = getattr(mesh, "mesh", None)
    if ranks is None:
        return topology_of(world)
    return topology_of(world, *places_of_meshes(ranks.flatten().tolist(), world))
