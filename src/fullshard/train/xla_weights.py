"""Whole weights of torch into a state on XLA, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch

from fullshard.xla.plan import XlaPlan
from fullshard.xla.step import State, whole_array, with_optimizer


def state_of(
    plan: XlaPlan, weights: Mapping[str, torch.Tensor], tx: optax.GradientTransformation
) -> State:
    """A state with a fresh optimizer; each process keeps the part that its devices hold.

    Args:
        plan: Of the model.
        weights: Whole, by name, in the master dtype.
        tx: The optimizer.
    """

    def place(array: Any, sharding: Any) -> jax.Array:
        tensors = [weights[name].numpy() for name in array.names()]
        whole = np.stack(tensors) if array.block else tensors[0]
        pairs = zip(array.stored_shape, whole.shape, strict=True)
        whole = np.pad(whole, [(0, to - here) for to, here in pairs])
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return with_optimizer(plan, plan.with_arrays(place, plan.shardings), tx)


def torch_weights(state: State) -> dict[str, torch.Tensor]:
    """All weights by name, whole. A collective."""
    found: dict[str, torch.Tensor] = {}
    for array, leaf in zip(state.plan.table.arrays, jax.tree.leaves(state.params), strict=True):
        whole = np.array(whole_array(array, leaf), copy=True)
        layers = whole if array.block else [whole]
        for name, values in zip(array.names(), layers, strict=True):
            found[name] = torch.from_numpy(values)
    return found
