"""This rank's part of the values of a model on meta: initialised, or read from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard.engine.folder import FolderWeights
from fullshard.engine.materialize import initialise
from fullshard.engine.replicas import check_equal_random
from fullshard.errors import ConfigError
from fullshard.planner.layout import Slice
from fullshard.planner.mesh import Mesh
from fullshard.planner.plan import Plan
from fullshard.planner.units import GroupPlan, UnitPlan
from fullshard.transport import Transport
from fullshard.transport.base import torch_dtype


@dataclass(frozen=True)
class _Home:
    """Where a parameter belongs on this rank."""

    unit: UnitPlan
    group: GroupPlan
    names: tuple[str, ...]
    piece: Slice
    part: int


class InitialValues:
    """Values of what is on meta, by first name.

    Attributes:
        parts: (n_local,) of each sharded parameter that was initialised, master dtype.
        whole: Parameters that are left out of sharding.
        buffers: Buffers.
    """

    def __init__(self, model: nn.Module, plan: Plan, transports: Mapping[Mesh, Transport]) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._reads: dict[str, Callable[[], torch.Tensor]] = {}
        self._model = model
        self._transports = transports
        self._device = torch.device("cpu")
        rank = transports[plan.mesh].rank
        self._homes = {
            names[0]: _Home(unit, group, names, piece, part)
            for unit in plan.units
            for part in [unit.mesh.coordinates(rank)[1]]
            for group in unit.groups
            for names, piece in zip(group.names, group.layout.slices(part), strict=True)
        }
        self._first = {name: h.names[0] for h in self._homes.values() for name in h.names}

    def initialise(self, transport: Transport, device: torch.device) -> None:
        """Run the model's own initialisation. A collective.

        Args:
            transport: Compares the ranks' random numbers.
            device: That collectives work on.
        """
        self._device = device
        check_equal_random(transport, device)
        self.buffers = initialise(self._model, self._keep, self._recall)

    def read(self, folder: str | Path | FolderWeights) -> None:
        """Read a Hugging Face folder, or what reads one in its own way.

        Raises:
            ConfigError: It lacks a tensor of the model.
        """
        files = folder
        if not isinstance(files, FolderWeights):
            files = FolderWeights(files, getattr(self._model, "base_model_prefix", ""))
        missing = files.missing([home.names for home in self._homes.values()])
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"weights: expected all of the model's tensors in '{files.folder}'; it lacks "
                f"{missing[0]}{others}. Some architectures are stored under other names than they "
                "compute with: load them with from_pretrained, then call fs.shard."
            )
        for name, home in self._homes.items():
            files.check(home.names, tuple(home.piece.shape))
            self._reads[name] = partial(_read_part, files, home)
        self._read_others(files)

    def taken(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Takes a sharded parameter's part out, by name: what is read, is read then."""
        return {**{name: partial(self.parts.pop, name) for name in self.parts}, **self._reads}

    def _read_others(self, files: FolderWeights) -> None:
        """What is not sharded: whole."""
        self.buffers = initialise(self._model, self._keep, self._recall, writes=False)
        for name, param in self._model.named_parameters():
            if name not in self._first and param.is_meta and files.parts([name]):
                shape = tuple(param.shape)
                self.whole[name] = (
                    files.read([name], shape, 0, param.numel()).view(shape).to(param.dtype)
                )
        for name, buffer in self.buffers.items():
            if files.parts([name]):
                shape = tuple(buffer.shape)
                stored = files.read([name], shape, 0, buffer.numel())
                self.buffers[name] = stored.view(shape).to(buffer.dtype)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep this rank's part of a whole tensor."""
        first = self._first.get(name)
        if first is None:
            self.whole[name] = tensor.clone()
            return
        home = self._homes[first]
        local = tensor.reshape(-1)[home.piece.start : home.piece.stop]
        self.parts[first] = local.to(torch_dtype(home.group.dtypes.master), copy=True)

    def _recall(self, name: str) -> torch.Tensor:
        """Put a tensor together again. A collective."""
        first = self._first.get(name)
        if first is None:
            return self.whole[name]
        home = self._homes[first]
        layout, piece = home.group.layout, home.piece
        full = torch.zeros(
            layout.numel, dtype=torch_dtype(home.group.dtypes.master), device=self._device
        )
        own = full.chunk(layout.num_parts)[home.part]
        own[piece.offset : piece.offset + piece.numel].copy_(self.parts[first])
        self._transports[home.unit.mesh].fetch([full]).wait()
        place = next(p for p in layout.placements if p.name == first)
        tensor = full[place.offset : place.stop].to("cpu", copy=True)
        return tensor.to(self._model.get_parameter(name).dtype)


def _read_part(files: FolderWeights, home: _Home) -> torch.Tensor:
    """(n_local,): this rank's part of a stored tensor, master dtype."""
    piece, dtype = home.piece, torch_dtype(home.group.dtypes.master)
    if not piece.numel:
        return torch.empty(0, dtype=dtype)
    return files.read(home.names, tuple(piece.shape), piece.start, piece.stop).to(dtype)


def place_others(model: nn.Module, values: InitialValues, device: torch.device) -> None:
    """Give buffers and parameters that are left out of sharding their values.

    Raises:
        ConfigError: Something is still on meta.
    """
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and name in values.buffers:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = values.buffers[name].to(device)
    for name, value in values.whole.items():
        param = model.get_parameter(name)
        if param.is_meta:
            real = nn.Parameter(value.to(device), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, real)
    tensors: Sequence[tuple[str, torch.Tensor]] = [
        *model.named_parameters(),
        *model.named_buffers(),
    ]
    left = [name for name, tensor in tensors if tensor.is_meta]
    if left:
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ConfigError(
            f"{left[0]}{others}: expected a value from the model's own initialisation or from "
            "weights; there is none, and it would stay on meta. Build the model on the CPU."
        )


def has_weights_of(model: nn.Module, folder: str | Path) -> bool:
    """Whether a Hugging Face folder has all of a model's parameters, whole or in parts."""
    files = FolderWeights(folder, getattr(model, "base_model_prefix", ""))
    return not files.missing([names for names, _ in _named(model)])


def check_weights_of(model: nn.Module, folder: str | Path) -> None:
    """Reads the headers of a folder's files.

    Args:
        model: Which shall have these weights.
        folder: Hugging Face's.

    Raises:
        ConfigError: A file is not whole, or a tensor has another shape than the model's.
    """
    files = FolderWeights(folder, getattr(model, "base_model_prefix", ""))
    files.check_files()
    tensors = _named(model)
    if not files.missing([names for names, _ in tensors]):  # else transformers converts the names
        for names, shape in tensors:
            files.check(names, shape)


def _named(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """All names of each parameter, and its shape."""
    found: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), ([], tuple(param.shape)))[0].append(name)
    return list(found.values())
