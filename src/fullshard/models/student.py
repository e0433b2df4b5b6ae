"""A student cut out of its teacher: layers dropped, experts kept by how much they are used.

    layers   0 1 2 3 4 5 6 7   keep 3   ->  0, 4, 7               spread evenly, both ends kept
    experts  tokens that a layer's router sends to each expert, counted on training data:
             9 4 7 1 8 0 2 5   keep 4   ->  0, 2, 4, 7            in their own order

Weights are copied tensor by tensor from the teacher's files, so neither model is ever in memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.config.schema import DistillConfig
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.errors import ConfigError
from fullshard.formats.hugging_face import ExportSettings, open_safetensors, write_weights
from fullshard.formats.source import IN_RUN, Entry, whole_or_nothing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STUDENT = "student"  # its folder in the run's

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.gate\.weight$")
_EXPERT_KEYS = ("num_experts", "num_local_experts")
_KNOWN = ("qwen3_moe", "mixtral")  # their files have these names


@dataclass(frozen=True)
class KeptParts:
    """The parts of a teacher that are kept.

    Attributes:
        layers: Indices of the teacher's layers that are kept.
        experts: Indices of the kept experts by layer; empty: all experts.
        shares: By layer, share of its tokens that went to the kept experts.
    """

    layers: tuple[int, ...]
    experts: Mapping[int, tuple[int, ...]]
    shares: Mapping[int, float]

    def lines(self) -> Iterator[str]:
        """A description of the kept layers and experts."""
        yield f"layers {', '.join(map(str, self.layers))} of the teacher are kept"
        for layer, experts in self.experts.items():
            yield (
                f"layer {layer}: experts {', '.join(map(str, experts))}, which got "
                f"{self.shares[layer]:.0%} of its tokens"
            )


def is_cut(distill: DistillConfig | None) -> bool:
    """Whether the student is cut out of the teacher."""
    return distill is not None and (distill.experts is not None or distill.layers is not None)


def student_config(teacher: PretrainedConfig, distill: DistillConfig) -> PretrainedConfig:
    """The configuration of the student.

    Raises:
        ConfigError: The teacher has fewer parts than requested, or is of another type.
    """
    made: Any = copy.deepcopy(teacher)
    if made.model_type not in _KNOWN:
        raise ConfigError(
            f"distill.experts, distill.layers: expected a teacher of type {' or '.join(_KNOWN)}, "
            f"got {made.model_type}. Give the student its own configuration."
        )
    layers = kept_layers(made.num_hidden_layers, distill.layers)
    if kinds := getattr(made, "layer_types", None):
        made.layer_types = [kinds[layer] for layer in layers]
    if (dense := getattr(made, "mlp_only_layers", None)) is not None:
        every = made.decoder_sparse_step
        made.mlp_only_layers = [n for n, i in enumerate(layers) if i in dense or (i + 1) % every]
        made.decoder_sparse_step = 1
    made.num_hidden_layers = len(layers)
    if distill.experts is not None:
        key = next(key for key in _EXPERT_KEYS if hasattr(made, key))
        if not made.num_experts_per_tok <= distill.experts <= getattr(made, key):
            raise ConfigError(
                f"distill.experts: expected between {made.num_experts_per_tok} (that a token goes "
                f"to) and {getattr(made, key)} (that the teacher has), got {distill.experts}."
            )
        setattr(made, key, distill.experts)
    return made


def kept_layers(num_layers: int, keep: int | None) -> tuple[int, ...]:
    """The layers to keep: the first, the last, and others spread evenly between them.

    Raises:
        ConfigError: There are fewer layers.
    """
    keep = num_layers if keep is None else keep
    if keep > num_layers:
        raise ConfigError(
            f"distill.layers: expected at most the teacher's {num_layers}, got {keep}."
        )
    if keep == 1:
        return (0,)
    return tuple(round(n * (num_layers - 1) / (keep - 1)) for n in range(keep))


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, counts the tokens that each router sends to each expert."""
    counts: dict[int, torch.Tensor] = {}

    def count(layer: int, num_experts: int, *module_args_output: Any) -> None:
        chosen = module_args_output[-1][-1].reshape(-1)
        found = torch.bincount(chosen, minlength=num_experts).cpu()
        counts[layer] = counts.get(layer, torch.zeros_like(found)) + found

    handles: list[Any] = []
    for name, module in model.named_modules():
        layer = _LAYER.search(f".{name}.")
        if layer is not None and type(module).__name__.endswith("TopKRouter"):
            router: Any = module
            see = partial(count, int(layer.group(1)), router.num_experts)
            handles.append(module.register_forward_hook(see))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def choose(
    counts: Mapping[int, Sequence[float]], num_layers: int, distill: DistillConfig
) -> KeptParts:
    """Chooses the parts to keep, by the counted tokens."""
    layers = kept_layers(num_layers, distill.layers)
    experts: dict[int, tuple[int, ...]] = {}
    shares: dict[int, float] = {}
    for layer in layers:
        if distill.experts is None or layer not in counts:
            continue
        used = counts[layer]
        ranked = sorted(range(len(used)), key=lambda expert: (-used[expert], expert))
        experts[layer] = tuple(sorted(ranked[: distill.experts]))
        shares[layer] = sum(used[e] for e in experts[layer]) / max(1.0, sum(used))
    return KeptParts(layers, experts, shares)


def write_student(teacher: Path, folder: Path, config: PretrainedConfig, kept: KeptParts) -> None:
    """Copy the kept tensors from the teacher's files into the student's folder, replacing it.

    Raises:
        ConfigError: The teacher has no safetensors.
    """
    if not any((teacher / file).is_file() for file in (ONE_FILE, INDEX)):
        raise ConfigError(
            f"teacher: expected {ONE_FILE} or {INDEX} in '{teacher}', got neither. "
            "Save the teacher with save_pretrained(FOLDER)."
        )
    with whole_or_nothing(folder, IN_RUN) as aside, ExitStack() as closing:
        whole = open_safetensors(teacher, closing).tensors
        found = (_of_student(name, entry, kept) for name, entry in whole.items())
        write_weights(dict(one for one in found if one is not None), aside, ExportSettings())
        config.save_pretrained(aside)


def _of_student(name: str, whole: Entry, kept: KeptParts) -> tuple[str, Entry] | None:
    """The student's name and tensor for a tensor of the teacher; None where it is not kept."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer is None:
        return name, whole
    number, entry = int(layer[1]), whole
    if number not in kept.layers:
        return None
    experts = kept.experts.get(number)
    if experts is not None and expert is not None:
        if int(expert[1]) not in experts:
            return None
        name = _EXPERT.sub(f".experts.{experts.index(int(expert[1]))}.", name)
    elif experts is not None and _ROUTER.search(name):  # a row for each expert
        rows = list(experts)
        shape = (len(rows), *whole.shape[1:])
        entry = Entry(whole.dtype, shape, lambda: whole.read()[rows].clone())
    return _LAYER.sub(f".layers.{kept.layers.index(number)}.", name), entry
