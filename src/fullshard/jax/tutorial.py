"""The functions of JAX FSDP tutorials, corrected, on a mesh with an axis `fsdp`.

XLA's partitioner inserts the collectives. Use these functions for models without a plan, and for
meshes with further axes, such as `tensor`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.errors import ConfigError
from fullshard.planner.optimizers import ADAMW
from fullshard.xla.decoder import IGNORED, token_loss
from fullshard.xla.plan import is_on_mesh, named_leaves, path_name, place_batch, with_auto_axes
from fullshard.xla.processes import place_alike

logger = logging.getLogger(__name__)

AXIS, TENSOR = "fsdp", "tensor"
Axes = str | tuple[str, ...] | None


def shard_fsdp(
    params: Any,
    threshold: int = 1024,
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, Axes] | Sequence[tuple[str, Axes]] | None = None,
) -> Any:
    """Shards large arrays over `fsdp` (matrices also over `tensor`), replicates small ones.

    The largest divisible dimension is sharded. An array without one is replicated; `print_sharding`
    shows it. Only sizes matter, not names, so embeddings are sharded too.

    Args:
        params: Any pytree, also an nnx.State.
        threshold: Minimum number of elements of a sharded array.
        mesh: None: the ambient one (`jax.set_mesh`, or `with mesh:`).
        rules: Mesh axes (None: none) of the logical axes that `with_partitioning` names, as in
            flax. The annotation decides the sharding of such an array, also without rules if it
            names axes of the mesh; the size decides for all other arrays.

    Raises:
        ConfigError: The mesh has no axis `fsdp`, or an annotation has no rule or does not divide.
    """
    mesh = mesh_with_axis(mesh)

    def place(path: Any, node: Any) -> Any:
        names = _annotation(node)
        return jax.tree.map(lambda leaf: put(path_name(path), leaf, names), node)

    def put(name: str, leaf: Any, names: tuple[Any, ...] | None) -> Any:
        spec = None if names is None else _logical(name, leaf.shape, names, rules, mesh)
        if spec is None:
            spec = spec_for(leaf.shape, threshold, mesh)
        # device_put may return the array itself, which a step would donate.
        return place_alike(name, jnp.array(leaf, copy=True), NamedSharding(mesh, spec))

    is_annotated: Any = lambda node: _annotation(node) is not None  # noqa: E731
    placed = jax.tree.map_with_path(place, params, is_leaf=is_annotated)
    whole = [
        name for name, x in named_leaves(placed, ".") if x.size >= threshold and not _is_cut(x)
    ]
    if whole and mesh.shape[AXIS] > 1:
        logger.warning("whole on every device, since nothing divides: %s", ", ".join(whole))
    return placed


def _annotation(node: Any) -> tuple[Any, ...] | None:
    """The names of logical axes of an nnx.Variable or a Linen box."""
    if hasattr(node, "unbox"):
        return tuple(node.names)
    if not hasattr(node, "get_metadata"):
        return None
    metadata = node.get_metadata()
    found = [metadata.get(key) for key in ("out_sharding", "sharding_names", "sharding")]
    return next((tuple(names) for names in found if names is not None), None)


def _several(axis: Axes) -> set[str]:
    return {axis} if isinstance(axis, str) else set(axis or ())


def _logical(
    name: str,
    shape: tuple[int, ...],
    names: tuple[Any, ...],
    rules: Mapping[str, Axes] | Sequence[tuple[str, Axes]] | None,
    mesh: Mesh,
) -> PartitionSpec | None:
    """The PartitionSpec of an annotated array; None if its size decides."""
    table = dict(rules or {})
    unknown = [n for n in names if n and n not in table and not _several(n) <= set(mesh.shape)]
    if unknown and rules is None:
        return None
    if unknown:
        raise ConfigError(f"rules: expected one for {unknown[0]!r}, an axis of {name}. Add it.")
    axes = [table.get(n, n) for n in names]
    for size, axis in zip(shape, axes, strict=False):
        several = _several(axis)
        if not several <= set(mesh.shape):
            raise ConfigError(
                f"rules: expected axes of the mesh, {tuple(mesh.shape)}; got {axis!r} for {name}."
            )
        parts = math.prod(mesh.shape[one] for one in several)
        if size % parts:
            raise ConfigError(
                f"{name}: expected a dimension that {parts} devices ({axis}) divide; got {size}. "
                "Set the rule of its logical axis to None."
            )
    return PartitionSpec(*axes)


def selective_fsdp(
    params: Any, size_threshold: int = 10_000_000, *, mesh: Mesh | None = None
) -> Any:
    """Shards arrays of at least `size_threshold` elements and prints the sharding of each array."""
    found = shard_fsdp(params, size_threshold, mesh=mesh)
    for path, leaf in named_leaves(found, "/"):
        what = "Sharding" if _is_cut(leaf) else "Replicating"
        print(f"{what}: {path} ({leaf.size:,} elements)")  # noqa: T201
    return found


def print_sharding(params: Any, array: Any = None) -> None:
    """Prints the path, shape and PartitionSpec of each array.

    Args:
        params: Any pytree, or the path of an array, as passed by
            `jax.tree_util.tree_map_with_path`.
        array: The array at that path.
    """
    found = named_leaves(params, "/") if array is None else [(path_name(params, "/"), array)]
    for path, leaf in found:
        print(f"{path:50s} {tuple(leaf.shape)!s:20s} {_spec(leaf)}")  # noqa: T201


def sharding_table(params: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    """(name, global shape, PartitionSpec; None on a single device) of each array."""
    return [(name, tuple(leaf.shape), _spec(leaf)) for name, leaf in named_leaves(params)]


def analyze_memory(params: Any, num_devices: int) -> dict[str, int]:
    """Prints and returns the memory of parameters, gradients and Adam's moments in float32.

    Many tutorials count only the parameters, a quarter of it. Activations are not included.

    Args:
        params: Arrays, or the shapes that `jax.eval_shape` returns.
        num_devices: Number of devices over which all of it is sharded.

    Raises:
        ConfigError: `num_devices` is not positive.
    """
    if num_devices < 1:
        raise ConfigError(f"num_devices: expected at least 1, got {num_devices}.")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    one = 4 * count
    moments = ADAMW.num_states * one
    whole = 2 * one + moments
    part = whole // num_devices
    print(  # noqa: T201
        f"\nMemory Analysis:\n"
        f"  Total parameters: {count:,}\n"
        f"  Model size: {_size(one)}\n"
        f"\n  WITHOUT FSDP:\n"
        f"    Per device: {_size(whole)} (parameters {_size(one)}, gradients {_size(one)}, "
        f"optimizer {_size(moments)})\n"
        f"    Total: {_size(whole * num_devices)} ({num_devices} devices)\n"
        f"\n  WITH FSDP:\n"
        f"    Per device: {_size(part)}\n"
        f"    Savings: {100 * (1 - 1 / num_devices):.1f}%\n"
        f"    Can train {num_devices:.1f}\u00d7 larger model!"
    )
    return {
        "num_parameters": count,
        "without_bytes": whole,
        "with_bytes": part,
        "saved_bytes": whole - part,
    }


def fsdp_with_checkpointing(model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that backward recomputes its activations.

    This saves only activation memory.
    """
    return jax.checkpoint(model_fn)


def spec_for(shape: tuple[int, ...], threshold: int, mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec over `fsdp` and, if the mesh has that axis, `tensor`."""
    axes: list[str | None] = [None] * len(shape)
    if math.prod(shape) < threshold:
        return PartitionSpec()
    for axis in (AXIS, TENSOR):
        size = mesh.shape.get(axis, 1)
        fitting = [d for d, n in enumerate(shape) if axes[d] is None and n % size == 0]
        if size > 1 and fitting and (axis == AXIS or len(shape) > 1):
            axes[max(fitting, key=lambda d: (shape[d], -d))] = axis
    while axes and axes[-1] is None:  # the form in which a step returns it
        axes.pop()
    return PartitionSpec(*axes)


def mesh_with_axis(mesh: Mesh | None) -> Mesh:
    """Returns the given mesh, or the ambient one.

    Raises:
        ConfigError: There is no mesh, or it has no axis `fsdp`.
    """
    if mesh is None:
        mesh = jax.sharding.get_mesh() or None
    if mesh is None or mesh.empty:
        with warnings.catch_warnings():  # `with mesh:`, which is deprecated, is visible only there
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.interpreters.pxla import thread_resources

        mesh = thread_resources.env.physical_mesh
    if AXIS not in mesh.shape:
        raise ConfigError(
            f"mesh: expected one with an axis '{AXIS}'; got axes {tuple(mesh.shape)}. Write `with "
            "jax.set_mesh(jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))):`, or pass "
            "mesh=."
        )
    return with_auto_axes(mesh)


def _spec(leaf: Any) -> Any:
    return getattr(getattr(leaf, "sharding", None), "spec", None)


def _size(num_bytes: int) -> str:
    """Formats bytes in GB, as the tutorials do, or in MB or kB if GB would read 0.00."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"


def _is_cut(leaf: Any) -> bool:
    return any(axis is not None for axis in leaf.sharding.spec)


BATCH_AXES = ("replica", "replicate", "data", AXIS)
LossFn = Callable[[Any, Any], Any]
Found = tuple[Any, jax.Array, dict[str, Any]]  # the state's arrays, loss, metrics


def create_fsdp_train_step(
    mesh: Mesh, loss_fn: LossFn | None = None
) -> Callable[[Any, Any], tuple[Any, Any, dict[str, Any]]]:
    """Makes a compiled step (state, batch) -> (state, loss, metrics) that keeps the state sharded.

    Args:
        mesh: A mesh with the axis `fsdp`. Samples are sharded over it and over axes named `data`,
            `replica` and `replicate`.
        loss_fn: (model, batch) -> loss, or (loss, metrics); with a TrainState (params, batch).
            None: cross-entropy of `model(batch["input_ids"])` and `batch["label"]` or `["labels"]`,
            with the accuracy: integers, of which -100 counts nothing, or probabilities per class,
            of which a row of zeros counts nothing.

    Returns:
        A step of this process's samples, and scalars; it raises ConfigError for a batch without
        labels, and DataError for one that the devices do not divide. Its state is what
        `nnx.Optimizer(model, tx)` was, an nnx.ModelAndOptimizer, which is changed in place and
        returned too; or parameters with an optax state, as flax's TrainState has them, which is
        used up.
    """
    from flax import nnx

    mesh = mesh_with_axis(mesh)
    axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)

    @partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def run(graph: Any, arrays: Any, batch: Any, shardings: Any) -> Found:
        update = _update_train_state if graph is None else partial(_update_nnx, graph)
        found, loss, metrics = update(loss_fn, arrays, batch)
        leaves, structure = jax.tree.flatten(found)
        # Without this, the partitioner may choose other shardings for updated arrays.
        pinned = jax.tree.map(jax.lax.with_sharding_constraint, leaves, list(shardings))
        return jax.tree.unflatten(structure, pinned), loss, metrics

    def train_step(state: Any, batch: Any) -> Found:
        graph, arrays = nnx.split(state) if _holds_model(state) else (None, state)
        arrays = jax.tree.map(partial(_on_mesh, mesh), arrays)
        shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(arrays))
        if loss_fn is None:
            _check_keys(batch)
        batch = place_batch(mesh, axes, batch)
        arrays, loss, metrics = run(graph, arrays, batch, shardings)
        if jax.default_backend() == "cpu":
            jax.block_until_ready(arrays)  # as in xla/step.py
        if graph is None:
            return arrays, loss, metrics
        nnx.update(state, arrays)
        return state, loss, metrics

    return train_step


def _check_keys(batch: Any) -> None:
    """Raises ConfigError if the default loss lacks a key."""
    keys = list(batch) if isinstance(batch, Mapping) else []
    if not ("input_ids" in keys and ("label" in keys or "labels" in keys)):
        raise ConfigError(
            "batch: expected the keys 'input_ids' and 'label' or 'labels', got "
            f"{', '.join(map(repr, keys)) or type(batch).__name__}. Add the missing one, or pass "
            "create_fsdp_train_step a loss_fn(model, batch) that reads your keys."
        )


def _holds_model(state: Any) -> bool:
    """Whether the state is from nnx; otherwise it is a TrainState."""
    if not hasattr(state, "model") and not hasattr(state, "apply_gradients"):
        raise ConfigError(
            "create_fsdp_train_step: expected a state that contains its model; got "
            f"{type(state).__name__}. Write nnx.ModelAndOptimizer(model, tx): since flax 0.11 "
            "nnx.Optimizer contains only the optimizer. Or use flax's "
            "TrainState.create(apply_fn=..., params=..., tx=...)."
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
    if not isinstance(found, tuple):
        return found, {}
    if len(found) != 2 or isinstance(found[1], (int, float)) or getattr(found[1], "ndim", 1) == 0:
        raise ConfigError(
            "loss_fn: expected a mean loss, or (mean loss, metrics by name); got a tuple of "
            f"{len(found)}{' with a number as metrics' * (len(found) == 2)}. Divide the sum by the "
            "count, and name the metrics."
        )
    return found


def _classify(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["input_ids"])
    labels = batch["labels"] if "labels" in batch else batch["label"]
    num_classes, is_rows = logits.shape[-1], labels.shape == logits.shape
    is_index = labels.shape == logits.shape[:-1] and labels.dtype.kind in "iub"
    if num_classes < 2 or not (is_index or (is_rows and logits.ndim > 1)):
        raise ConfigError(
            f"batch: expected integers of shape {logits.shape[:-1]} as labels, or probabilities of "
            f"shape {logits.shape}, of 2 or more classes; got {labels.dtype} of shape "
            f"{labels.shape}. For another task pass create_fsdp_train_step a loss_fn(model, batch)."
        )
    if is_rows:  # probabilities, including one-hot
        loss = -jnp.sum(labels.astype(logits.dtype) * jax.nn.log_softmax(logits))
        counts, labels = jnp.any(labels != 0, axis=-1), jnp.argmax(labels, axis=-1)
    else:
        labels = labels.astype(jnp.int32)
        counts = labels != IGNORED
        unknown = counts & (labels < 0)  # as classes beyond the last: the loss is NaN
        loss = token_loss(logits, jnp.where(unknown, num_classes, labels))[0]
    total = jnp.maximum(jnp.sum(counts), 1)
    right = counts & (jnp.argmax(logits, axis=-1) == labels)
    return loss / total, {"accuracy": jnp.sum(right) / total}


def _on_mesh(mesh: Mesh, leaf: Any) -> Any:
    """Replicates arrays that were created on one device, such as counters."""
    return leaf if is_on_mesh(leaf) else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
