"""Loading: each device reads its box of every tensor, whoever wrote it in whatever ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fullshard.checkpoint.files import TensorFile
from fullshard.checkpoint.format import Kind, key_of
from fullshard.checkpoint.read import Checkpoint, first_whole
from fullshard.checkpoint.retain import Found, candidates
from fullshard.engine.folder import INDEX, ONE_FILE
from fullshard.errors import CheckpointError
from fullshard.formats.hugging_face import files_of
from fullshard.loading import is_checkpoint, state_tensor
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import SAVES
from fullshard.xla.plan import XlaPlan
from fullshard.xla.step import State, scalar, with_optimizer
from fullshard.xla.together import agree, tell
from fullshard.xla_state.states import NUMPY, OPTAX, STATE_NAMES, bytes_of, sorted_states
from fullshard.xla_state.write import Beside


def load(
    plan: XlaPlan, path: Path, tx: optax.GradientTransformation | None = None
) -> tuple[State, Beside]:
    """A state from a checkpoint, or from a Hugging Face folder, as a step 0. A collective.

    Raises:
        CheckpointError: There is none, or it is of another model; names the tensor.
    """
    if not is_checkpoint(path) and ((path / ONE_FILE).is_file() or (path / INDEX).is_file()):
        with _open_folder(path) as source:
            params = _read_arrays(plan, source, str)
        return with_optimizer(plan, params, tx), Beside()
    agree(SAVES.wait)
    with Checkpoint.open(_choose(path), checked=True) as checkpoint:
        source = _Saved(checkpoint)
        params = _read_arrays(plan, source, partial(key_of, Kind.MODEL))
        get_tensor = partial(state_tensor, checkpoint, 0)
        state = with_optimizer(plan, params, tx, _num_updates(checkpoint, get_tensor))
        groups: Sequence[Mapping[str, Any]] = ()
        saved = checkpoint.state["state"]
        values = {n: checkpoint.value(n, coded, get_tensor) for n, coded in saved.items()}
        if tx is not None:
            state = _with_saved_optimizer(state, source, values.pop(OPTAX, ()))
            saved = checkpoint.state["optimizer"]["groups"]
            groups = checkpoint.value("groups", saved, get_tensor)
    return state, Beside(groups, values, checkpoint.index.tied)


def _num_updates(checkpoint: Checkpoint, get_tensor: Callable[[str], Any]) -> int:
    """The checkpoint's step; of one that was saved without, its optimizer's."""
    step, optimizer = checkpoint.state["step"], checkpoint.state.get("optimizer")
    if step is None and optimizer is not None:
        scalars = checkpoint.value("scalars", optimizer["scalars"], get_tensor)
        step = max((int(found.get("step", 0)) for found in scalars.values()), default=0)
    return int(step or 0)


def _with_saved_optimizer(state: State, source: _Saved, numbers: Sequence[Any]) -> State:
    kind = (source.checkpoint.state.get("optimizer") or {}).get("class")
    states = sorted_states(state)
    words = {owner[1] for owner, _ in states if owner is not None}
    if kind != "optax" and not (kind == "AdamW" and words == set(STATE_NAMES.values())):
        raise CheckpointError(
            f"{source.where}: expected the states of this optimizer ({', '.join(sorted(words))}); "
            f"it has those of {kind or 'none'}. Load the parameters alone: tx=None."
        )
    saved = iter(numbers)
    leaves: list[Any] = []
    for owner, leaf in states:
        if owner is None:  # a count of steps, or a number
            value = next(saved, None)
            value = int(state.step) if value is None else value
            leaves.append(scalar(np.asarray(value, leaf.dtype), leaf.sharding))
            continue
        _, word, array, _ = owner
        key = partial(_state_key, word)
        leaves.append(_read_array(array, leaf, source, key))
    opt_state = jax.tree.unflatten(jax.tree.structure(state.opt_state), leaves)
    return replace(state, opt_state=opt_state)


def _state_key(word: str, name: str) -> str:
    return key_of(Kind.OPTIMIZER, name, word)


@dataclass(frozen=True)
class _Saved:
    """A checkpoint as a source of ranges."""

    checkpoint: Checkpoint

    def find(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        tensor = self.checkpoint.index.tensors.get(self._key(key))
        return (tensor.dtype, tensor.shape) if tensor else None

    def read(self, key: str, start: int, out: memoryview, itemsize: int) -> None:
        self.checkpoint.read(self._key(key), start, start + out.nbytes // itemsize, out)

    def _key(self, key: str) -> str:
        """Under which it is stored: a tied parameter goes by its first name."""
        kind, _, name = key.partition("/")
        return self.checkpoint.index.find(Kind(kind), name) or key

    @property
    def where(self) -> str:
        return f"checkpoint '{self.checkpoint.path}'"


@dataclass(frozen=True)
class _Folder:
    """Safetensors files of a Hugging Face folder as a source of ranges."""

    path: Path
    files: Mapping[str, TensorFile]

    def find(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        file = self.files.get(key)
        return (file.entries[key][0], file.entries[key][1]) if file else None

    def read(self, key: str, start: int, out: memoryview, itemsize: int) -> None:
        self.files[key].read(key, start * itemsize, out)

    @property
    def where(self) -> str:
        return f"folder '{self.path}'"


Source = _Saved | _Folder


@contextmanager
def _open_folder(path: Path) -> Generator[_Folder]:
    with ExitStack() as closing:
        names = files_of(path, ONE_FILE, INDEX)
        files = [closing.enter_context(TensorFile.open(path / name)) for name in names]
        yield _Folder(path, {name: file for file in files for name in file.entries})


def _choose(path: Path) -> Found:
    """The newest complete and undamaged checkpoint, the same on all processes. A collective."""
    seat = (jax.process_index(), jax.process_count())
    return first_whole(path, agree(partial(candidates, path)), seat, tell)


def _read_arrays(plan: XlaPlan, source: Source, key: Callable[[str], str]) -> Any:
    shapes = plan.with_arrays(
        lambda array, sharding: jax.ShapeDtypeStruct(
            array.stored_shape, jnp.dtype(str(array.dtypes.master)), sharding=sharding
        ),
        plan.shardings,
    )
    return plan.with_arrays(lambda array, shape: _read_array(array, shape, source, key), shapes)


def _read_array(
    array: ArrayPlan, like: Any, source: Source, key: Callable[[str], str]
) -> jax.Array:
    """An array of which each device reads its own box."""
    for name in array.names():
        _check_there(array, source, key(name), name)

    def box(index: Any) -> np.ndarray:
        spans = [
            range(*part.indices(size)) for part, size in zip(index, array.stored_shape, strict=True)
        ]
        out = np.zeros([len(span) for span in spans], like.dtype)
        own = spans[1:] if array.block else spans
        for at, layer in enumerate(spans[0] if array.block else (0,)):
            part = _read_box(source, key(array.names()[layer]), own, array.shape)
            view = out[at] if array.block else out
            view[tuple(slice(0, size) for size in part.shape)] = part
        return out

    return jax.make_array_from_callback(array.stored_shape, like.sharding, box)


def _read_box(
    source: Source, key: str, spans: Sequence[range], shape: tuple[int, ...]
) -> np.ndarray:
    """The elements of a box that lie inside of a tensor: one read a run of neighbours."""
    found = source.find(key)
    assert found is not None
    dtype = NUMPY[found[0]]
    inside = [range(s.start, min(s.stop, n)) for s, n in zip(spans, shape, strict=True)]
    box = np.empty([len(span) for span in inside], dtype)
    if box.size == 0:
        return box
    cut = [dim for dim, size in enumerate(shape) if len(inside[dim]) < size]
    last = cut[-1] if cut else 0  # from here on the box is whole rows
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    data = bytes_of(box)
    if not shape:
        source.read(key, 0, data, dtype.itemsize)
        return box
    run = math.prod(len(span) for span in inside[last:]) * dtype.itemsize
    for at, corner in enumerate(itertools.product(*inside[:last])):
        start = sum(i * stride for i, stride in zip(corner, strides, strict=False))
        start += inside[last].start * strides[last]
        source.read(key, start, data[at * run : (at + 1) * run], dtype.itemsize)
    return box


def _check_there(array: ArrayPlan, source: Source, key: str, name: str) -> None:
    found = source.find(key)
    if found is None or found[1] != array.shape or found[0] not in NUMPY:
        got = "it has none" if found is None else f"it has {found[0]} {found[1]}"
        raise CheckpointError(
            f"{source.where}: expected {key} of shape {array.shape} and of floating point; {got}. "
            f"Plan the model that was saved; its arrays' names are those of the tree ({name})."
        )
