"""An optimizer's state by the names of parameters, as torch names it, and all that is beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fullshard.checkpoint.files import Piece
from fullshard.checkpoint.format import Kind, key_of
from fullshard.errors import CheckpointError
from fullshard.xla.opt_state import Leaf, leaves_of
from fullshard.xla.plan import XlaPlan, path_name

# torch's names of AdamW's states, which a checkpoint has.
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
    """The leaves of an optimizer's state, and under which word each parameter's are saved.

    Adam's go by torch's words. Others go by their whole path, so that no two are confused.
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
    """Leaves of a tree by their paths."""
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def dtype_name(name: str, leaf: Any) -> str:
    """The dtype as a checkpoint names it.

    Raises:
        CheckpointError: It has no name for it.
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
    """(name -> what kind of random key it is, or "") of leaves that all devices have, and data."""
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
