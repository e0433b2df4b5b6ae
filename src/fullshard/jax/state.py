"""Saving and loading of states, memory of a step, padding of batches, and models as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import SaveSettings
from fullshard.xla.aot import memory_of
from fullshard.xla.decoder import IGNORED
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import State, Step, stored, with_optimizer
from fullshard.xla_state import read, write


def save(
    folder: str | PathLike[str], state: State, *, step: int | None = None, **values: Any
) -> Path:
    """Save a checkpoint that either engine loads on any number of devices. A collective.

    Args:
        folder: On a file system that all processes see.
        state: State of `init`, `load` or a step.
        step: With it the checkpoint is `folder/step-00000100`, without `folder` itself.
        **values: Numbers, texts, lists and mappings to keep beside.

    Raises:
        CheckpointError: It could not be written; older checkpoints are untouched.
    """
    settings = SaveSettings(step=step)
    return write.save(Path(folder), state, settings, write.Beside(values=values))


def load(
    plan: XlaPlan,
    path: str | PathLike[str],
    tx: optax.GradientTransformation | None = None,
    variables: Any = None,
) -> State:
    """A state from a checkpoint of either engine, each device the bytes that it holds.

    Args:
        plan: Plan of the model that was saved.
        path: A checkpoint, a folder of step-* (its newest complete one), or a Hugging Face folder.
        tx: The optimizer whose state was saved; None: parameters alone.
        variables: Arrays like the state's variables that were saved.

    Raises:
        CheckpointError: There is none, or it is of another model; names the tensor.
    """
    return read.load(plan, Path(path), tx, variables)[0]


def load_values(path: str | PathLike[str]) -> dict[str, Any]:
    """The `step` and the `**values` that `save` was given. A collective.

    Args:
        path: As for `load`.
    """
    return read.load_values(Path(path))


def shard(
    plan: XlaPlan,
    params: Any,
    tx: optax.GradientTransformation | None = None,
    variables: Any = None,
) -> State:
    """A state from parameters that are there already, on the host or on any devices.

    They are copied: a step uses up the state, and not the caller's arrays.
    """

    def place(array: ArrayPlan, leaf: Any) -> Any:
        return stored(array, jnp.array(leaf, copy=True))

    whole = plan.with_arrays(place, params)
    placed = jax.device_put(whole, plan.shardings)
    return with_optimizer(plan, placed, tx, variables=variables)


def memory(step: Step, state: State, batch: Any) -> dict[str, int]:
    """Bytes a device that the compiled step takes, as XLA counts them.

    Returns:
        `arguments` (state and batch), `in_place` (of these, given back in the same memory),
        `temporary`, and `peak`, which on the CPU is their sum, since it reports none itself.
    """
    compiled = step.compile(state, step.place(batch))
    return memory_of(compiled, on_cpu=jax.default_backend() == "cpu")


def pad_batch(
    batch: Mapping[str, Any],
    size: int,
    *,
    labels: str | None = None,
    mask: str | None = None,
) -> dict[str, Any]:
    """A batch with `size` samples: the last is repeated, with labels that count nothing.

    So the last batch of an epoch divides over the devices, and needs no program of its own.

    Args:
        batch: Arrays by name, whose first axis counts samples.
        size: Samples to fill it up to.
        labels: Name of the labels; None: `label` or `labels`. Added integers are -100; added rows
            of probabilities are zeros.
        mask: Name of an array that is 1 where a sample counts, for labels of any other kind. It is
            made if it is not there.

    Raises:
        ConfigError: There are more samples, or the labels cannot be padded.
    """
    there = {name: np.asarray(value) for name, value in batch.items()}
    counts = {len(value) for value in there.values()}
    if len(counts) != 1 or max(counts) > size:
        raise ConfigError(f"pad_batch: expected arrays of at most {size} samples; got {counts}.")
    if mask is not None:
        there.setdefault(mask, np.ones(max(counts), np.float32))
    elif labels is None:
        labels = next((name for name in ("labels", "label") if name in there), None)
    if mask is None and labels not in there:
        raise ConfigError(
            f"pad_batch: expected the name of the labels among {', '.join(there)}; got {labels}. "
            "Give labels=, or mask= and multiply by it in loss_fn."
        )

    def fill(name: str, value: np.ndarray) -> np.ndarray:
        more = np.repeat(value[-1:], size - len(value), axis=0)
        if name == mask:
            more = np.zeros_like(more)
        elif mask is None and name == labels:
            value, more = _uncounted(name, value, more)
        return np.concatenate([value, more])

    return {name: fill(name, value) for name, value in there.items()}


def _uncounted(name: str, value: np.ndarray, more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels, in a dtype that has a sign, and added ones that count nothing."""
    is_float = value.dtype.kind not in "iub"
    is_rows = value.ndim > 1 and np.all(value >= 0) and np.allclose(value.sum(-1), 1)
    if is_float and is_rows:
        return value, np.zeros_like(more)
    if value.dtype.kind in "iu" and not is_rows:
        wide = np.promote_types(value.dtype, np.int16)
        return value.astype(wide), np.full(more.shape, IGNORED, wide)
    raise ConfigError(
        f"pad_batch: expected integers or floating rows of probabilities as {name}; got "
        f"{value.dtype} of shape {value.shape}{' that sum to 1' * bool(is_rows)}. Give mask=NAME, "
        "and multiply by it in loss_fn; or make one-hot rows floating point."
    )


def split(model: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    """A model's parameters, and what makes the model of any such again.

    Args:
        model: An nnx.Module, or a pytree such as an Equinox module, whose floating-point arrays
            are its parameters.

    Raises:
        ConfigError: It has state beside its parameters, which a step would leave as it is.
    """
    graph = _split_nnx(model)
    return graph if graph is not None else _split_pytree(model)


def _split_nnx(model: Any) -> tuple[Tree, Callable[[Tree], Any]] | None:
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return None
    graph, params, others = nnx.split(model, nnx.Param, ...)
    for path, variable in nnx.to_flat_state(others):
        name = ".".join(map(str, path))
        raise ConfigError(
            f"{name}: expected a model whose state is its parameters; got a "
            f"{type(variable).__name__}, which no step of fullshard.jax.train_step would change. "
            "Leave it out of the model (dropout: give the call its rngs), or use "
            "create_fsdp_train_step, which carries the whole state."
        )
    return params, partial(nnx.merge, graph)


def _split_pytree(model: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    def is_parameter(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    rest = jax.tree.map(lambda leaf: None if is_parameter(leaf) else leaf, model)
    params = jax.tree.map(lambda leaf: leaf if is_parameter(leaf) else None, model)

    def rebuild(arrays: Tree) -> Any:
        return jax.tree.map(
            lambda array, other: other if array is None else array,
            arrays,
            rest,
            is_leaf=lambda leaf: leaf is None,
        )

    return params, rebuild
