"""The training step of the FSDP tutorials for JAX, on a mesh with an axis `fsdp`, mended."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.errors import ConfigError
from fullshard.jax.tutorial import AXIS, mesh_with_axis
from fullshard.xla.decoder import IGNORED

BATCH_AXES = ("replica", "replicate", "data", AXIS)
LossFn = Callable[[Any, Any], Any]
Found = tuple[Any, jax.Array, dict[str, Any]]  # the state's arrays, loss, metrics


def create_fsdp_train_step(
    mesh: Mesh, loss_fn: LossFn | None = None
) -> Callable[[Any, Any], tuple[Any, Any, dict[str, Any]]]:
    """Make a compiled step (state, batch) -> (state, loss, metrics) that keeps everything sharded.

    Args:
        mesh: Has the axis `fsdp`, which divides the samples of a batch too, as do axes named
            `data`, `replica` and `replicate`.
        loss_fn: (model, batch) -> loss, or (loss, metrics); with a TrainState (params, batch).
            None: cross-entropy of `model(batch["input_ids"])` and `batch["label"]` or `["labels"]`,
            with the accuracy: integers, of which -100 counts nothing, or probabilities per class,
            of which a row of zeros counts nothing.

    Returns:
        A step of this process's samples; it raises ConfigError for a batch without labels, or one
        that the devices do not divide. Its state is what `nnx.Optimizer(model, tx)` was, an
        nnx.ModelAndOptimizer, which is changed in place and returned too; or parameters with an
        optax state, as flax's TrainState has them, which is used up.
    """
    from flax import nnx

    mesh = mesh_with_axis(mesh)

    @partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def run(graph: Any, arrays: Any, batch: Any, shardings: Any) -> Found:
        update = _update_train_state if graph is None else partial(_update_nnx, graph)
        found, loss, metrics = update(loss_fn, arrays, batch)
        leaves, structure = jax.tree.flatten(found)
        # Left to itself, the partitioner gives updated arrays other places.
        pinned = jax.tree.map(jax.lax.with_sharding_constraint, leaves, list(shardings))
        return jax.tree.unflatten(structure, pinned), loss, metrics

    def train_step(state: Any, batch: Any) -> Found:
        graph, arrays = nnx.split(state) if _holds_model(state) else (None, state)
        arrays = jax.tree.map(partial(_on_mesh, mesh), arrays)
        shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(arrays))
        batch = _place(batch, mesh, ("label", "labels") if loss_fn is None else ())
        arrays, loss, metrics = run(graph, arrays, batch, shardings)
        if jax.default_backend() == "cpu":
            jax.block_until_ready(arrays)  # as in xla/step.py
        if graph is None:
            return arrays, loss, metrics
        nnx.update(state, arrays)
        return state, loss, metrics

    return train_step


def _place(batch: Any, mesh: Mesh, labels: tuple[str, ...]) -> Any:
    """The batch with its samples divided over the devices; scalars are replicated.

    Args:
        batch: Arrays whose first dimension counts samples.
        mesh: With the axis `fsdp`.
        labels: Keys of which the batch needs one; () where the user's own loss reads it.

    Raises:
        ConfigError: A key is missing, or the samples of an array do not divide.
    """
    keys = list(batch) if isinstance(batch, Mapping) else []
    if labels and not ("input_ids" in keys and any(name in keys for name in labels)):
        raise ConfigError(
            f"batch: expected the keys 'input_ids' and {' or '.join(map(repr, labels))}, got "
            f"{', '.join(map(repr, keys)) or type(batch).__name__}. Add the missing one, or give "
            "create_fsdp_train_step a loss_fn(model, batch) that reads your keys."
        )
    axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
    num_parts = math.prod(mesh.shape[axis] for axis in axes)
    size = max(1, num_parts // jax.process_count())

    def place(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return leaf
        spec = PartitionSpec(axes) if jnp.ndim(leaf) else PartitionSpec()
        if jnp.ndim(leaf) and jnp.shape(leaf)[0] % size:
            count = jnp.shape(leaf)[0]
            fewer = count // size * size
            raise ConfigError(
                f"batch{jax.tree_util.keystr(path)}: expected a number of samples that {size} "
                f"devices divide, got {count}. Drop {count - fewer} of them (drop_last of your "
                f"loader), or pad to {fewer + size} and mask the padding in loss_fn."
            )
        sharding = NamedSharding(mesh, spec)
        if jax.process_count() == 1:  # a device's array goes to the others without the host
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map_with_path(place, batch)


def _holds_model(state: Any) -> bool:
    """Whether it is of nnx; else it is a TrainState."""
    if not hasattr(state, "model") and not hasattr(state, "apply_gradients"):
        raise ConfigError(
            "create_fsdp_train_step: expected a state that holds its model; got "
            f"{type(state).__name__}. Write nnx.ModelAndOptimizer(model, tx): since flax 0.11 "
            "nnx.Optimizer holds the optimizer alone. Or flax's TrainState.create(apply_fn=..., "
            "params=..., tx=...)."
        )
    return hasattr(state, "model")


def _update_nnx(graph: Any, loss_fn: LossFn | None, arrays: Any, batch: Any) -> Found:
    from flax import nnx

    state = nnx.merge(graph, arrays)
    compute = partial(_with_metrics, loss_fn or _classify)
    (loss, metrics), grads = nnx.value_and_grad(compute, has_aux=True)(state.model, batch)
    state.update(grads)
    return nnx.state(state), loss, metrics


def _update_train_state(loss_fn: LossFn | None, state: Any, batch: Any) -> Found:
    def compute(params: Any) -> tuple[Any, dict[str, Any]]:
        if loss_fn is not None:
            return _with_metrics(loss_fn, params, batch)
        return _classify(partial(state.apply_fn, {"params": params}), batch)

    (loss, metrics), grads = jax.value_and_grad(compute, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, metrics


def _with_metrics(loss_fn: LossFn, model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    found = loss_fn(model, batch)
    return found if isinstance(found, tuple) else (found, {})


def _classify(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["input_ids"])
    labels = batch["labels"] if "labels" in batch else batch["label"]
    likely = jax.nn.log_softmax(logits)
    if labels.shape == logits.shape:  # probabilities, one-hot ones among them
        losses = -jnp.sum(labels.astype(likely.dtype) * likely, axis=-1)
        counts, labels = jnp.any(labels != 0, axis=-1), jnp.argmax(labels, axis=-1)
    else:
        labels = labels.astype(jnp.int32)
        counts = labels != IGNORED
        chosen = jnp.where(counts, labels, 0)[..., None]
        losses = -jnp.take_along_axis(likely, chosen, axis=-1)[..., 0]
    total = jnp.maximum(jnp.sum(counts), 1)
    right = counts & (jnp.argmax(logits, axis=-1) == labels)
    return jnp.sum(losses * counts) / total, {"accuracy": jnp.sum(right) / total}


def _on_mesh(mesh: Mesh, leaf: Any) -> Any:
    """Counters and the like are born on one device: copied over all."""
    on_mesh = isinstance(getattr(leaf, "sharding", None), NamedSharding)
    return leaf if on_mesh else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
