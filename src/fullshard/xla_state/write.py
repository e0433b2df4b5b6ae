"""Saving: every process writes its ranges of all tensors.

A shard of an array that is cut along a later dimension is not a contiguous range of the tensor.
Each layer is therefore resharded along its flat elements before it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.checkpoint.commit import Documents, Ranks
from fullshard.checkpoint.files import Piece
from fullshard.checkpoint.format import PLAN, STATE, Kind, key_of
from fullshard.errors import CheckpointError
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import GROUPS, SAVES, SCALARS, SaveSettings, Values, write
from fullshard.xla.mesh import SHARD
from fullshard.xla.opt_state import Leaf, leaves_of
from fullshard.xla.plan import XlaPlan, path_name, unpad
from fullshard.xla.processes import agree, tell
from fullshard.xla.step import State


@dataclass(frozen=True)
class Beside:
    """The contents of a checkpoint other than arrays.

    Attributes:
        groups: torch's parameter groups, with parameter names under "params".
        values: The caller's values.
        tied: Names of tied parameters: second name -> first name.
    """

    groups: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tied: Mapping[str, str] = field(default_factory=dict[str, str])


def save(folder: Path, state: State, settings: SaveSettings, beside: Beside | None = None) -> Path:
    """Saves a state that any engine loads on any number of ranks. A collective.

    Raises:
        CheckpointError: On every process, if one cannot write; older checkpoints are intact.
    """
    beside = beside or Beside()
    agree(SAVES.wait)
    plan = state.plan
    facts, own = agree(partial(_facts, state, settings.step, beside))
    pieces = [piece for piece in _pieces(state) if piece.is_there]
    texts = {STATE: json.dumps(facts, indent=1), PLAN: plan.table.to_json(), **settings.texts}
    pieces += own if jax.process_index() == 0 else []
    documents = Documents(settings.step, texts, beside.tied)
    return write(ranks(), settings.target(folder), pieces, documents, settings)


def ranks() -> Ranks:
    """The processes of jax."""
    return Ranks(jax.process_index(), jax.process_count(), tell, agree)


def _pieces(state: State) -> Iterator[Piece]:
    """The pieces that this process writes, copied to the host."""
    plan = state.plan
    pairs = zip(plan.table.arrays, jax.tree.leaves(state.params), strict=True)
    for at, (array, leaf) in enumerate(pairs):
        for name, piece in _ranges(plan, at, array, leaf):
            yield piece(key_of(Kind.MODEL, name))
    leaves, words = states_of(plan, state.opt_state)
    for leaf in leaves:
        if leaf.at is not None:
            for name, piece in _ranges(plan, leaf.at, plan.table.arrays[leaf.at], leaf.value):
                yield piece(key_of(Kind.OPTIMIZER, name, words[leaf.name]))


def _ranges(
    plan: XlaPlan, at: int, array: ArrayPlan, leaf: jax.Array
) -> Iterator[tuple[str, Callable[[str], Piece]]]:
    """(tensor name, key -> local range) of each layer; replicas take turns by array."""
    dtype = dtype_name(array.name, leaf)
    for layer, name in enumerate(array.names()):
        start, values = _range(plan, at, array, leaf, layer)
        data = bytes_of(values)
        stop = start + values.size
        yield name, partial(_piece, dtype, array.shape, (start, stop), data)


def _piece(
    dtype: str, shape: tuple[int, ...], span: tuple[int, int], data: memoryview, key: str
) -> Piece:
    return Piece(key, dtype, shape, *span, lambda: data)


def _range(
    plan: XlaPlan, at: int, array: ArrayPlan, leaf: jax.Array, layer: int
) -> tuple[int, np.ndarray]:
    """The first index and the elements of the range of a layer that this process writes."""
    here = jax.process_index()
    turn = at % plan.table.mesh.replicate
    if leaf.is_fully_addressable:
        whole = unpad(array, np.asarray(leaf)[layer] if array.block else np.asarray(leaf))
        # A copy, since the next step reuses the source.
        return 0, np.array(whole, copy=True).reshape(-1)
    owners = plan.mesh.devices[turn]
    flat = _flatten(plan, array)(leaf, layer)
    parts = {shard.device: shard.data for shard in flat.addressable_shards}
    mine = [rank for rank, device in enumerate(owners) if device.process_index == here]
    if array.cut.dim is None:  # replicated: the first device of the turn writes it
        mine = mine[:1] if owners[0].process_index == here else []
    numel = math.prod(array.shape)
    if not mine:
        return 0, np.empty(0, leaf.dtype)
    part = flat.shape[0] // (1 if array.cut.dim is None else len(owners))
    start = mine[0] * part
    joined = np.concatenate([np.asarray(parts[owners[rank]]) for rank in mine])
    return min(start, numel), joined[: max(0, numel - start)]


@cache
def _flatten(plan: XlaPlan, array: ArrayPlan) -> Any:
    """(array, layer) -> the layer's elements, in equal ranges over the shard axis."""
    parts = 1 if array.cut.dim is None else plan.table.mesh.shard
    spec = PartitionSpec() if array.cut.dim is None else PartitionSpec(SHARD)

    def flatten(leaf: jax.Array, layer: Any) -> jax.Array:
        flat = unpad(array, leaf[layer] if array.block else leaf).reshape(-1)
        return jnp.pad(flat, (0, -flat.size % parts))

    return jax.jit(flatten, out_shardings=NamedSharding(plan.mesh, spec))


def _facts(state: State, step: int | None, beside: Beside) -> tuple[dict[str, Any], list[Piece]]:
    """state.json and the small tensors that it names."""
    values = dict(beside.values)
    facts: dict[str, Any] = {"step": step, "world_size": jax.process_count(), "extra": {}}
    pieces: list[Piece] = []

    def coded(name: str, value: Any) -> Any:
        found = Values(name, value)
        pieces.extend(found.pieces)
        return found.coded

    if state.opt_state is not None:
        names = [n for a in state.plan.table.arrays if a.trainable for n in a.names()]
        groups = beside.groups or [{"params": names}]
        leaves, words = states_of(state.plan, state.opt_state)
        for leaf in leaves:
            if leaf.at is not None:
                dtype_name(leaf.name, leaf.value)
        count = torch.tensor(float(state.step))
        scalars = {name: {"step": count} for name in names} if words else {}
        others = [(leaf.name, leaf.value) for leaf in leaves if leaf.at is None]
        table, own = leaf_pieces(OTHERS, others)
        pieces.extend(own)
        facts["optimizer"] = {
            "class": "AdamW" if is_adamw(words) else "optax",
            "groups": coded(GROUPS, list(groups)),
            "scalars": coded(SCALARS, scalars),
            "others": table,
        }
    facts["variables"], own = leaf_pieces(VARIABLES, named_leaves(state.variables))
    pieces.extend(own)
    facts["state"] = {name: coded(name, value) for name, value in values.items()}
    return facts, pieces


# torch's names of AdamW's states, which checkpoints use
STATE_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
NUMPY = {name: np.dtype(jnp.dtype(dtype)) for dtype, name in DTYPES.items()}
OTHERS, VARIABLES = "$optimizer.others", "$variables"  # leaves that belong to no parameter


def states_of(plan: XlaPlan, opt_state: Any) -> tuple[list[Leaf], dict[str, str]]:
    """The leaves of an optimizer's state, and the name under which each is saved.

    Adam's states have torch's names. Others are named by their full path, which is unique.
    """
    leaves = leaves_of(plan, opt_state)
    names = {leaf.name: leaf.name.rpartition(".")[2] for leaf in leaves if leaf.at is not None}
    if sorted(names.values()) == sorted(STATE_NAMES):
        return leaves, {name: STATE_NAMES[last] for name, last in names.items()}
    return leaves, {name: name.replace("/", "~") for name in names}


def is_adamw(words: Mapping[str, str]) -> bool:
    """Whether torch's AdamW has the same states."""
    return set(words.values()) == set(STATE_NAMES.values())


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree by path."""
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def dtype_name(name: str, leaf: Any) -> str:
    """The name of a dtype in a checkpoint.

    Raises:
        CheckpointError: The format has no name for this dtype.
    """
    if str(leaf.dtype) not in DTYPES:
        raise CheckpointError(
            f"{name}: expected a dtype that a checkpoint can hold ({', '.join(DTYPES)}); got "
            f"{leaf.dtype}. Save the parameters alone, with a state whose opt_state is None."
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
