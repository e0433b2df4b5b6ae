"""Whole weights of torch into a state on XLA, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from optax import GradientTransformation

from fullshard.planner.arrays import ArrayPlan
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import State, whole_array, with_optimizer


def state_of(
    plan: XlaPlan, weights: Mapping[str, torch.Tensor], tx: GradientTransformation
) -> State:
    """A state with a fresh optimizer; each process keeps the part that its devices hold.

    Args:
        plan: Plan of the model.
        weights: Whole, by name, in the master dtype.
        tx: The optimizer.
    """

    def place(array: ArrayPlan, sharding: Any) -> jax.Array:
        return _placed(array, sharding, weights)

    return with_optimizer(plan, plan.with_arrays(place, plan.shardings), tx)


def state_beside(
    plan: XlaPlan, read: Tree, weights: Mapping[str, torch.Tensor], tx: GradientTransformation
) -> State:
    """The same of arrays that lie already, `read`, a tree by names; the others are placed."""
    leaves = jax.tree.leaves_with_path(read)
    there = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}

    def place(array: ArrayPlan, sharding: Any) -> jax.Array:
        found = there.get(array.name)
        return _placed(array, sharding, weights) if found is None else found

    return with_optimizer(plan, plan.with_arrays(place, plan.shardings), tx)


def _placed(array: ArrayPlan, sharding: Any, weights: Mapping[str, torch.Tensor]) -> jax.Array:
    tensors = [weights[name].numpy() for name in array.names()]
    whole = np.stack(tensors) if array.block else tensors[0]
    pairs = zip(array.stored_shape, whole.shape, strict=True)
    whole = np.pad(whole, [(0, to - here) for to, here in pairs])
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def torch_weights(state: State) -> dict[str, torch.Tensor]:
    """All weights by name, whole. A collective."""
    found: dict[str, torch.Tensor] = {}
    for array, leaf in zip(state.plan.table.arrays, jax.tree.leaves(state.params), strict=True):
        whole = np.array(whole_array(array, leaf), copy=True)
        layers = whole if array.block else [whole]
        for name, values in zip(array.names(), layers, strict=True):
            found[name] = torch.from_numpy(values)
    return found
