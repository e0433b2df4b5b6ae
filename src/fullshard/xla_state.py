"""Checkpoints and Hugging Face folders of XLA arrays, in the format that all engines share.

Saving: stacked arrays become one tensor per layer; every process writes one range of each tensor.
A shard of an array that is cut along a later dimension is not a contiguous range of the tensor.
Each layer is therefore resharded along its flat elements before it is written.

Loading: each device reads its slice of every tensor, however the files divide it. Parameters are
also read from Hugging Face folders and from trees of arrays that orbax saved.

An optimizer's states have torch's names, by parameter. Other leaves are saved whole.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.checkpoint.commit import Documents, Ranks
from fullshard.checkpoint.files import Piece, TensorFile
from fullshard.checkpoint.format import AVERAGE, PLAN, STATE, Kind, key_of
from fullshard.checkpoint.read import Checkpoint, choose
from fullshard.engine.folder import INDEX, ONE_FILE, FileNames, is_made_of
from fullshard.engine.state import DTYPE_NAMES
from fullshard.errors import CheckpointError
from fullshard.formats.hugging_face import files_of
from fullshard.formats.orbax import METADATA, open_arrays
from fullshard.loading import is_checkpoint, state_tensor
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import GROUPS, SAVES, SCALARS, CodedValue, SaveSettings, write
from fullshard.xla.opt_state import Leaf, leaves_of
from fullshard.xla.plan import REPLICATE, XlaPlan, named_leaves, own_shape, unpad
from fullshard.xla.processes import agree, lead
from fullshard.xla.step import State, scalar, with_optimizer

logger = logging.getLogger(__name__)


# ---- saving


@dataclass(frozen=True)
class Extras:
    """The contents of a checkpoint other than arrays.

    Attributes:
        groups: torch's parameter groups, with parameter names under "params".
        values: The caller's values; loaded ones with the checkpoint's step.
        tied: Names of tied parameters: second name -> first name.
    """

    groups: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tied: Mapping[str, str] = field(default_factory=dict[str, str])


def save(folder: Path, state: State, settings: SaveSettings, extras: Extras | None = None) -> Path:
    """Saves a state that any engine loads on any number of ranks. A collective.

    Raises:
        CheckpointError: On every process, if one cannot write; older checkpoints are intact.
    """
    extras = extras or Extras()
    agree(SAVES.wait)
    plan = state.plan
    facts, own = agree(partial(_facts, state, settings.step, extras))
    pieces = [piece for piece in _pieces(state) if piece.is_there]
    texts = {STATE: json.dumps(facts, indent=1), PLAN: plan.table.to_json(), **settings.texts}
    pieces += own if jax.process_index() == 0 else []
    documents = Documents(settings.step, texts, extras.tied)
    return write(ranks(), settings.target(folder), pieces, documents, settings)


def ranks() -> Ranks:
    """The processes of jax."""
    return Ranks(jax.process_index(), jax.process_count(), lead, agree)


def _pieces(state: State) -> Iterator[Piece]:
    """The pieces that this process writes, copied to the host."""
    plan = state.plan
    for at, leaf in enumerate(jax.tree.leaves(state.params)):
        yield from _ranges(plan, at, leaf, partial(key_of, Kind.MODEL))
    leaves, words = states_of(state)
    for leaf in leaves:
        if leaf.at is not None:
            yield from _ranges(plan, leaf.at, leaf.value, partial(_state_key, words[leaf.name]))


def _ranges(plan: XlaPlan, at: int, leaf: jax.Array, key: Callable[[str], str]) -> Iterator[Piece]:
    """The local range of each layer of an array; replicas take turns by array."""
    array = plan.table.arrays[at]
    dtype = dtype_name(array.name, leaf)
    for layer, name in enumerate(array.names()):
        start, values = _range(plan, at, array, leaf, layer)
        stop, data = start + values.size, partial(bytes_of, values)
        yield Piece(key(name), dtype, array.shape, start, stop, data)


def _range(
    plan: XlaPlan, at: int, array: ArrayPlan, leaf: jax.Array, layer: int
) -> tuple[int, np.ndarray]:
    """The first index and the elements of the range of a layer that this process writes."""
    here = jax.process_index()
    turn = at % plan.mesh.shape[REPLICATE]
    if leaf.is_fully_addressable:
        whole = unpad(array, np.asarray(leaf)[layer] if array.block else np.asarray(leaf))
        # A copy, since the next step reuses the source.
        return 0, np.array(whole, copy=True).reshape(-1)
    owners = plan.mesh.devices[turn].reshape(-1)
    flat = _flatten(plan, array)(leaf, layer)
    parts = {shard.device: shard.data for shard in flat.addressable_shards}
    mine = [rank for rank, device in enumerate(owners) if device.process_index == here]
    if not _is_cut(array):  # replicated: the first device of the turn writes it
        mine = mine[:1] if owners[0].process_index == here else []
    numel = math.prod(array.shape)
    if not mine:
        return 0, np.empty(0, leaf.dtype)
    part = flat.shape[0] // (len(owners) if _is_cut(array) else 1)
    start = mine[0] * part
    joined = np.concatenate([np.asarray(parts[owners[rank]]) for rank in mine])
    return min(start, numel), joined[: max(0, numel - start)]


def _is_cut(array: ArrayPlan) -> bool:
    return array.cut.dim is not None or array.cut.tensor is not None


@cache
def _flatten(plan: XlaPlan, array: ArrayPlan) -> Any:
    """(array, layer) -> the layer's elements, in equal ranges over all axes but replicate."""
    axes = plan.mesh.axis_names[1:] if _is_cut(array) else ()
    parts, spec = math.prod(plan.mesh.shape[axis] for axis in axes), PartitionSpec(axes or None)

    def flatten(leaf: jax.Array, layer: Any) -> jax.Array:
        flat = unpad(array, leaf[layer] if array.block else leaf).reshape(-1)
        return jnp.pad(flat, (0, -flat.size % parts))

    return jax.jit(flatten, out_shardings=NamedSharding(plan.mesh, spec))


def _facts(state: State, step: int | None, extras: Extras) -> tuple[dict[str, Any], list[Piece]]:
    """state.json and the small tensors that it names."""
    facts: dict[str, Any] = {"step": step, "world_size": jax.process_count(), "extra": {}}
    pieces: list[Piece] = []

    def coded(name: str, value: Any) -> Any:
        found = CodedValue(name, value)
        pieces.extend(found.pieces)
        return found.coded

    if state.opt_state is not None:
        names = [n for a in state.plan.table.arrays if a.trainable for n in a.names()]
        groups = extras.groups or [{"params": names}]
        leaves, words = states_of(state)
        for leaf in leaves:
            if leaf.at is not None:
                dtype_name(leaf.name, leaf.value)
        count = torch.tensor(float(state.step))
        others = [(leaf.name, leaf.value) for leaf in leaves if leaf.at is None]
        table, own = leaf_pieces(OTHERS, others)
        pieces.extend(own)
        facts["optimizer"] = {
            "class": kind_of(leaves, words),
            "rules": list(state.rules),
            "groups": coded(GROUPS, list(groups)),
            "scalars": coded(SCALARS, {name: {"step": count} for name in names}),
            "others": table,
        }
    facts["variables"], own = leaf_pieces(VARIABLES, named_leaves(state.variables))
    pieces.extend(own)
    facts["state"] = {name: coded(name, value) for name, value in extras.values.items()}
    return facts, pieces


# ---- names in a checkpoint

ADAMW = ("scale_by_adam",)
# torch's names of AdamW's states, which checkpoints use
STATE_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
DTYPES = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPE_NAMES.items()}
DTYPES |= {f"uint{bits}": f"U{bits}" for bits in (16, 32, 64)}
NUMPY = {name: np.dtype(jnp.dtype(dtype)) for dtype, name in DTYPES.items()}
OTHERS, VARIABLES = "$optimizer.others", "$variables"  # leaves that belong to no parameter


def states_of(state: State) -> tuple[list[Leaf], dict[str, str]]:
    """The leaves of an optimizer's state, and the name under which each is saved.

    The states of Adam's own rule have torch's names. Others, whose fields may have the same names,
    are named by their full path, which is unique.
    """
    leaves = leaves_of(state.plan, state.opt_state)
    names = {leaf.name: leaf.name.rpartition(".")[2] for leaf in leaves if leaf.at is not None}
    if state.rules == ADAMW and sorted(names.values()) == sorted(STATE_NAMES):
        return leaves, {name: STATE_NAMES[last] for name, last in names.items()}
    return leaves, {name: name.replace("/", "~") for name in names}


def kind_of(leaves: Sequence[Leaf], words: Mapping[str, str]) -> str:
    """The optimizer of torch that has the same states: AdamW, or SGD without momentum; or optax."""
    is_adamw = set(words.values()) == set(STATE_NAMES.values())
    return "AdamW" if is_adamw else "optax" if leaves else "SGD"


def dtype_name(name: str, leaf: Any) -> str:
    """The name of a dtype in a checkpoint.

    Raises:
        CheckpointError: The format has no name for this dtype.
    """
    if str(leaf.dtype) not in DTYPES:
        raise CheckpointError(
            f"{name}: expected a dtype that checkpoints support ({', '.join(DTYPES)}); got "
            f"{leaf.dtype}. Save only the parameters, with a state whose opt_state is None."
        )
    return DTYPES[str(leaf.dtype)]


def leaf_pieces(
    prefix: str, leaves: Sequence[tuple[str, Any]]
) -> tuple[dict[str, str], list[Piece]]:
    """(name -> random key type, or "") of the replicated leaves, and their data."""
    table: dict[str, str] = {}
    pieces: list[Piece] = []
    for name, leaf in leaves:
        if name in table:
            raise CheckpointError(f"{name}: expected one leaf of this name; got two. Rename one.")
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        table[name] = str(jax.random.key_impl(leaf)) if is_key else ""
        values = np.array(jax.random.key_data(leaf) if is_key else leaf, copy=True, order="C")
        key, dtype = key_of(Kind.STATE, f"{prefix}.{name}"), dtype_name(name, values)
        data = partial(bytes_of, values)
        pieces.append(Piece(key, dtype, values.shape, 0, values.size, data))
    return table, pieces


def bytes_of(values: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    data: Any = values.reshape(-1).view(np.uint8)
    return memoryview(data)


# ---- loading


def load(
    plan: XlaPlan,
    path: Path,
    tx: optax.GradientTransformation | None = None,
    variables: Any = None,
) -> tuple[State, Extras]:
    """Load a state from a checkpoint; or as step 0, from other tools' files. A collective.

    Args:
        plan: The model's plan.
        path: A checkpoint, a folder of checkpoints, a Hugging Face folder, or a tree of orbax.
        tx: The optimizer whose state was saved; None: parameters only.
        variables: Arrays like the saved ones; for others' folders, their initial values.

    Raises:
        CheckpointError: There is no checkpoint, or it belongs to another model; names the tensor.
    """
    if not is_checkpoint(path) and ((path / ONE_FILE).is_file() or (path / INDEX).is_file()):
        with _open_folder(path) as source:
            params = _read_arrays(plan, source, str)
        return with_optimizer(plan, params, tx, variables=variables), Extras()
    if (path / METADATA).is_file():
        arrays = {n.removeprefix("params."): array for n, array in open_arrays(path)[0].items()}
        params = _read_arrays(plan, _Orbax(path, arrays), str)
        return with_optimizer(plan, params, tx, variables=variables), Extras()
    with _opened(path) as checkpoint:
        source = _Saved(checkpoint)
        params = _read_arrays(plan, source, partial(key_of, Kind.MODEL))
        _check_all_read(plan, source)
        get_tensor = partial(state_tensor, checkpoint, 0)
        state = with_optimizer(plan, params, tx, _num_updates(checkpoint, get_tensor), variables)
        state = replace(state, variables=_saved_variables(state, source))
        groups: Sequence[Mapping[str, Any]] = ()
        values = _values(checkpoint, get_tensor)
        if tx is not None:
            state = _with_saved_optimizer(state, source)
            saved = checkpoint.state["optimizer"]["groups"]
            groups = checkpoint.value("groups", saved, get_tensor)
    return state, Extras(groups, values, checkpoint.index.tied)


def load_values(path: Path) -> dict[str, Any]:
    """Returns the caller's values of a checkpoint, and its step. A collective."""
    with _opened(path) as checkpoint:
        return _values(checkpoint, partial(state_tensor, checkpoint, 0))


def _values(checkpoint: Checkpoint, get_tensor: Callable[[str], Any]) -> dict[str, Any]:
    saved = checkpoint.state["state"].items()
    found = {name: checkpoint.value(name, coded, get_tensor) for name, coded in saved}
    return {**found, "step": checkpoint.state["step"]}


def _opened(path: Path) -> AbstractContextManager[Checkpoint]:
    agree(SAVES.wait)
    return Checkpoint.open(choose(ranks(), path), checked=True)


def _num_updates(checkpoint: Checkpoint, get_tensor: Callable[[str], Any]) -> int:
    """Updates of its optimizer; if unknown, the checkpoint's step, which may count otherwise."""
    optimizer = checkpoint.state.get("optimizer") or {"scalars": {}}
    scalars = checkpoint.value("scalars", optimizer["scalars"], get_tensor)
    counts = [int(found["step"]) for found in scalars.values() if "step" in found]
    return max(counts, default=int(checkpoint.state["step"] or 0))


def _with_saved_optimizer(state: State, source: _Saved) -> State:
    saved = source.checkpoint.state.get("optimizer") or {}
    kind, others = saved.get("class"), saved.get("others")
    rules = tuple(saved.get("rules", state.rules))  # torch and older checkpoints name none
    leaves, words = states_of(state)
    names = {name for array in state.plan.trained_arrays for name in array.names()}
    keys = (key.split("/", 1) for key in source.checkpoint.index.tensors)
    pairs = (key.rsplit("/", 1) for kind, key in keys if kind == Kind.OPTIMIZER)
    unread = {word for name, word in pairs if name in names} - {*words.values()}
    if AVERAGE in unread and jax.process_index() == 0:
        logger.info("the checkpoint's average of the weights is dropped")
    is_same = kind in ("optax", kind_of(leaves, words)) and rules == state.rules
    if not is_same or unread - {AVERAGE}:
        raise CheckpointError(
            f"{source.where}: expected the states of this optimizer "
            f"({', '.join([*state.rules, *sorted(words.values())]) or 'none'}); it has those of "
            f"{', '.join([kind or 'none', *saved.get('rules', ()), *sorted(unread)])}. Load only "
            "the parameters: tx=None."
        )
    found: list[Any] = []
    for leaf in leaves:
        if leaf.at is not None:
            key = partial(_state_key, words[leaf.name])
            found.append(_read_array(state.plan.table.arrays[leaf.at], leaf.value, source, key))
        elif others is not None and leaf.name in others:
            found.append(_read_leaf(source, OTHERS, leaf.name, leaf.value, others[leaf.name]))
        elif kind == "AdamW" and leaf.name.rpartition(".")[2] == "count":
            value = np.asarray(int(state.step), leaf.value.dtype)
            found.append(scalar(value, leaf.value.sharding))
        elif others is None:  # torch stores no such count
            found.append(leaf.value)
        else:
            raise _lacking(source, leaf.name, "optimizer that was saved")
    opt_state = jax.tree.unflatten(jax.tree.structure(state.opt_state), found)
    return replace(state, opt_state=opt_state)


def _saved_variables(state: State, source: _Saved) -> Any:
    table, wanted = source.checkpoint.state.get("variables") or {}, named_leaves(state.variables)
    missing = {name for name, _ in wanted}.symmetric_difference(table)
    if missing:
        raise _lacking(source, min(missing), "variables that were saved, as variables=")
    found = [_read_leaf(source, VARIABLES, name, leaf, table[name]) for name, leaf in wanted]
    return jax.tree.unflatten(jax.tree.structure(state.variables), found)


def _lacking(source: _Saved, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source.where}: expected the same leaves in the checkpoint and in the state that it is "
        f"loaded into; {name} is in only one of them. Pass the {what}."
    )


def _check_all_read(plan: XlaPlan, source: _Saved) -> None:
    """Raises CheckpointError if the checkpoint has further arrays, such as more layers.

    A plan has no integers, such as BatchNorm's counts of batches in a checkpoint of torch.
    """
    index = source.checkpoint.index
    known = {index.find(Kind.MODEL, name) for a in plan.table.arrays for name in a.names()}
    keys = {key_of(Kind.MODEL, name): name for name in index.names(Kind.MODEL)}
    of = {key: NUMPY[index.tensors[key].dtype] for key in keys if key not in known}
    left = [keys[key] for key, dtype in of.items() if jnp.issubdtype(dtype, jnp.floating)]
    if left:
        raise CheckpointError(
            f"{source.where}: expected only arrays of the plan; it also has {left[0]}"
            f"{f' and {len(left) - 1} more' * (len(left) > 1)}. Plan the saved model."
        )


def _read_leaf(source: _Saved, prefix: str, name: str, like: Any, impl: str) -> jax.Array:
    """Reads a replicated leaf."""
    key = key_of(Kind.STATE, f"{prefix}.{name}")
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    data = jax.eval_shape(jax.random.key_data, like) if is_key else like
    dtype, shape = source.find(key) or ("", ())
    own_impl = str(jax.random.key_impl(like)) if is_key else ""
    if shape != data.shape or impl != own_impl or dtype not in NUMPY:
        raise CheckpointError(
            f"{source.where}: expected {name} of shape {data.shape} {own_impl}; it has {shape} "
            f"{impl}. Give what was saved."
        )
    values = np.empty(shape, NUMPY[dtype])
    source.read(key, 0, bytes_of(values), values.itemsize)
    values = values.astype(data.dtype)
    replicated = NamedSharding(like.sharding.mesh, PartitionSpec())
    placed = jax.make_array_from_callback(shape, replicated, lambda index: values[index])
    return jax.random.wrap_key_data(placed, impl=impl) if is_key else placed


def _state_key(word: str, name: str) -> str:
    return key_of(Kind.OPTIMIZER, name, word)


# ---- the files that are read


@dataclass(frozen=True)
class _Saved:
    """A checkpoint as a source of ranges."""

    checkpoint: Checkpoint

    def find(self, key: str, _: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]] | None:
        tensor = self.checkpoint.index.tensors.get(self._key(key))
        return (tensor.dtype, tensor.shape) if tensor else None

    def read(self, key: str, start: int, out: memoryview, itemsize: int) -> None:
        self.checkpoint.read(self._key(key), start, start + out.nbytes // itemsize, out)

    def _key(self, key: str) -> str:
        """The stored name; a tied parameter is stored under its first name."""
        kind, _, name = key.partition("/")
        return self.checkpoint.index.find(Kind(kind), name) or key

    @property
    def where(self) -> str:
        return f"checkpoint '{self.checkpoint.path}'"


@dataclass(frozen=True)
class _FolderOfModel:
    """Safetensors files of a Hugging Face folder as a source of ranges.

    Experts that are stacked in the model are many tensors in the files; see engine/folder.py.
    """

    path: Path
    files: Mapping[str, TensorFile]
    names: FileNames
    known: dict[str, tuple[tuple[str, ...], list[int]]] = field(default_factory=dict)

    def find(self, key: str, shape: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]] | None:
        parts, _ = self._parts(key)
        entries = [self.files[part].entries[part] for part in parts]
        shapes = [entry[1] for entry in entries]
        is_whole = len({entry[0] for entry in entries}) == 1 and is_made_of(shape, shapes)
        if parts and is_whole:
            return entries[0][0], shape
        return (entries[0][0], shapes[0]) if entries else None

    def read(self, key: str, start: int, out: memoryview, itemsize: int) -> None:
        parts, ends = self._parts(key)
        at = bisect_right(ends, start)
        while out.nbytes:
            first, size = start - (ends[at - 1] if at else 0), (ends[at] - start) * itemsize
            self.files[parts[at]].read(parts[at], first * itemsize, out[:size])
            start, out, at = ends[at], out[size:], at + 1

    def _parts(self, key: str) -> tuple[tuple[str, ...], list[int]]:
        """The stored tensors with a tensor's elements, in order, and where each ends."""
        if key not in self.known:
            parts = (key,) if key in self.files else self.names.parts([key])
            sizes = (math.prod(self.files[part].entries[part][1]) for part in parts)
            self.known[key] = parts, [*itertools.accumulate(sizes)]
        return self.known[key]

    @property
    def where(self) -> str:
        return f"folder '{self.path}'"


@dataclass(frozen=True)
class _Orbax:
    """A tree that orbax wrote as a source of boxes; stacked arrays are whole in it."""

    path: Path
    arrays: Mapping[str, Any]

    def find(self, key: str, _: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]] | None:
        array = self.arrays.get(key)
        return None if array is None else (DTYPES.get(array.dtype.name, ""), tuple(array.shape))

    def box(self, key: str, spans: Sequence[range]) -> np.ndarray:
        return self.arrays[key][tuple(slice(s.start, s.stop) for s in spans)].read().result()

    @property
    def where(self) -> str:
        return f"folder '{self.path}'"


Source = _Saved | _FolderOfModel | _Orbax


@contextmanager
def _open_folder(path: Path) -> Generator[_FolderOfModel]:
    with ExitStack() as closing:
        names = files_of(path, ONE_FILE, INDEX)
        files = [closing.enter_context(TensorFile.open(path / name)) for name in names]
        of_name = {name: file for file in files for name in file.entries}
        yield _FolderOfModel(path, of_name, FileNames(of_name))


def _read_arrays(plan: XlaPlan, source: Source, key: Callable[[str], str]) -> Any:
    return plan.with_arrays(
        lambda array, shape: _read_array(array, shape, source, key), plan.shapes()
    )


def _read_array(
    array: ArrayPlan, like: Any, source: Source, key: Callable[[str], str]
) -> jax.Array:
    """Reads an array; each device reads its own slice."""
    if isinstance(source, _Orbax) and array.block:
        cut = replace(array.cut, dim=None if array.cut.dim is None else array.cut.dim + 1)
        array = replace(array, shape=own_shape(array), cut=cut, block="", num_layers=0)
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
    """Reads a box of a tensor with one read per contiguous run."""
    found = source.find(key)
    assert found is not None
    dtype = NUMPY[found[0]]
    inside = [range(s.start, min(s.stop, n)) for s, n in zip(spans, shape, strict=True)]
    if isinstance(source, _Orbax):
        return source.box(key, inside)
    box = np.empty([len(span) for span in inside], dtype)
    if box.size == 0:
        return box
    cut = [dim for dim, size in enumerate(shape) if len(inside[dim]) < size]
    last = cut[-1] if cut else 0  # from this dimension on, the box has full rows
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
    found = source.find(key, array.shape)
    if found is None or found[1] != array.shape or found[0] not in NUMPY:
        got = "it has none" if found is None else f"it has {found[0]} {found[1]}"
        raise CheckpointError(
            f"{source.where}: expected {key} of shape {array.shape}; {got}. Plan the saved model; "
            f"its arrays have the names of the tree ({name})."
        )
