"""The functions of the FSDP tutorials for JAX, on a mesh with an axis `fsdp`, mended.

XLA's partitioner places the collectives here: for models of one's own that know nothing of plans,
and for meshes with further axes, such as `tensor`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.errors import ConfigError
from fullshard.planner.optimizers import ADAMW

logger = logging.getLogger(__name__)

AXIS, TENSOR = "fsdp", "tensor"
GB = 1e9  # as the tutorials count


def shard_fsdp(params: Any, threshold: int = 1024, *, mesh: Mesh | None = None) -> Any:
    """Large arrays cut over the axis `fsdp` (matrices also over `tensor`), small ones copied.

    A dimension that divides is chosen, the largest; where none does the array is copied, which
    `print_sharding` shows. Not the name decides but the size: embeddings are cut too.

    Args:
        params: Any pytree, also an nnx.State.
        threshold: Elements from which on an array is cut.
        mesh: None: the ambient one (`jax.set_mesh`, or `with mesh:`).
    """
    mesh = _ambient(mesh)

    def place(leaf: Any) -> Any:
        return jax.device_put(leaf, NamedSharding(mesh, spec_for(leaf.shape, threshold, mesh)))

    placed = jax.tree.map(place, params)
    whole = [name for name, x in _named(placed) if x.size >= threshold and not _is_cut(x)]
    if whole and mesh.shape[AXIS] > 1:
        logger.warning("whole on every device, since nothing divides: %s", ", ".join(whole))
    return placed


def selective_fsdp(
    params: Any, size_threshold: int = 10_000_000, *, mesh: Mesh | None = None
) -> Any:
    """As `shard_fsdp`, and says of each array what became of it."""
    found = shard_fsdp(params, size_threshold, mesh=mesh)
    for name, leaf in _named(found):
        what = "Sharding" if _is_cut(leaf) else "Replicating"
        print(f"{what} {name}: {leaf.size:,} params")  # noqa: T201
    return found


def print_sharding(params: Any) -> None:
    """A line an array: name, shape, how it lies on the mesh."""
    for name, shape, spec in sharding_table(params):
        print(f"{name}: shape={shape}, sharding={spec}")  # noqa: T201


def sharding_table(params: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    """(name, global shape, PartitionSpec; None on a single device) of each array."""
    return [
        (name, tuple(leaf.shape), getattr(leaf.sharding, "spec", None))
        for name, leaf in _named(params)
    ]


def analyze_memory(params: Any, num_devices: int) -> dict[str, int]:
    """Print and return what training with Adam in float32 keeps: parameters, gradients, moments.

    Common documents show the parameters alone, a quarter of it. Activations come on top.

    Args:
        params: Arrays, or shapes of `jax.eval_shape`.
        num_devices: Over which everything is cut.
    """
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    one = 4 * count
    whole = (2 + ADAMW.num_states) * one
    part = whole // num_devices
    saved = 100 * (1 - 1 / num_devices)
    print(  # noqa: T201
        f"Model: {count:,} parameters\n"
        f"WITHOUT FSDP:\n"
        f"  Parameters: {one / GB:.2f} GB\n  Gradients: {one / GB:.2f} GB\n"
        f"  Optimizer: {ADAMW.num_states * one / GB:.2f} GB\n  Per device: {whole / GB:.2f} GB\n"
        f"WITH FSDP ({num_devices} devices):\n  Per device: {part / GB:.2f} GB\n"
        f"Savings: {saved:.1f}%\nReduction: {num_devices:.1f}\u00d7"
    )
    return {
        "num_parameters": count,
        "without_bytes": whole,
        "with_bytes": part,
        "saved_bytes": whole - part,
    }


def fsdp_with_checkpointing(model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose activations backward computes anew.

    It saves activations and nothing else: parameters, gradients and moments stay as they are.
    """
    return jax.checkpoint(model_fn)


def create_fsdp_train_step(
    mesh: Mesh, loss_fn: Callable[[Any, Any], Any] | None = None
) -> Callable[[Any, Any], tuple[Any, Any, dict[str, Any]]]:
    """(state, batch) -> (state, loss, metrics), compiled; parameters and Adam's states stay cut.

    Args:
        mesh: With the axis `fsdp`, over which samples are parted too.
        loss_fn: (model, batch) -> loss, or (loss, metrics). None: cross-entropy of
            `model(batch["input_ids"])` and integer or one-hot `batch["label"]` or `["labels"]`,
            with the accuracy.

    Returns:
        A step. Its state is what `nnx.Optimizer(model, tx)` was: an nnx.ModelAndOptimizer, which
        is changed in place and returned too.
    """
    from flax import nnx

    compute = loss_fn or _classify
    rows = NamedSharding(mesh, PartitionSpec(AXIS))

    def compute_with_metrics(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        found = compute(model, batch)
        return found if isinstance(found, tuple) else (found, {})

    def pin(tree: Any, shardings: Any) -> Any:
        """Left to itself, the partitioner gives updated arrays other places."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)

    @partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def run(graph: Any, arrays: Any, batch: Any, shardings: Any) -> tuple[Any, Any, Any]:
        state = nnx.merge(graph, arrays)
        model = state.model
        (loss, metrics), grads = nnx.value_and_grad(compute_with_metrics, has_aux=True)(
            model, batch
        )
        state.update(grads)
        leaves, structure = jax.tree.flatten(nnx.state(state))
        return jax.tree.unflatten(structure, pin(leaves, list(shardings))), loss, metrics

    def train_step(state: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        if not hasattr(state, "model"):
            raise ConfigError(
                "create_fsdp_train_step: expected a state that holds its model; got "
                f"{type(state).__name__}. Write nnx.ModelAndOptimizer(model, tx): since flax 0.11 "
                "nnx.Optimizer holds the optimizer alone."
            )
        graph, arrays = nnx.split(state)
        arrays = jax.tree.map(partial(_on_mesh, mesh), arrays)
        shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(arrays))
        batch = jax.tree.map(lambda leaf: jax.device_put(leaf, rows), batch)
        arrays, loss, metrics = run(graph, arrays, batch, shardings)
        if jax.default_backend() == "cpu":
            jax.block_until_ready(arrays)  # as in xla/step.py
        nnx.update(state, arrays)
        return state, loss, metrics

    return train_step


def spec_for(shape: tuple[int, ...], threshold: int, mesh: Mesh) -> PartitionSpec:
    """The dimensions that `fsdp` and, where there is such an axis, `tensor` cut."""
    axes: list[str | None] = [None] * len(shape)
    if math.prod(shape) < threshold:
        return PartitionSpec()
    for axis in (AXIS, TENSOR):
        size = mesh.shape.get(axis, 1)
        fitting = [d for d, n in enumerate(shape) if axes[d] is None and n % size == 0]
        if size > 1 and fitting and (axis == AXIS or len(shape) > 1):
            axes[max(fitting, key=lambda d: (shape[d], -d))] = axis
    while axes and axes[-1] is None:  # as jax writes it when it comes back from a step
        axes.pop()
    return PartitionSpec(*axes)


def _classify(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["input_ids"])
    labels = batch["labels"] if "labels" in batch else batch["label"]
    if labels.ndim == logits.ndim:  # one-hot
        labels = jnp.argmax(labels, axis=-1)
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
    return -jnp.mean(likely), {"accuracy": accuracy}


def _on_mesh(mesh: Mesh, leaf: Any) -> Any:
    """Counters and the like are born on one device: copied over all."""
    on_mesh = isinstance(getattr(leaf, "sharding", None), NamedSharding)
    return leaf if on_mesh else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))


def _ambient(mesh: Mesh | None) -> Mesh:
    """The mesh that is given, or the one around us.

    Raises:
        ConfigError: There is none, or it has no axis `fsdp`.
    """
    if mesh is None:
        mesh = jax.sharding.get_mesh() or None
    if mesh is None or mesh.empty:
        with warnings.catch_warnings():  # `with mesh:` shows itself there alone, and is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.interpreters.pxla import thread_resources

        mesh = thread_resources.env.physical_mesh
    if AXIS not in mesh.shape:
        raise ConfigError(
            f"mesh: expected one with an axis '{AXIS}'; got axes {tuple(mesh.shape)}. Write `with "
            "jax.set_mesh(jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))):`, or give "
            "mesh=."
        )
    return mesh


def _named(params: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    ]


def _is_cut(leaf: Any) -> bool:
    return any(axis is not None for axis in leaf.sharding.spec)
