"""Saving and loading states, a step's memory, padding of batches, and models as objects."""

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

from fullshard import xla_state
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArrayPlan
from fullshard.saving import SaveSettings
from fullshard.xla.aot import memory_of
from fullshard.xla.decoder import IGNORED
from fullshard.xla.plan import Tree, XlaPlan, is_on_mesh, make_mesh, named_leaves, path_name, unpad
from fullshard.xla.plan import plan as make_plan
from fullshard.xla.processes import place_alike
from fullshard.xla.step import State, Step, stored, with_optimizer


def save(
    folder: str | PathLike[str], state: Any, *, step: int | None = None, **values: Any
) -> Path:
    """Saves a checkpoint that both engines load on any number of devices. A collective.

    Args:
        folder: Folder on a file system that all processes share.
        state: State from `init`, `load` or a step; or any tree of arrays, such as a TrainState or
            `nnx.state(...)` of `create_fsdp_train_step`.
        step: If given, the checkpoint is `folder/step-00000100`; otherwise `folder` itself.
        **values: Numbers, strings, lists and mappings to store in the checkpoint.

    Raises:
        CheckpointError: Writing failed; older checkpoints are intact.
    """
    settings = SaveSettings(step=step)
    if not isinstance(state, State):
        _check_kept(state)
        state = _planned(state)
    return xla_state.save(Path(folder), state, settings, xla_state.Extras(values=values))


def load(
    plan: Any,
    path: str | PathLike[str],
    tx: optax.GradientTransformation | None = None,
    variables: Any = None,
) -> Any:
    """Loads a state from a checkpoint of either engine; each device reads only its shards.

    Args:
        plan: Plan of the saved model; or a tree like the saved one, whose shardings and dtypes the
            returned tree has.
        path: A checkpoint, a folder of step-* (the newest complete one), a Hugging Face folder, or
            a tree of arrays that orbax wrote.
        tx: The optimizer whose state was saved; None: parameters only.
        variables: Arrays like the saved state's variables.

    Raises:
        CheckpointError: There is no checkpoint, or it belongs to another model; names the tensor.
    """
    if isinstance(plan, XlaPlan):
        return xla_state.load(plan, Path(path), tx, variables)[0]
    like = _planned(plan)
    found = xla_state.load(like.plan, Path(path), None, like.variables)[0]

    def restored(found: State) -> list[jax.Array]:
        own = like.plan.with_arrays(unpad, found.params) | found.variables
        return [own[name].astype(jnp.asarray(leaf).dtype) for name, leaf in named_leaves(plan)]

    placed = [
        leaf.sharding if is_on_mesh(leaf) else like.plan.replicated
        for leaf in jax.tree.leaves(plan)
    ]
    return jax.tree.unflatten(
        jax.tree.structure(plan), jax.jit(restored, out_shardings=placed)(found)
    )


def _check_kept(tree: Any) -> None:
    """Raises ConfigError if two leaves have one name, or jax would round a leaf."""
    names = set[str]()
    for name, leaf in named_leaves(tree):
        if name in names:
            raise ConfigError(f"{name}: expected one leaf of this name; got two. Rename one.")
        names.add(name)
        if isinstance(leaf, np.ndarray | np.generic):
            own = np.asarray(jnp.asarray(leaf))
            if own.dtype != leaf.dtype and not np.array_equal(own, leaf, equal_nan=True):
                raise ConfigError(
                    f"{name}: expected numbers that jax keeps; got {leaf.dtype}, of which it keeps "
                    f"{own.dtype}. Convert it, enable jax_enable_x64, or save it as a value."
                )


def _planned(tree: Any) -> State:
    """A tree of arrays as a state: floating-point ones are its parameters, others its variables."""
    leaves = dict(named_leaves(jax.tree.map(jnp.asarray, tree)))
    on_mesh = [leaf.sharding.mesh for leaf in leaves.values() if is_on_mesh(leaf)]
    devices = list(on_mesh[0].devices.flat) if on_mesh else jax.devices()
    others = {n: x for n, x in leaves.items() if not jnp.issubdtype(x.dtype, jnp.inexact)}
    floats = {name: leaf for name, leaf in leaves.items() if name not in others}
    plan = make_plan(floats, None, make_mesh(1, len(devices), devices=devices))
    place = jax.jit(partial(plan.with_arrays, stored), out_shardings=plan.shardings)
    return with_optimizer(plan, place(floats), None, variables=others)


def load_values(path: str | PathLike[str]) -> dict[str, Any]:
    """Returns the `step` and the `**values` passed to `save`. A collective.

    Args:
        path: Path of the checkpoint, as in `load`.
    """
    return xla_state.load_values(Path(path))


def shard(
    plan: XlaPlan,
    params: Any,
    tx: optax.GradientTransformation | None = None,
    variables: Any = None,
) -> State:
    """Makes a state from existing parameters, on the host or on any devices.

    The parameters are copied, so a step donates the copy and not the caller's arrays.
    """

    def place(array: ArrayPlan, leaf: Any) -> Any:
        return stored(array, jnp.array(leaf, copy=True))

    whole = plan.with_arrays(place, params)
    placed = place_alike("params", whole, plan.shardings)
    return with_optimizer(plan, placed, tx, variables=variables)


def memory(step: Step, state: State, batch: Any) -> dict[str, int]:
    """Returns the memory of the compiled step, in bytes per device, as reported by XLA.

    Returns:
        `arguments` (state and batch), `in_place` (the donated part of these), `temporary`, and
        `peak`, which is their sum on CPUs, because the CPU backend reports none.
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
    """Pads a batch to `size` samples with copies of the last sample whose labels are ignored.

    The last batch of an epoch then divides over the devices and does not recompile the step.

    Args:
        batch: Arrays by name; the first axis counts samples.
        size: Number of samples after padding.
        labels: Name of the labels; None: `label` or `labels`, if only one is there. Added integer
            labels are -100; added rows of probabilities are zero.
        mask: Name of an array that is 1 for samples that count, for labels of any other kind. It is
            created if absent.

    Raises:
        ConfigError: The batch has more samples, or the labels cannot be padded.
    """
    there = {name: np.asarray(value) for name, value in batch.items()}
    counts = {len(value) for value in there.values()}
    if len(counts) != 1 or not 1 <= max(counts) <= size:
        raise ConfigError(
            f"pad_batch: expected arrays of 1 to {size} samples, as many in each; got "
            f"{sorted(counts)}. Drop or divide the batch."
        )
    if mask is not None:
        there.setdefault(mask, np.ones(max(counts), np.float32))
    elif labels is None:
        named = [name for name in ("labels", "label") if name in there]
        labels = named[0] if len(named) == 1 else None
    if mask is None and labels not in there:
        raise ConfigError(
            f"pad_batch: expected the name of the labels among {', '.join(there)}; got {labels}. "
            "Pass labels=, or pass mask= and multiply by it in loss_fn."
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
    """The labels in a signed dtype, padded with ignored ones."""
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
    """Splits a model into its parameters and a function that rebuilds the model from parameters.

    Args:
        model: An nnx.Module, or a pytree such as an Equinox module, whose floating-point arrays
            are its parameters.

    Raises:
        ConfigError: The model has other state, which a step would not update.
    """
    graph = _split_nnx(model)
    return graph if graph is not None else _split_pytree(model)


def _split_nnx(model: Any) -> tuple[Tree, Callable[[Tree], Any]] | None:
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return None
    graph, params, others = nnx.split(model, nnx.Param, ...)
    for path, variable in nnx.to_flat_state(others):
        raise _has_state(
            ".".join(map(str, path)),
            variable,
            "Leave it out of the model (dropout: give the call its rngs), pass it as variables= or "
            "use create_fsdp_train_step, which carries the whole state.",
        )
    return params, partial(nnx.merge, graph)


def _has_state(name: str, node: Any, advice: str) -> ConfigError:
    return ConfigError(
        f"{name}: expected a model whose state is its parameters; got a {type(node).__name__}, "
        f"which fullshard.jax.train_step would never change. {advice}"
    )


def _split_pytree(model: Any) -> tuple[Tree, Callable[[Tree], Any]]:
    def is_parameter(leaf: Any) -> bool:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)

    def is_state(node: Any) -> bool:
        return type(node).__name__ == "StateIndex"  # Equinox's, of BatchNorm for example

    for path, node in jax.tree.leaves_with_path(model, is_leaf=is_state):
        if is_state(node) and jax.tree.leaves(node):
            advice = "Make it with equinox.nn.make_with_state, and pass its state as variables=."
            raise _has_state(path_name(path), node, advice)
    rest = jax.tree.map(lambda leaf: None if is_parameter(leaf) else leaf, model)
    params = jax.tree.map(lambda leaf: leaf if is_parameter(leaf) else None, model)

    def either(array: Any, other: Any) -> Any:
        return other if array is None else array

    def rebuild(arrays: Tree) -> Any:
        return jax.tree.map(either, arrays, rest, is_leaf=lambda leaf: leaf is None)

    return params, rebuild
