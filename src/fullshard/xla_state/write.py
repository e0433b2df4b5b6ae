"""Saving: every process writes its ranges of all tensors.

An array that is cut along a later dimension is no range of its tensor. So that readers find ranges
alone, one layer of it after another is cut anew, along its elements, before it is written.
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

from fullshard.checkpoint import commit
from fullshard.checkpoint.files import Piece
from fullshard.checkpoint.format import PLAN, STATE, Kind, key_of, step_name
from fullshard.checkpoint.retain import tidy
from fullshard.errors import CheckpointError
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import GROUPS, SAVES, SCALARS, SaveSettings, Values, write_files
from fullshard.xla.mesh import SHARD
from fullshard.xla.plan import XlaPlan, unpad
from fullshard.xla.step import State
from fullshard.xla.together import agree, tell
from fullshard.xla_state.states import (
    OTHERS,
    VARIABLES,
    bytes_of,
    dtype_name,
    is_adamw,
    leaf_pieces,
    named_leaves,
    states_of,
)


@dataclass(frozen=True)
class Beside:
    """What a checkpoint holds beside arrays.

    Attributes:
        groups: Settings of torch's parameter groups, with their names under "params".
        values: The caller's values.
        tied: Further names of parameters: second name -> first name.
    """

    groups: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tied: Mapping[str, str] = field(default_factory=dict[str, str])


def save(folder: Path, state: State, settings: SaveSettings, beside: Beside | None = None) -> Path:
    """Save a state; any engine on any number of ranks loads it. A collective.

    Raises:
        CheckpointError: On every process, if any cannot write; those of before are untouched.
    """
    beside = beside or Beside()
    agree(SAVES.wait)
    plan = state.plan
    facts, own = agree(partial(_facts, state, settings.step, beside))
    pieces = [piece for piece in _pieces(state) if piece.is_there]
    target = folder / step_name(settings.step) if settings.step is not None else folder
    place = _open_place(target.resolve(), settings)
    texts = {STATE: json.dumps(facts, indent=1), PLAN: plan.table.to_json(), **settings.texts}
    documents = commit.Documents(settings.step, texts, beside.tied)
    first = jax.process_index() == 0
    seat = (jax.process_index(), jax.process_count())
    work = partial(write_files, seat, place, pieces + own * first, documents, settings.keep)
    work() if settings.wait else SAVES.start(work)
    return target


def _pieces(state: State) -> Iterator[Piece]:
    """What this process writes, copied to the host."""
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
    """(tensor's name, key -> its range here) of each layer; replicas take turns, by array."""
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
    """First element, and elements, of a layer's range that this process writes."""
    here = jax.process_index()
    turn = at % plan.table.mesh.replicate
    if leaf.is_fully_addressable:
        whole = unpad(array, np.asarray(leaf)[layer] if array.block else np.asarray(leaf))
        # Copied: the next step reuses what it is read from.
        return 0, np.array(whole, copy=True).reshape(-1)
    owners = plan.mesh.devices[turn]
    flat = _flatten(plan, array)(leaf, layer)
    parts = {shard.device: shard.data for shard in flat.addressable_shards}
    mine = [rank for rank, device in enumerate(owners) if device.process_index == here]
    if array.cut.dim is None:  # all have the whole: the first device of the turn writes it
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
    """(array, layer) -> the layer's elements, cut into equal ranges over the shard axis."""
    parts = 1 if array.cut.dim is None else plan.table.mesh.shard
    spec = PartitionSpec() if array.cut.dim is None else PartitionSpec(SHARD)

    def flatten(leaf: jax.Array, layer: Any) -> jax.Array:
        flat = unpad(array, leaf[layer] if array.block else leaf).reshape(-1)
        return jnp.pad(flat, (0, -flat.size % parts))

    return jax.jit(flatten, out_shardings=NamedSharding(plan.mesh, spec))


def _facts(state: State, step: int | None, beside: Beside) -> tuple[dict[str, Any], list[Piece]]:
    """state.json, and the small tensors that it names."""
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


def _open_place(target: Path, settings: SaveSettings) -> commit.Place:
    def claim() -> str | None:
        if jax.process_index() != 0:
            return None
        if settings.step is not None:
            SAVES.claim_folder(target.parent)
        tidy(target)
        return commit.claim(target).token

    place = commit.Place(target, tell(agree(claim))[0])
    try:
        agree(partial(commit.join, place, jax.process_index()))
    except CheckpointError:
        commit.abandon(place)
        raise
    return place
