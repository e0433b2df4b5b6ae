"""Low-rank adapters (peft): added to a model on meta, initialised, saved and merged.

weight of the folder  (out, in)     frozen, read by each rank's byte ranges
lora_A                (r, in)       uniform within 1 / sqrt(in), the same on every rank
lora_B                (out, r)      zeros: training begins at the folder's model

merged weight = weight + lora_alpha / r * lora_B @ lora_A, transposed if the weight is (in, out)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.format import ADAPTED
from fullshard.config.schema import LoraConfig
from fullshard.engine.folder import FolderWeights
from fullshard.engine.state import model_tensors
from fullshard.errors import ConfigError
from fullshard.formats.source import Entry, Source

ADAPTER = "default"
PROJECTION = "distill_projection"  # module of a student whose width differs from its teacher's
SAMPLED = 256  # elements of each weight, about
_A, _B, _BASE = ".lora_A.", ".lora_B.", ADAPTED


def peft_config(lora: LoraConfig, base: Path | None = None) -> Any:
    """The configuration of peft.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "lora: adapters need peft, which is not installed. Run pip install 'fullshard[lora]'."
        ) from error
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base) if base else None,
    )


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Adds adapters to a model and freezes everything else.

    Raises:
        ConfigError: No layer has such a name.
    """
    import peft

    ends = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    try:
        peft.inject_adapter_in_model(peft_config(lora), model)
        if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
            raise ValueError("peft adapts experts too, which is not yet supported")
        added = (name for name, _ in model.named_parameters() if ".lora_" in name)
        if other := next((name for name in added if not _is_adapter(name)), None):
            raise ValueError(f"peft adds {other}, which is not yet supported")
    except ValueError as error:
        got = ", ".join(lora.target_modules) or "all-linear"
        raise ConfigError(
            f"lora.target_modules: expected ends of layers' names, got {got} ({error}). "
            f"Linear layers end in {', '.join(sorted(ends))}."
        ) from error


class AdaptedWeights(FolderWeights):
    """A folder's weights, and initial values of parameters that the run adds.

    Args:
        folder: Folder of the model.
        prefix: See FolderWeights.
        seed: Seed of lora_A and of a student's projection.
    """

    def __init__(self, folder: Path, prefix: str, seed: int) -> None:
        super().__init__(folder, prefix)
        self._seed = seed

    def parts(self, names: Sequence[str]) -> tuple[str, ...]:
        """As FolderWeights.parts; peft moves an adapted layer to `base_layer`."""
        if _is_adapter(names[0]):
            return (names[0],)
        return super().parts([name.replace(_BASE, ".") for name in names])

    def check(self, names: Sequence[str], shape: tuple[int, ...]) -> None:
        """As FolderWeights.check."""
        if not _is_adapter(names[0]):
            super().check(names, shape)

    @contextmanager
    def elements(
        self, names: Sequence[str], shape: tuple[int, ...], start: int, stop: int
    ) -> Generator[list[torch.Tensor]]:
        """As FolderWeights.elements."""
        if _is_adapter(names[0]):
            yield [first_values(names[0], shape, self._seed).reshape(-1)[start:stop]]
        else:
            with super().elements(names, shape, start, stop) as parts:
                yield parts


def first_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial values of an added matrix, float32."""
    if _B in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def adapters_of(source: Source) -> dict[str, Entry]:
    """The adapters of a model."""
    return {name: entry for name, entry in source.tensors.items() if _A in name or _B in name}


def sample_of_base(model: nn.Module) -> dict[str, torch.Tensor]:
    """Some elements of this rank's part of each weight that is no adapter, on the CPU.

    Args:
        model: The sharded model. Its buffers do not count, because they change in training.
    """
    base = (x for x in model_tensors(model) if not x.whole and not _is_adapter(x.names[0]))
    parts = {x.names[0]: x.local.detach().reshape(-1) for x in base}
    return {name: x[:: len(x) // SAMPLED + 1].clone().cpu() for name, x in parts.items()}


def check_base(
    model: nn.Module, before: Mapping[str, torch.Tensor], folder: Path | None, checkpoint: Path
) -> None:
    """Checks that adapters were trained over the weights that the run began with.

    A checkpoint also has these weights, so that training would continue with other ones than those
    that the exported adapters name. It may have them in a smaller dtype.

    Args:
        model: The sharded model, after the checkpoint was loaded.
        before: `sample_of_base` of the weights in the folder.
        folder: Folder of the weights.
        checkpoint: The checkpoint.

    Raises:
        ConfigError: They differ; names a weight.
    """
    dtypes = torch.float64, torch.bfloat16, torch.float16
    for name, now in sample_of_base(model).items():
        if not any(before[name].to(dtype).to(now.dtype).equal(now) for dtype in dtypes):
            raise ConfigError(
                "model.name_or_path: expected the weights over which the adapters of "
                f"'{checkpoint}' were trained, got others in '{folder}' ({name} differs). Restore "
                "them, set model to a folder that has them, or use --resume never."
            )


def merged(source: Source, lora: LoraConfig, model: nn.Module) -> Source:
    """The model with its adapters merged; each weight is merged when it is read.

    Args:
        source: State of the model, with its adapters.
        lora: Configuration of the adapters.
        model: The model, whose layers know how their weights lie: those of GPT-2 are (in, out).
    """
    whole: dict[str, Entry] = {}
    scale = lora.lora_alpha / lora.r
    for name, entry in source.tensors.items():
        if _is_adapter(name):
            continue
        if name.endswith(f"{_BASE}weight"):
            path = name.removesuffix(f"{_BASE}weight")
            a, b = (source.tensors[f"{path}{part}{ADAPTER}.weight"] for part in (_A, _B))
            flips = bool(getattr(model.get_submodule(path), "fan_in_fan_out", False))
            entry = replace(entry, load=partial(_merged, entry, a, b, scale, flips=flips))
        whole[name.replace(_BASE, ".")] = entry
    tied = {one.replace(_BASE, "."): two.replace(_BASE, ".") for one, two in source.tied.items()}
    return replace(source, tensors=whole, tied=tied)


def _merged(base: Entry, a: Entry, b: Entry, scale: float, *, flips: bool) -> torch.Tensor:
    weight = base.read()
    change = scale * (b.read().to(weight.dtype) @ a.read().to(weight.dtype))
    return weight + (change.T if flips else change)


def save_adapters(
    state: Mapping[str, torch.Tensor], lora: LoraConfig, base: Path | None, folder: Path
) -> None:
    """Writes only the adapters, as peft reads them.

    Args:
        state: State of the model, with its adapters.
        lora: Configuration of the adapters.
        base: Folder of the model without adapters.
        folder: Folder to write.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous()
        for name, value in state.items()
        if _is_adapter(name)
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config(lora, base).save_pretrained(folder)


def _is_adapter(name: str) -> bool:
    return _A in name or _B in name or name.startswith(PROJECTION)
