"""Converts modules and Hugging Face configurations to `ModelSpec`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fullshard.config.values import DType, nearest
from fullshard.engine._torch_compat import is_distributed, plain, saved_buffers
from fullshard.engine.computed import Computed
from fullshard.engine.cuts import Cut
from fullshard.engine.hugging_face import build_on_meta
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import ConfigError, UnsupportedModelError
from fullshard.planner.mesh import Mesh
from fullshard.planner.spec import ModelSpec, ModuleSpec, ParamSpec, check_globs, matches

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
NO_MESHES: Mapping[str, Mesh] = {}


def spec_of(
    model: nn.Module,
    ignore: Iterable[str] = (),
    meshes: Mapping[str, Mesh] = NO_MESHES,
    parts: Mapping[str, int] | None = None,
) -> ModelSpec:
    """Describe a module, which may be on meta.

    Args:
        model: The module.
        ignore: Globs of modules or parameters that are left out.
        meshes: The meshes of experts, by name of the parameter.
        parts: `ParamSpec.parts` by name, of parameters that are no DTensors.

    Raises:
        UnsupportedModelError: A parameter cannot be sharded; names it, the reason and the solution.
    """
    globs = tuple(ignore)
    known = [name for name in (*dict(model.named_modules()), *places_of(model)) if name]
    check_globs("ignore", globs, known, "modules or parameters")
    read = [part for module in model.modules() for part in _read_by(module)]
    read_directly = {id(inner) for part in read for inner in part.modules()}
    modules = tuple(
        ModuleSpec(
            name=name,
            kind=type(module).__name__,
            is_container=isinstance(module, CONTAINERS),
            can_be_unit=not isinstance(module, NEVER_CALLED) and id(module) not in read_directly,
            reads_weight_in_backward=not _looks_up(module),
        )
        for name, module in model.named_modules()
    )
    names: dict[int, list[str]] = defaultdict(list)
    params: dict[int, nn.Parameter] = {}
    for name, param in places_of(model).items():
        if not matches(name, globs):
            _refuse_scripted(model.get_submodule(name.rpartition(".")[0]), name)
            names[id(param)].append(name)
            params[id(param)] = param
    found = (param_spec(tuple(names[key]), params[key]) for key in names)
    of = parts or {}
    specs = tuple(replace(p, mesh=meshes.get(p.name), parts=of.get(p.name, p.parts)) for p in found)
    places = nn.Module.named_parameters(model)
    known = [(n, p) for n, p in places if id(p) in names or type(p) is nn.Parameter]
    listed = {id(param) for _, param in known}
    if missing := [every[0] for key, every in names.items() if key not in listed]:
        raise UnsupportedModelError(
            f"{missing[0]}: expected modules that compare unequal; got two equal ones, of which "
            "torch's parameters() returns one. Compare by identity (a dataclass: eq=False)."
        )
    refuse_overlaps(memory_of(known, {n for n, p in known if id(p) not in names}))
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    saved = {id(b): b.nbytes for module in model.modules() for b in saved_buffers(module)}
    return ModelSpec(type(model).__name__, modules, specs, buffer_bytes, sum(saved.values()))


def _refuse_scripted(module: nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{name}: expected a module of Python; got a scripted one, whose parameters cannot be "
            f"replaced. Use the original module, or exclude it from sharding: ignore=['{name}']."
        )


def _read_by(module: nn.Module) -> list[nn.Module]:
    """The descendants whose weights a module may read without calling them.

    A forward assigned to the instance (TRL's and Liger's fused losses) multiplies by the head's
    weight in chunks, so these modules stay in its unit.
    """
    if isinstance(module, nn.MultiheadAttention):
        return [module]
    if "forward" in vars(module):
        return [child for child in module.children() if hasattr(child, "weight")]
    return []


def _looks_up(module: nn.Module) -> bool:
    """Whether the backward needs only indices: an embedding as torch has it."""
    forward = getattr(module.forward, "__func__", None)
    changes = module._forward_hooks or module._forward_pre_hooks or is_parametrized(module)
    return isinstance(module, nn.Embedding) and forward is nn.Embedding.forward and not changes


def places_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every place of every parameter; tied parameters have several.

    Uses torch's base method, because wrappers such as CheckpointWrapper override it with names that
    `get_submodule` does not accept.

    Raises:
        UnsupportedModelError: A module contains itself.
    """
    try:
        return dict(nn.Module.named_parameters(model, remove_duplicate=False))
    except RecursionError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected a tree of modules; got a module that contains "
            "itself, because torch registers an attribute such as self.parent (also a "
            "weakref.proxy) as a child. Set it with object.__setattr__(self, 'parent', parent)."
        ) from error


def param_spec(names: tuple[str, ...], param: nn.Parameter) -> ParamSpec:
    """Describe one parameter.

    Raises:
        UnsupportedModelError: The parameter cannot be sharded.
    """
    reason = None
    dtype = str(param.dtype).removeprefix("torch.")
    if isinstance(param, ShardedParameter):  # sharded before: see compat/wrapping.py
        return ParamSpec(names, tuple(param.record.piece.shape), DType(dtype), param.requires_grad)
    if isinstance(param, Computed):
        raise UnsupportedModelError(
            f"{names[0]}: expected a parameter of this model alone; another sharded model has it, "
            "too. Put models that share parts into one module (nn.ModuleDict), shard that, and "
            "call its parts."
        )
    if type(param) is not nn.Parameter and not is_distributed(param):
        reason = f"a plain nn.Parameter; got {type(param).__name__}"
    elif dtype not in {member.value for member in DType}:
        reason = f"a floating point parameter of 16 to 64 bits; got {dtype}"
    elif param.layout is not torch.strided:
        reason = f"a dense parameter; got layout {param.layout}"
    elif param.grad is not None:
        reason = "no gradient yet; got one. Call zero_grad() before fs.shard"
    elif getattr(param, "_backward_hooks", None):
        reason = (
            "no hook on the parameter's gradient; got one made by register_hook, which would see "
            "one rank's unreduced gradient. Use register_post_accumulate_grad_hook"
        )
    if reason:
        alone = " (nothing then sums its gradient over ranks)" if param.requires_grad else ""
        raise UnsupportedModelError(
            f"{names[0]}: expected {reason}. To exclude it: ignore=['{names[0]}']{alone}."
        )
    cut = Cut.of(param)
    parts = 1 if cut is None else cut.num_parts
    shape = tuple(plain(param).shape)
    return ParamSpec(names, shape, DType(dtype), param.requires_grad, parts=parts)


class Memory(NamedTuple):
    """Addresses of a parameter's values, in the order for sorting; does not keep the memory."""

    start: int
    place: int  # of the parameter in its model
    stop: int
    name: str
    param: int  # its id
    is_cut: bool
    storage: StorageWeakRef


def memory_of(
    params: Iterable[tuple[str, nn.Parameter]], ignored: Container[str] = ()
) -> list[Memory]:
    """Where parameters are stored that are not shards, by name; `ignored`: those not to be cut."""
    found: list[Memory] = []
    for name, param in params:
        local = plain(param)
        if param.is_meta or isinstance(param, ShardedParameter) or not has_memory(local):
            continue  # a DTensor may be empty on this rank
        storage = local.untyped_storage()
        start = storage.data_ptr() + int(local.storage_offset()) * local.itemsize
        stop = start + (local.numel() if local.is_contiguous() else 1) * local.itemsize
        is_cut, memory = name not in ignored, StorageWeakRef(storage)
        found.append(Memory(start, len(found), stop, name, id(param), is_cut, memory))
    return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values with addresses."""
    return not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel() > 0


def refuse_overlaps(memory: Iterable[Memory]) -> None:
    """Refuse different parameters that share memory, if one is cut."""
    for first, second in pairwise(sorted(memory)):
        is_other = first.param != second.param and (first.is_cut or second.is_cut)
        if is_other and second.start < first.stop:
            raise UnsupportedModelError(
                f"{second.name}: expected a Parameter with its own memory; it shares that of "
                f"{first.name} but is another object. Tie parameters by assigning the same "
                "Parameter."
            )


def chosen_modules(model: nn.Module, choose: Callable[[nn.Module], bool]) -> tuple[str, ...]:
    """The names of modules for which the user's callable is true, without the root."""
    return tuple(name for name, module in model.named_modules() if name and choose(module))


def meta_model(config: Any) -> nn.Module:
    """Builds a Hugging Face causal language model on meta, without memory.

    Args:
        config: A transformers configuration, or a mapping with `model_type`.

    Raises:
        ConfigError: transformers is missing, or the configuration is not one of transformers'.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model: expected transformers to be installed for a Hugging Face configuration; it is "
            "not. Run pip install 'fullshard[hf]'."
        ) from error
    if isinstance(config, Mapping):
        fields = dict(config)
        kind = fields.pop("model_type", None)
        known = list(transformers.CONFIG_MAPPING.keys())
        if kind not in known:
            near = nearest(str(kind), known)
            hint = f" Did you mean '{near}'?" if near else ""
            raise ConfigError(f"model.model_type: expected a known type; got {kind!r}.{hint}")
        config = transformers.AutoConfig.for_model(kind, **fields)
    if not isinstance(config, transformers.PretrainedConfig):
        raise ConfigError(
            "model: expected a torch module, a transformers configuration or a mapping with "
            f"model_type; got {type(config).__name__}."
        )
    return build_on_meta(config)
