"""The functions of the FSDP tutorials for JAX, on a mesh with an axis `fsdp`, mended.

XLA's partitioner places the collectives here: for models of one's own that know nothing of plans,
and for meshes with further axes, such as `tensor`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.errors import ConfigError
from fullshard.planner.optimizers import ADAMW
from fullshard.xla.mesh import with_auto_axes

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
    """Large arrays cut over the axis `fsdp` (matrices also over `tensor`), small ones copied.

    A dimension that divides is chosen, the largest; where none does the array is copied, which
    `print_sharding` shows. Not the name decides but the size: embeddings are cut too.

    Args:
        params: Any pytree, also an nnx.State.
        threshold: Elements from which on an array is cut.
        mesh: None: the ambient one (`jax.set_mesh`, or `with mesh:`).
        rules: Mesh axes (None: none) of the logical axes that `with_partitioning` names, as in
            flax. An array so annotated lies as its annotation says, also without rules where it
            names axes of the mesh; all others go by their size.

    Raises:
        ConfigError: The mesh has no axis `fsdp`, or an annotation has no rule or does not divide.
    """
    mesh = mesh_with_axis(mesh)

    def place(path: Any, node: Any) -> Any:
        names = _annotation(node)
        return jax.tree.map(lambda leaf: put(_joined(path, "."), leaf, names), node)

    def put(name: str, leaf: Any, names: tuple[Any, ...] | None) -> Any:
        spec = None if names is None else _logical(name, leaf.shape, names, rules, mesh)
        if spec is None:
            spec = spec_for(leaf.shape, threshold, mesh)
        # What is placed may be the array itself, and a step uses it up.
        return jax.device_put(jnp.array(leaf, copy=True), NamedSharding(mesh, spec))

    is_annotated: Any = lambda node: _annotation(node) is not None  # noqa: E731
    placed = jax.tree.map_with_path(place, params, is_leaf=is_annotated)
    whole = [name for name, x in _named(placed, ".") if x.size >= threshold and not _is_cut(x)]
    if whole and mesh.shape[AXIS] > 1:
        logger.warning("whole on every device, since nothing divides: %s", ", ".join(whole))
    return placed


def _annotation(node: Any) -> tuple[Any, ...] | None:
    """Names of logical axes: of an nnx.Variable, or of a box of Linen's."""
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
    """How an annotated array lies; None: as its size says."""
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
                "Give its logical axis the rule None."
            )
    return PartitionSpec(*axes)


def selective_fsdp(
    params: Any, size_threshold: int = 10_000_000, *, mesh: Mesh | None = None
) -> Any:
    """Shard arrays of at least `size_threshold` elements and print what happens to each array."""
    found = shard_fsdp(params, size_threshold, mesh=mesh)
    for path, leaf in _named(found, "/"):
        what = "Sharding" if _is_cut(leaf) else "Replicating"
        print(f"{what}: {path} ({leaf.size:,} elements)")  # noqa: T201
    return found


def print_sharding(params: Any, array: Any = None) -> None:
    """Print the path, shape and PartitionSpec of each array.

    Args:
        params: Any pytree; or an array's path, as `jax.tree_util.tree_map_with_path` calls it.
        array: The array at that path.
    """
    found = _named(params, "/") if array is None else [(_joined(params, "/"), array)]
    for path, leaf in found:
        print(f"{path:50s} {tuple(leaf.shape)!s:20s} {_spec(leaf)}")  # noqa: T201


def sharding_table(params: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    """(name, global shape, PartitionSpec; None on a single device) of each array."""
    return [(name, tuple(leaf.shape), _spec(leaf)) for name, leaf in _named(params, ".")]


def analyze_memory(params: Any, num_devices: int) -> dict[str, int]:
    """Print and return the memory of parameters, gradients and Adam's moments in float32.

    Common documents count the parameters alone, a quarter of it. Activations are not counted.

    Args:
        params: Arrays, or the shapes that `jax.eval_shape` returns.
        num_devices: Devices that all of it is sharded over.

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


def mesh_with_axis(mesh: Mesh | None) -> Mesh:
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
    return with_auto_axes(mesh)


def _named(params: Any, separator: str) -> list[tuple[str, Any]]:
    return [(_joined(path, separator), leaf) for path, leaf in jax.tree.leaves_with_path(params)]


def _joined(path: Any, separator: str) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def _spec(leaf: Any) -> Any:
    return getattr(getattr(leaf, "sharding", None), "spec", None)


def _size(num_bytes: int) -> str:
    """In GB as the tutorials count, in MB or kB where GB would read 0.00."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"


def _is_cut(leaf: Any) -> bool:
    return any(axis is not None for axis in leaf.sharding.spec)
