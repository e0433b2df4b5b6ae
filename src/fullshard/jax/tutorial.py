"""The functions of the FSDP tutorials for JAX, on a mesh with an axis `fsdp`, mended.

XLA's partitioner places the collectives here: for models of one's own that know nothing of plans,
and for meshes with further axes, such as `tensor`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
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
        spec = spec_for(leaf.shape, threshold, mesh)
        if not any(spec):  # what is placed may be the array itself, and a step uses it up
            leaf = jnp.array(leaf, copy=True)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

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
