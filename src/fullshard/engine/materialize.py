"""Initial weights of a model on meta: its own initialisation, one tensor in memory at a time.

[Note: birth]
A Hugging Face model on meta is built a second time, and a module on meta runs its `init_weights`
or `reset_parameters`, under a dispatch mode in which uninitialised memory stays on meta until it is
written. A write (`normal_`, `zero_`, ...) makes the tensor real on the CPU, runs, and draws the
very random numbers that it draws without sharding. When the next tensor is written, the one before
goes to the sink, which keeps this rank's part, and is freed.

    empty(1024, 64)   meta
    normal_           real: 64 Ki draws ----------------> sink("embed.weight") --> this rank's part
    empty(64, 64)     meta
    kaiming_uniform_  real: 4 Ki draws  (embed is freed)
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.engine._torch_compat import (
    outside_modes,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from fullshard.errors import UnsupportedModelError

Sink = Callable[[str, torch.Tensor], None]  # (name, the whole tensor), which is freed afterwards
Recall = Callable[[str], torch.Tensor]  # the whole tensor that the sink got under this name

_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_")
_INITIALISERS = ("reset_parameters", "_reset_parameters")
_ADVICE = "Give weights=FOLDER, or build the model on the CPU"


@dataclass(eq=False)
class _Storage:
    """Memory that is on meta until it is written.

    Attributes:
        base: The tensor on meta that it was made for; held so that its identity stays its own.
        name: The parameter's, once it is known; what has none (temporaries) is never given away.
        real: Its elements while they are in memory.
        given: Whether the sink has had it.
    """

    base: torch.Tensor
    name: str = ""
    real: torch.Tensor | None = None
    given: bool = False


class Birth(TorchDispatchMode):
    """Uninitialised memory stays on meta until it is written. See [Note: birth].

    Args:
        sink: Gets each whole parameter when the next one is written, and may get one again.
        recall: Gives one back that is read or partly written later on.
        writes: False leaves parameters uninitialised: their values come from elsewhere.
    """

    def __init__(self, sink: Sink, recall: Recall, *, writes: bool = True) -> None:
        super().__init__()
        self._sink = sink
        self._recall = recall
        self._writes = writes
        self._storages: dict[int, _Storage] = {}

    def adopt(self, tensor: torch.Tensor, name: str) -> None:
        """Take a tensor on meta as memory to be written, or give one that is there a name."""
        storage = self._find(tensor)
        if storage is None:
            storage = self._add(tensor.detach())
        storage.name = storage.name or name

    def take_real(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Put what was real at once (`torch.ones`) under the same rule; returns its stand-in."""
        with outside_modes():
            base = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        storage = self._add(base)
        storage.name = name
        if self._writes:
            self._give_away(keep=[])
            storage.real = tensor.detach().reshape(-1)
        return base

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on meta until it is written."""
        return self._find(tensor) is not None

    def close(self) -> list[str]:
        """Give away what is left; returns the names that were never written."""
        self._give_away(keep=[])
        return [s.name for s in self._storages.values() if s.name and not s.given]

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A buffer's elements: what was made on meta and written, or the tensor itself."""
        storage = self._find(tensor)
        if storage is None:
            return None if tensor.is_meta else tensor
        return None if storage.real is None else _place(storage, tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
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
        """Real memory for a tensor; one that was given away is fetched, unless overwritten."""
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
    """What is on meta says that it is on the CPU: initialisers ask, and then do nothing.

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
    """The real elements seen as a tensor on meta sees them."""
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
        model: With parameters on meta; it is not changed.
        sink: Gets (name, whole tensor) of each parameter, one after another, some more than once;
            the last time counts.
        recall: Gives back what the sink got. A collective, if the sink kept a part: all ranks ask
            for the same.
        writes: False makes buffers alone: the parameters' values come from elsewhere.

    Returns:
        Buffers by name, on the CPU.

    Raises:
        UnsupportedModelError: Something is left uninitialised; names it.
    """
    birth = Birth(sink, recall, writes=writes)
    wanted = {name for name, param in model.named_parameters() if param.is_meta}
    if hasattr(model, "_from_config") and hasattr(model, "config"):
        twin = _rebuild(model, birth)
    else:
        twin = _initialise_in_place(model, birth)
    unwritten = birth.close()
    missing: list[str] = []
    if writes:  # what was put into the model since it was built is not in its twin
        shapes = {name: param.shape for name, param in twin.named_parameters()}
        missing = [name for name in unwritten if name in wanted]
        missing += [
            name
            for name, param in model.named_parameters()
            if param.is_meta and shapes.get(name) != param.shape
        ]
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
            "meta whose modules initialise all of it (reset_parameters, init_weights); nothing "
            f"wrote these. {_ADVICE}."
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

    with _registering(note), torch.device("meta"), _drawing_nothing():
        names = {id(p): n for n, p in type(model)._from_config(_settings(model)).named_parameters()}
    order = iter([names.get(id(param), "") for param in seen])

    def register(_: nn.Module, __: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None:
            return None
        name = next(order, "")
        if birth.knows(param):
            birth.adopt(param, name)
            return None
        return nn.Parameter(birth.take_real(param, name), requires_grad=param.requires_grad)

    with _registering(register), birth, _Disguise(birth):
        return type(model)._from_config(_settings(model))


def _settings(model: Any) -> Any:
    """A configuration of its own: building a model may write into it."""
    return copy.deepcopy(model.config)


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Building on meta draws no random numbers, but what is real in it may."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _registering(hook: Callable[[nn.Module, str, Any], Any]) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _initialise_in_place(model: nn.Module, birth: Birth) -> nn.Module:
    """Run what the modules have: `init_weights` of the whole, else each one's own, inner first."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    params = dict(model.named_parameters())
    for name, tensor in tensors:
        if tensor.is_meta:
            birth.adopt(tensor, name if name in params else "")
    with birth, _Disguise(birth), torch.no_grad():
        whole = getattr(model, "init_weights", None)
        if callable(whole):
            whole()
        else:
            for module in _inner_first(model):
                initialiser = next((a for a in _INITIALISERS if hasattr(module, a)), None)
                if initialiser is not None:
                    getattr(module, initialiser)()
    return model


def _inner_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _inner_first(child, seen)
        yield module
