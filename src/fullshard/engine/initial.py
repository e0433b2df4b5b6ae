"""Initial values of a model on meta: this rank's part, initialised or read from a folder.

[Note: birth]
A Hugging Face model on meta is built a second time; other modules on meta run `init_weights` or
`reset_parameters`. Both run under a dispatch mode that keeps uninitialised memory on meta until it
is written. A write (`normal_`, `zero_`, ...) allocates the tensor on the CPU and draws the same
random numbers as without sharding. When the next tensor is written, the previous one is passed to
the sink, which keeps this rank's part, and is freed.

    empty(1024, 64)   meta
    normal_           real: 64 Ki draws ----------------> sink("embed.weight") --> this rank's part
    empty(64, 64)     meta
    kaiming_uniform_  real: 4 Ki draws  (embed is freed)
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.engine._torch_compat import outside_modes, storage_key, tree_leaves, tree_map_only
from fullshard.engine.computed import gather_piece
from fullshard.engine.cuts import Cut
from fullshard.engine.folder import FolderWeights
from fullshard.engine.hugging_face import lacking, some
from fullshard.engine.placing import Masters
from fullshard.engine.record import Elements
from fullshard.engine.replicas import check_equal_random
from fullshard.errors import ConfigError, UnsupportedModelError
from fullshard.planner.mesh import Mesh
from fullshard.planner.plan import Plan
from fullshard.planner.units import UnitPlan
from fullshard.transport.base import Transport

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class InitialParam(Elements):
    """A parameter's elements on this rank, its unit, and the index `at` of its group."""

    unit: UnitPlan
    at: int
    names: tuple[str, ...]

    def read(self, files: FolderWeights, to: torch.Tensor) -> None:
        """Copy this rank's elements in a folder into a tensor, `to`: (n_local,)."""
        start, stop = self.piece.start, self.piece.stop
        first = 0 if self.cut is None else self.cut.first
        if first is not None:
            with files.elements(self.names, self.shape, first + start, first + stop) as parts:
                _fill(to, parts)
        elif start < stop:
            with files.elements(self.names, self.shape, 0, math.prod(self.shape)) as parts:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                to.copy_(self.local_of(whole.view(self.shape)))


class InitialValues:
    """Initial values of tensors on meta, by first name.

    Attributes:
        others: Buffers, and parameters left out of sharding.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, transports: Mapping[Mesh, Transport], masters: Masters
    ) -> None:
        self.others: dict[str, torch.Tensor] = {}
        self._model = model
        self._transports = transports
        self._masters = masters
        rank = transports[plan.mesh].rank
        self._params = {
            names[0]: InitialParam(piece, Cut.of(model.get_parameter(names[0])), unit, at, names)
            for unit in plan.units
            for at, group in enumerate(unit.groups)
            for names, piece in zip(
                group.names, group.layout.slices(unit.mesh.coordinates(rank)[1]), strict=True
            )
        }
        self._first = {name: h.names[0] for h in self._params.values() for name in h.names}

    def initialise(self, transport: Transport) -> None:
        """Run the model's own initialisation, which fills the masters. A collective.

        Args:
            transport: Transport that compares the ranks' random states.
        """
        check_equal_random(transport, self._masters.homes.device)
        self.others |= initialise(self._model, self._keep, self._recall)

    def read(self, folder: str | Path | FolderWeights) -> None:
        """Read a Hugging Face folder, or use a custom reader.

        Raises:
            ConfigError: A tensor of the model is missing.
        """
        files = folder
        if not isinstance(files, FolderWeights):
            files = FolderWeights(files, getattr(self._model, "base_model_prefix", ""))
        missing = files.missing([param.names for param in self._params.values()])
        if missing:
            raise ConfigError(
                f"weights: expected all of the model's tensors in '{files.folder}'; it lacks "
                f"{some(missing)}. Some architectures are stored under other names; load them with "
                "from_pretrained, then call fs.shard."
            )
        for name, param in self._params.items():
            files.check(param.names, param.shape)
            self._masters.reads[name] = partial(param.read, files)
        self._read_others(files)

    def _read_others(self, files: FolderWeights) -> None:
        """Read ignored parameters and buffers, whole."""
        buffers = initialise(self._model, self._keep, self._recall, writes=False)
        params = self._model.named_parameters()
        left_out = {n: p for n, p in params if p.is_meta and n not in self._first}
        self.others |= buffers
        for name, like in (left_out | buffers).items():
            if files.parts([name]):
                shape = tuple(like.shape)
                value = self.others[name] = torch.empty(shape, dtype=like.dtype)
                with files.elements([name], shape, 0, like.numel()) as parts:
                    _fill(value.view(-1), parts)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep this rank's part of a whole tensor."""
        first = self._first.get(name)
        if first is None:
            self.others[name] = tensor.clone()
            return
        param = self._params[first]
        self._part(param).copy_(param.local_of(tensor))

    def _recall(self, name: str) -> torch.Tensor:
        """Gather a whole tensor from its shards. A collective."""
        first = self._first.get(name)
        if first is None:
            return self.others[name]
        param = self._params[first]
        local = self._part(param).to(self._masters.homes.device)
        layout = param.unit.groups[param.at].layout
        whole = gather_piece(self._transports[param.unit.mesh], layout, param.piece, local)
        if param.cut is not None:
            whole = param.cut.whole_of(whole.view(param.piece.shape))
        return whole.to("cpu", self._model.get_parameter(name).dtype)

    def _part(self, param: InitialParam) -> torch.Tensor:
        """(n_local,): this rank's part of a parameter in its master."""
        piece, master = param.piece, self._masters.of(param.unit, param.at).master
        return master[piece.offset : piece.offset + piece.numel]


def _fill(to: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy parts into a tensor, one after another."""
    for part, own in zip(parts, to.split([*map(len, parts)]), strict=True):
        own.copy_(part)


def place_others(model: nn.Module, values: InitialValues, device: torch.device) -> None:
    """Set the values of buffers and of parameters left out of sharding.

    Raises:
        ConfigError: A tensor is still on meta.
    """
    for name, value in values.others.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = getattr(module, leaf, None)
        if tensor is None or not tensor.is_meta:
            continue
        if leaf in module._buffers:
            module._buffers[leaf] = value.to(device)
        else:
            real = nn.Parameter(value.to(device), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, real)
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    left = [name for name, tensor in tensors.items() if tensor.is_meta]
    if left:
        raise ConfigError(
            f"{some(left)}: expected a value from the model's own initialisation or from weights; "
            "it has none and would stay on meta. Build the model on the CPU."
        )


def has_weights_of(model: nn.Module, folder: str | Path) -> bool:
    """Whether a Hugging Face folder has all parameters of a model, whole or in parts."""
    files = FolderWeights(folder, getattr(model, "base_model_prefix", ""))
    return not files.missing([names for names, _ in _named(model)])


def check_weights_of(model: nn.Module, folder: str | Path) -> None:
    """Checks a folder's weights against a model by the files' headers.

    Args:
        model: The model for these weights.
        folder: A Hugging Face folder.

    Raises:
        ConfigError: A file is truncated, tensors are missing, or a tensor's shape differs from
            the model's.
    """
    files = FolderWeights(folder, getattr(model, "base_model_prefix", ""))
    files.check_files()
    tensors, unused = _named(model), files.unused(model)
    missing = files.missing([names for names, _ in tensors])
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None)
    if missing and not (unused or optional):  # else transformers may convert names
        raise lacking(folder, missing)
    if not missing:
        for names, shape in tensors:
            files.check(names, shape)
        if unused:
            logger.warning("%s has weights that its config.json does not: %s", folder, some(unused))


def _named(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """All names of each parameter, and its shape."""
    found: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), ([], tuple(param.shape)))[0].append(name)
    return list(found.values())


# ---- the model's own initialisation, one tensor in memory at a time

Sink = Callable[[str, torch.Tensor], None]  # receives (name, whole tensor)
Recall = Callable[[str], torch.Tensor]  # returns the tensor that the sink received under a name

_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_")
_INITIALISERS = ("reset_parameters", "_reset_parameters")
_ADVICE = "Pass weights=FOLDER, or build the model on the CPU"


@dataclass(eq=False)
class _Storage:
    """Memory that stays on meta until it is written.

    Attributes:
        base: The tensor on meta that it was created for, kept alive so that its id stays unique.
        name: The parameter's name once known; temporaries have none and are never passed on.
        real: The elements, while they are in memory.
        given: Whether the sink has received it.
    """

    base: torch.Tensor
    name: str = ""
    real: torch.Tensor | None = None
    given: bool = False


class Birth(TorchDispatchMode):
    """Uninitialised memory stays on meta until it is written. See [Note: birth].

    Args:
        sink: Receives each whole parameter when the next one is written, possibly repeatedly.
        recall: Returns a parameter that is read or partly written later.
        writes: False leaves parameters uninitialised, if their values come from elsewhere.
    """

    def __init__(self, sink: Sink, recall: Recall, *, writes: bool = True) -> None:
        super().__init__()
        self._sink = sink
        self._recall = recall
        self._writes = writes
        self._storages: dict[int, _Storage] = {}

    def register(self, tensor: torch.Tensor, name: str) -> None:
        """Register a tensor on meta, or name a registered one."""
        storage = self._find(tensor)
        if storage is None:
            storage = self._add(tensor.detach())
        storage.name = storage.name or name

    def take_real(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Register a tensor that was created with values (`torch.ones`); returns it on meta."""
        with outside_modes():
            base = torch.empty_like(tensor, device="meta")
        storage = self._add(base)
        storage.name = name
        if self._writes:
            self._give_away(keep=[])
            storage.real = tensor.detach().reshape(-1)
        return base

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is registered."""
        return self._find(tensor) is not None

    def close(self) -> list[str]:
        """Pass remaining tensors to the sink; returns the names that were never written."""
        self._give_away(keep=[])
        return [s.name for s in self._storages.values() if s.name and not s.given]

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A buffer's values: those written to its memory, or the tensor itself."""
        storage = self._find(tensor)
        if storage is None:
            return None if tensor.is_meta else tensor
        return None if storage.real is None else _place(storage, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _on_cpu(kwargs):
            made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
            self._add(made)
            return made
        found = [s for s in map(self._find, tree_leaves((args, kwargs))) if s is not None]
        if not found or _is_view(func):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written and not self._writes:
            return written[0] if func._schema.returns else None
        return self._run(func, args, kwargs, found)

    def _run(self, func: Any, args: Any, kwargs: Any, found: list[_Storage]) -> Any:
        """Run a function on real memory."""
        self._give_away(keep=found)
        written = _written(func, args, kwargs)
        for storage in found:
            if storage.real is None:
                self._make_real(storage, func, written)
        real_args, real_kwargs = tree_map_only(torch.Tensor, self._real, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        if written:
            return written[0] if func._schema.returns else None
        return result

    def _make_real(self, storage: _Storage, func: Any, written: list[torch.Tensor]) -> None:
        """Allocate a tensor's memory; one that the sink has is recalled unless overwritten."""
        name = func._schema.name.rpartition("::")[2]
        whole = name in _OVERWRITES and any(
            self._find(w) is storage and w.numel() == storage.base.numel() for w in written
        )
        with outside_modes():
            if storage.given and not whole:
                storage.real = self._recall(storage.name).reshape(-1)
            else:
                size = storage.base.untyped_storage().nbytes() // storage.base.element_size()
                storage.real = torch.empty(size, dtype=storage.base.dtype)

    def _give_away(self, keep: list[_Storage]) -> None:
        for storage in self._storages.values():
            if storage.real is not None and storage.name and storage not in keep:
                if self._writes:
                    with outside_modes():
                        self._sink(storage.name, _place(storage, storage.base))
                    storage.given = True
                storage.real = None

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._find(tensor)
        return tensor if storage is None else _place(storage, tensor)

    def _find(self, value: Any) -> _Storage | None:
        if not isinstance(value, torch.Tensor):
            return None
        return self._storages.get(storage_key(value))

    def _add(self, base: torch.Tensor) -> _Storage:
        storage = self._storages[storage_key(base)] = _Storage(base)
        return storage


class _Disguise(TorchFunctionMode):
    """Report the CPU as the device of tensors on meta, for which initialisers do nothing.

    Args:
        birth: Knows which tensors these are.
    """

    def __init__(self, birth: Birth) -> None:
        super().__init__()
        self._birth = birth

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS and self._birth.knows(args[0]):
            return _QUESTIONS[func]
        if func == _SET_DATA and self._birth.knows(args[0]) and not args[1].is_meta:
            with torch.no_grad():
                return args[0].copy_(args[1])
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_QUESTIONS: dict[Any, Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


def _place(storage: _Storage, like: torch.Tensor) -> torch.Tensor:
    """A view of the real elements with the geometry of a tensor on meta."""
    assert storage.real is not None
    with outside_modes():
        return storage.real.as_strided(like.size(), like.stride(), like.storage_offset())


def _on_cpu(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _is_view(func: Any) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in aliases)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that a function writes into."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


# ---- models --------------------------------------------------------------------------------------


def initialise(
    model: nn.Module, sink: Sink, recall: Recall, *, writes: bool = True
) -> dict[str, torch.Tensor]:
    """Run the initialisation of a model on meta.

    Args:
        model: A model with parameters on meta; it is not changed.
        sink: Gets (name, whole tensor) of each parameter, one after another, some more than once;
            the last time counts.
        recall: Returns a tensor that the sink received. A collective if the sink kept a part: all
            ranks ask for the same.
        writes: False initialises buffers only; the parameters' values come from elsewhere.

    Returns:
        Buffers by name, on the CPU.

    Raises:
        UnsupportedModelError: Something is left uninitialised; names it.
    """
    birth = Birth(sink, recall, writes=writes)
    wanted = {name: param.shape for name, param in model.named_parameters() if param.is_meta}
    if hasattr(model, "_from_config") and hasattr(model, "config"):
        twin = _rebuild(model, birth)
    else:
        twin = _initialise_in_place(model, birth)
    unwritten = birth.close()
    missing: list[str] = []
    if writes:  # modules that were added to the model after it was built are not in its twin
        shapes = {name: param.shape for name, param in twin.named_parameters()}
        missing = [name for name in unwritten if name in wanted]
        missing += [name for name, shape in wanted.items() if shapes.get(name) != shape]
    buffers = {}
    for name, buffer in twin.named_buffers():
        real = birth.real_of(buffer)
        if real is None:
            missing.append(name)
        else:
            buffers[name] = real.detach()
    if missing:
        raise UnsupportedModelError(
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: expected a model on "
            "meta whose modules initialise all parameters (reset_parameters, init_weights); these "
            f"were not initialised. {_ADVICE}."
        )
    return buffers


def _rebuild(model: Any, birth: Birth) -> nn.Module:
    """Build a Hugging Face model again, as `from_config` does.

    Parameters are known by the order in which modules register them: a first build, all on meta,
    says which name each gets in the end.
    """
    seen: list[nn.Parameter] = []

    def note(_: nn.Module, __: str, param: nn.Parameter | None) -> None:
        if param is not None:
            seen.append(param)

    # Tensors that are real at once may advance the random state, which fork_rng restores.
    noting = register_module_parameter_registration_hook(note)
    with noting, torch.device("meta"), torch.random.fork_rng(devices=[]):
        names = {id(p): n for n, p in type(model)._from_config(_settings(model)).named_parameters()}
    order = iter([names.get(id(param), "") for param in seen])

    def register(_: nn.Module, __: str, param: nn.Parameter | None) -> Any:
        if param is None:
            return None
        name = next(order, "")
        if birth.knows(param):
            birth.register(param, name)
            return None
        return nn.Parameter(birth.take_real(param, name), requires_grad=param.requires_grad)

    with register_module_parameter_registration_hook(register), birth, _Disguise(birth):
        return type(model)._from_config(_settings(model))


def _settings(model: Any) -> Any:
    """A copy of the model's configuration, because building a model may write into it."""
    return copy.deepcopy(model.config)


def _initialise_in_place(model: nn.Module, birth: Birth) -> nn.Module:
    """Run `init_weights` of the model, or else each module's initialiser, inner ones first."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    params = dict(model.named_parameters())
    for name, tensor in tensors:
        if tensor.is_meta:
            birth.register(tensor, name if name in params else "")
    with birth, _Disguise(birth), torch.no_grad():
        whole = getattr(model, "init_weights", None)
        if callable(whole):
            whole()
        else:
            model.apply(cache(_initialise))  # inner modules first, each once
    return model


def _initialise(module: nn.Module) -> None:
    """Call a module's own initialiser, if it has one."""
    initialiser = next((a for a in _INITIALISERS if hasattr(module, a)), None)
    if initialiser is not None:
        getattr(module, initialiser)()
