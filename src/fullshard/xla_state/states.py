"""An optimizer's state by the names of parameters, as torch names it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fullshard.errors import CheckpointError
from fullshard.planner.arrays import ArrayPlan
from fullshard.xla.step import State

# torch's names of AdamW's states, which a checkpoint has.
STATE_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NUMPY = {name: np.dtype(jnp.dtype(dtype)) for dtype, name in DTYPES.items()}
OPTAX = "$optax"  # numbers of an optimizer's state that are no step counts


def optimizer_arrays(state: State) -> list[tuple[int, str, ArrayPlan, jax.Array]]:
    """(place of the parameter, torch's name of the state, the parameter's plan, the state)."""
    return [found for found, _ in sorted_states(state) if found is not None]


def sorted_states(state: State) -> list[tuple[tuple[int, str, ArrayPlan, Any] | None, Any]]:
    """Each leaf of the optimizer's state, after what it is to a parameter (None: a number)."""
    paths = jax.tree.leaves_with_path(state.params)
    arrays = state.plan.table.arrays
    known = {path: at for at, (path, _) in enumerate(paths)}
    found: list[Any] = []
    for path, leaf in jax.tree.leaves_with_path(state.opt_state):
        owner = next((path[i:] for i in range(len(path) + 1) if path[i:] in known), None)
        if owner is None or leaf.shape != arrays[known[owner]].stored_shape:
            found.append((None, leaf))
            continue
        word = jax.tree_util.keystr(path[: len(path) - len(owner)], simple=True, separator=".")
        word = word.rpartition(".")[2]
        at = known[owner]
        found.append(((at, STATE_NAMES.get(word, word), arrays[at], leaf), leaf))
    return found


def numbers_of(state: State) -> list[Any]:
    """What of an optimizer's state belongs to no parameter; step counts as None."""
    numbers = [leaf for owner, leaf in sorted_states(state) if owner is None]
    if any(leaf.ndim for leaf in numbers):
        raise CheckpointError(
            "optimizer: expected states shaped like parameters, and numbers; got one of another "
            "shape. Save the parameters alone, with a state whose opt_state is None."
        )
    counts = [bool(jnp.issubdtype(leaf.dtype, jnp.integer)) for leaf in numbers]
    return [None if c else float(leaf) for c, leaf in zip(counts, numbers, strict=True)]


def bytes_of(values: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    data: Any = values.reshape(-1).view(np.uint8)
    return memoryview(data)
