"""Tensor and expert parallelism of Hugging Face models, by transformers' own plans.

    model with values --cut_over_axes--> DTensors, and forwards that exchange    on every rank
    model on meta ------one_place------> one rank's part of the model            for plans, traces

`mesh_of` defines which ranks form an axis. The output layer, and the embedding that is tied to it,
stay whole over the tensor axis, because recipes compute the loss in it (see recipes/head.py).
Only this file uses private or new names of transformers.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import is_distributed, mesh_without_groups
from fullshard.engine.cuts import EXPERT_AXES, Cut
from fullshard.engine.homes import compute_device
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh, Topology, groups_of_experts, mesh_of
from fullshard.transport.groups import shared_by, summed

Rules = Mapping[str, str]  # styles of transformers by names of modules and parameters

_SHARED = "_fullshard_shared"  # attribute of an input of several layers
_CUT_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
_DISPATCH, _KEYS = "ep_dispatch_experts", ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True)
class LocalModel:
    """One rank's part of a model before sharding.

    Attributes:
        model: The model, on meta.
        parts: Number of different parts of each parameter that is cut.
        experts: Names of the parameters that the ranks of the expert axis divide.
        num_sequence_parts: Number of ranks that divide a sequence.
        on_gpu: Whether the ranks compute on GPUs.
    """

    model: nn.Module
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    experts: frozenset[str] = frozenset()
    num_sequence_parts: int = 1
    on_gpu: bool = False

    def meshes(self, config: ShardConfig, topology: Topology) -> dict[str, Mesh]:
        """The meshes of experts, by name of the parameter."""
        if not self.experts:
            return {}
        mesh = mesh_of(config, topology)
        return dict.fromkeys(self.experts, mesh.of_experts(groups_of_experts(config, mesh)))


_PLACES: WeakKeyDictionary[nn.Module, dict[Any, LocalModel]] = WeakKeyDictionary()


def cut_over_axes(model: nn.Module, config: ShardConfig, topology: Topology) -> Any:
    """Cuts a whole model over the tensor and expert axes; returns the mesh for `fs.shard`.

    Parameters that are cut become new objects. A collective.

    Raises:
        ConfigError: The model has no plan for an axis, or its sizes do not divide.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = mesh_of(config, topology)
    tensor, expert = rules_of(model, config)
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    _check_sizes(model, tensor, expert, config)
    device = compute_device(model).type
    sizes = (mesh.replicate, mesh.shard, mesh.inner)
    dense = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
    apply_tensor_parallelism(model, dense["tensor"], dict(tensor))
    _sum_once(model, tensor, dense["tensor"].get_group())
    if expert:
        groups = groups_of_experts(config, mesh)
        shape, names = (len(groups), len(groups[0])), ("others", EXPERT_AXES[0])
        experts = init_device_mesh(device, shape, mesh_dim_names=names)[EXPERT_AXES[0]]
        apply_expert_parallelism(model, experts, dense["tensor"], dict(expert))
        for name, style in expert.items():
            if style == _DISPATCH and config.tensor == 1:
                # Each rank gets only rows of its own experts, so it need not mask others.
                vars(model.get_submodule(name))["_is_expert_parallel"] = False
    return dense["replicate", "shard"]


def _sum_once(model: nn.Module, tensor: Rules, group: Any) -> None:
    """Replaces transformers' forwards of linear layers by ones without DTensors.

    Layers with one input, such as q, k and v, sum its gradient over the tensor axis once.
    """
    modules = dict(model.named_modules())
    for name, style in tensor.items():
        layer: Any = modules.get(name)
        if type(layer) is nn.Linear and style in _CUT_ADAPTER:
            how = layer, group, layer.forward
            object.__setattr__(layer, "forward", partial(_linear, how, style == "colwise"))


def _linear(how: tuple[Any, Any, Any], has_rows: bool, x: torch.Tensor) -> torch.Tensor:  # noqa: FBT001
    """The outputs of this rank's rows, or the sum of all ranks' columns."""
    layer, group, theirs = how
    if is_distributed(x) or torch.compiler.is_compiling():
        return theirs(x)
    weight, bias = _local(layer.weight), _local(layer.bias)
    if has_rows:
        return F.linear(_shared(x, group), weight, bias)
    found = summed(F.linear(x, weight), group)
    return found if bias is None else found + bias.to(found.dtype)  # autocast lowers `found`


def _local(param: Any) -> Any:
    return param.to_local() if is_distributed(param) else param


def _shared(x: torch.Tensor, group: Any) -> torch.Tensor:
    """One result for a tensor that several layers use, so that its gradient is summed once."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if x.is_leaf:  # caching would create a reference cycle
        return shared_by(x, group)
    version, found = vars(x).get(_SHARED, (-1, None))
    if found is None or version != x._version:  # new, or written in place since
        found = shared_by(x, group)
        vars(x)[_SHARED] = x._version, found
    return found


def one_place(model: nn.Module, config: ShardConfig) -> LocalModel:
    """One rank's part of the model; the parts of all ranks have equal shapes.

    Raises:
        ConfigError: The model has no plan for an axis, or its sizes do not divide.
    """
    if config.tensor * config.expert == 1:
        return LocalModel(model)
    made = _PLACES.setdefault(model, {})
    # users freeze and cast between plans
    key = config.tensor, config.expert, *((p.dtype, p.requires_grad) for p in model.parameters())
    if key not in made:
        made[key] = _one_place(model, config)
    return made[key]


def _one_place(model: nn.Module, config: ShardConfig) -> LocalModel:
    tensor, expert = rules_of(model, config)
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    _check_sizes(model, tensor, expert, config)
    local = copy.deepcopy(model)
    parts: dict[str, int] = {}
    experts: set[str] = set()
    for axis, size, rules in _axes(config, tensor, expert):
        mesh = mesh_without_groups(axis, size)
        params = dict(local.named_parameters())
        for name, style in rules.items():
            module_name, _, leaf = name.rpartition(".")
            if name not in params:
                module = local.get_submodule(name)
                if isinstance(module, nn.Embedding):  # has a forward of its own, as on the ranks
                    module.forward = partial(nn.Embedding.forward, module)
                continue
            module = local.get_submodule(module_name)
            ALL_PARALLEL_STYLES[style].shard_param(module, leaf, mesh)
            param: Any = module._parameters[leaf]
            cut = Cut.of(param)
            if cut is not None:
                parts[name] = cut.num_parts
                experts.update([name] if cut.spreads_experts else [])
                part = nn.Parameter(param.to_local(), requires_grad=param.requires_grad)
                module._parameters[leaf] = part
    return LocalModel(local, parts, frozenset(experts))


def _axes(config: ShardConfig, tensor: Rules, expert: Rules) -> list[tuple[str, int, Rules]]:
    """Name, number of parts and rules of each axis."""
    experts = EXPERT_AXES[0], config.expert * config.tensor, expert
    return [("tensor", config.tensor, tensor), experts]


# ---- transformers' plans


def has_experts(model: Any) -> bool:
    """Whether the model has a plan for the expert axis."""
    return _DISPATCH in (getattr(model, "ep_plan", None) or {}).values()


def rules_of(model: Any, config: ShardConfig) -> tuple[Rules, Rules]:
    """The rules of the tensor and the expert axis; {} for an axis of one rank.

    Raises:
        ConfigError: The model has no plan for an axis, or transformers is too old.
    """
    tensor: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    for axis, size, there in (
        ("tensor", config.tensor, bool(tensor)),
        ("expert", config.expert, has_experts(model)),
    ):
        if size > 1 and not there:
            raise ConfigError(
                f"{axis}: expected 1 for {type(model).__name__}, for which transformers has no "
                f"{axis}-parallel plan; got {size}. Remove it, so that these ranks shard all "
                "parameters, or parallelize the model yourself as in docs/mesh.md."
            )
    if config.tensor * config.expert > 1:
        _require_plans()
    expert: dict[str, str] = dict(model.ep_plan) if config.expert > 1 else {}
    is_expert = re.compile(rf"(?:{'|'.join(map(re.escape, expert))})(?:\..+)?").fullmatch
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's
    prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is inner)
    whole = _whole_parts(inner)
    tensor = {
        name: style
        for name, style in (tensor if config.tensor > 1 else {}).items()
        if name not in whole and not (expert and is_expert(name))
    }
    if not (tensor or expert):
        return {}, {}
    plans = map(inner._expand_parallel_plan, (tensor, expert))
    tensor, expert = ({prefix + name: style for name, style in p.items()} for p in plans)
    known: dict[str, Any] = dict(model.named_modules()) | dict(model.named_parameters())
    for name in (*tensor, *expert):
        if name not in known or (name in expert and hasattr(known[name], "base_layer")):
            raise ConfigError(
                "tensor, expert: expected parameters that are not tied, and experts without "
                f"adapters; got {name}, which is tied or adapted. Untie it, name other layers in "
                "target_modules (peft's all-linear adapts experts too), or remove the axis."
            )
    return _with_adapters(model, tensor), expert


def _with_adapters(model: nn.Module, rules: Rules) -> Rules:
    """The rules of a model whose layers may have adapters (peft).

        colwise   x ---------> base_layer, rows of this rank       all of lora_A, rows of lora_B
        rowwise   part of x -> base_layer, columns of this rank    columns of lora_A, all of lora_B

    Raises:
        ConfigError: An adapted layer is divided in another way.
    """
    modules, found = dict(model.named_modules()), dict(rules)
    for name, style in rules.items():
        layer: Any = modules.get(name)
        if not hasattr(layer, "base_layer"):
            continue
        if style not in _CUT_ADAPTER:
            raise ConfigError(
                "tensor: expected adapters of layers that are divided as "
                f"{' or '.join(_CUT_ADAPTER)}; got {name} ({style}). Remove it from the adapters' "
                "target_modules, or remove tensor."
            )
        side = _CUT_ADAPTER[style]
        del found[name]
        for inner in ("base_layer", *(f"{side}.{key}" for key in getattr(layer, side))):
            params = dict(layer.get_submodule(inner).named_parameters(recurse=False))
            found |= {f"{name}.{inner}.{leaf}": style for leaf in params}
            found[f"{name}.{inner}"] = style
    return found


def _require_plans() -> None:
    try:
        import_module("transformers.distributed.expert_parallel")
    except ImportError as error:
        raise ConfigError(
            "tensor, expert: expected transformers 5.21 or newer, whose plans divide the model; "
            f"got an older one: {error}. Run pip install -U transformers, or remove both."
        ) from error


def _whole_parts(model: Any) -> set[str]:
    """Names of the output layer, and of the embedding that it is tied to."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return set()
    whole = (head, embedding) if head.weight is embedding.weight else (head,)
    return {name for name, module in model.named_modules() if any(module is one for one in whole)}


def _check_sizes(model: Any, tensor: Rules, expert: Rules, config: ShardConfig) -> None:
    """Raises ConfigError if an axis does not divide everything that it cuts."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    settings, params = model.config.get_text_config(), dict(model.named_parameters())
    for axis, size, rules in _axes(config, tensor, expert):
        if size == 1:
            continue
        sizes: dict[str, int] = {}
        if any(name.rpartition(".")[2] in _KEYS for name in rules):
            names = ("num_attention_heads", "num_key_value_heads")
            sizes |= {name: n for name in names if (n := getattr(settings, name, None))}
        for name, style in rules.items():
            if name in params:
                sizes |= _cut_size(name, model, ALL_PARALLEL_STYLES[style])
        uneven = next((item for item in sizes.items() if item[1] % size), None)
        if uneven is not None:
            _refuse_uneven(axis, config, uneven, math.gcd(*sizes.values()))


def _cut_size(name: str, model: nn.Module, style: Any) -> dict[str, int]:
    """The size of a parameter that a style cuts, by words for it; {} if it cuts nothing."""
    module_name, _, leaf = name.rpartition(".")
    alone = copy.copy(model.get_submodule(module_name))
    param: Any = alone._parameters[leaf]
    whole = nn.Parameter(torch.empty(param.shape, device="meta"), requires_grad=False)
    vars(alone)["_parameters"] = {leaf: whole}
    style.shard_param(alone, leaf, mesh_without_groups("tensor", 1))
    cut = Cut.of(alone._parameters[leaf])
    if cut is None or cut.placements[0].is_replicate():
        return {}
    placement: Any = cut.placements[0]
    size = cut.shape[placement.dim] // getattr(placement, "split_factor", 1)
    return {f"dimension {placement.dim} of {name}": size}


def _refuse_uneven(axis: str, config: ShardConfig, uneven: tuple[str, int], common: int) -> None:
    asked, beside = (config.tensor, 1) if axis == "tensor" else (config.expert, config.tensor)
    fitting = [n for n in range(1, common + 1) if common % (n * beside) == 0] or [1]
    nearest = min(fitting, key=lambda n: abs(n - asked))
    times = f" (expert {asked} x tensor {beside} ranks divide it)" if beside > 1 else ""
    raise ConfigError(
        f"{axis}: expected a divisor of {uneven[1]}, {uneven[0]}; got {asked}{times}. The nearest "
        f"size that divides everything on this axis is {nearest}."
    )
