"""The mesh of XLA devices, and the plan of a tree of arrays on it: sharding and padding of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as DeviceMesh

from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import Backend, DType, Strategy, did_you_mean
from fullshard.errors import ConfigError, DataError
from fullshard.planner.arrays import PADDED_ABOVE, ArrayPlan, ArraysPlan, cut_of
from fullshard.planner.mesh import Mesh, Topology, check_divides, mesh_of, row_of
from fullshard.planner.spec import ParamSpec, check_globs, matches
from fullshard.planner.units import UnitSettings, contract_of

Tree = Any  # any pytree
# (sizes of the expert and the tensor axis) -> by name pattern, the dimension that these axes cut,
# and into how many parts.
Rules = Callable[[int, int], Mapping[str, tuple[int, int]]]
REPLICATE, SHARD, EXPERT, TENSOR = "replicate", "shard", "expert", "tensor"
AXES = (REPLICATE, SHARD)  # the others follow if there are any
BATCHES = (*AXES, EXPERT)  # axes whose devices have batches of their own
SMALL = PADDED_ABOVE  # elements of a full array that travels with others
# Per platform: the latency-hiding scheduler and asynchronous collectives.
OVERLAP: dict[str, dict[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_multi_streamed_windowed_einsum": True,
    },
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_decompose_all_gather_einsum": True,
        "xla_tpu_decompose_einsum_reduce_scatter": True,
    },
}


def make_mesh(
    replicate: int | None = None,
    shard: int | None = None,
    *,
    expert: int = 1,
    tensor: int = 1,
    strategy: Strategy = Strategy.FULL_SHARD,
    devices: Sequence[Any] | None = None,
) -> DeviceMesh:
    """Makes a mesh with the axes ('replicate', 'shard'); adjacent devices share a shard group.

    With `expert` and `tensor` it has further axes of these names, in this order.

    Args:
        replicate: Number of replicas of each shard. None: derived from the strategy.
        shard: Number of devices that share one copy. None: derived from the strategy.
        expert: Number of devices, with batches of their own, that divide the experts.
        tensor: Number of devices that share a batch and compute with parts of arrays.
        strategy: no_shard has one copy per device; hybrid strategies shard within a process.
        devices: Devices of the mesh. None: all that jax sees.

    Raises:
        ConfigError: The sizes do not multiply to the number of devices.
    """
    asked = ShardConfig(
        strategy=strategy, replicate=replicate, shard=shard, expert=expert, tensor=tensor
    )
    return mesh_for(asked, devices)


def mesh_for(config: ShardConfig, devices: Sequence[Any] | None = None) -> DeviceMesh:
    """Makes the mesh of a configuration; see `make_mesh`."""
    found = list(jax.devices() if devices is None else devices)
    local = len([device for device in found if device.process_index == found[0].process_index])
    is_alone = local == 1 < config.tensor  # ranks that share a batch are neighbours
    local = max(local, config.tensor)
    topology = Topology(len(found), local if len(found) % local == 0 else None)
    axes = mesh_of(config, topology).axes(config.expert * config.tensor).items()
    sizes = {axis: n for axis, n in axes if n > 1 or axis in AXES}
    shape = tuple(sizes.values())
    if not is_alone and all(hasattr(device, "coords") for device in found):
        placed = _by_network(found, shape)
    else:
        placed = np.array(found).reshape(shape)
    return DeviceMesh(placed, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def _by_network(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """TPUs, neighbours on the wire along the last axes; slices are apart on the first ones."""
    slices = left = len({getattr(device, "slice_index", 0) for device in devices})
    apart = [1] * len(shape)
    for at, size in enumerate(shape[: len(AXES)]):
        apart[at] = math.gcd(size, left)
        left //= apart[at]
    if slices == 1:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if left > 1:  # they do not divide the axes
        return np.array(devices).reshape(shape)
    inside = [size // num for size, num in zip(shape, apart, strict=True)]
    return create_hybrid_device_mesh(inside, apart, devices, allow_split_physical_axes=True)


def with_auto_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh with axes of type Auto, which XLA's partitioner shards over.

    Raises:
        ConfigError: jax does not know all ranks of the launch.
    """
    launch = read_launch_environment()
    if launch is not None and launch.world_size > jax.process_count():
        raise ConfigError(
            f"WORLD_SIZE: expected jax to know the {launch.world_size} ranks of {launch.launcher}, "
            f"got {jax.process_count()}; each would train alone. Call jax.distributed.initialize "
            "before any other use of jax, with one address on all ranks."
        )
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return DeviceMesh(mesh.devices, mesh.axis_names, axis_types=auto)


def sizes_of(mesh: DeviceMesh, strategy: Strategy = Strategy.FULL_SHARD) -> Mesh:
    """Returns the planner's mesh for a device mesh.

    Raises:
        ConfigError: The mesh has other axes.
    """
    names = tuple(mesh.axis_names)
    if names != tuple(axis for axis in (*BATCHES, TENSOR) if axis in AXES or axis in names):
        raise ConfigError(
            f"mesh: expected the axes {AXES}, then '{EXPERT}' and '{TENSOR}' if any; got {names}. "
            "Make it with fullshard.jax.make_mesh; for other axes use shard_fsdp and jax.jit."
        )
    replicate, shard = (mesh.shape[axis] for axis in AXES)
    expert, inner = mesh.shape.get(EXPERT, 1), mesh.shape.get(TENSOR, 1)
    if row_of(strategy).shard_params:
        return Mesh(replicate, shard * expert, inner=inner)
    return Mesh(replicate * expert, shard, inner=inner)


def live_axes(mesh: DeviceMesh, among: Sequence[str] = BATCHES) -> tuple[str, ...]:
    """Returns the axes of batches longer than 1; collectives over the others are no-ops."""
    return tuple(axis for axis in among if mesh.shape.get(axis, 1) > 1)


@dataclass(eq=False)
class XlaPlan:
    """The result of `plan`; an argument of steps, loads and saves.

    Attributes:
        table: Arrays, their sharding, collectives and memory, as plain data. A step that is traced
            adds its collectives: see [Note: traced collectives] in xla/traced.py.
        mesh: Devices over 'replicate', 'shard' and, if there are any, 'expert' and 'tensor'.
        structure: Tree structure of the parameters.
        platform: Platform of the devices: cpu, gpu, tpu; "" if it is not known.
    """

    table: ArraysPlan
    mesh: DeviceMesh
    structure: Any
    platform: str = ""

    @cached_property
    def shardings(self) -> Tree:
        """One NamedSharding per parameter."""
        return self.map(self.sharding)

    @cached_property
    def specs(self) -> Tree:
        """One PartitionSpec per parameter."""
        return self.map(lambda array: self.sharding(array).spec)

    def sharding(self, array: ArrayPlan) -> NamedSharding:
        """The sharding of an array."""
        axes: list[Any] = [None] * len(array.stored_shape)
        inner = live_axes(self.mesh, (EXPERT, TENSOR) if self.is_spread(array) else (TENSOR,))
        for dim, names in ((array.cut.dim, self.shard_axes(array)), (array.cut.tensor, inner)):
            if dim is not None:
                axes[dim + bool(array.block)] = names
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def is_spread(self, array: ArrayPlan) -> bool:
        """Whether the devices of the expert axis have different parts of an array."""
        return array.cut.parts > self.table.mesh.inner

    def shard_axes(self, array: ArrayPlan) -> tuple[str, ...]:
        """The axes over which an array is sharded; none if it is whole."""
        is_dense = EXPERT in self.mesh.shape and not self.is_spread(array)
        return () if array.cut.dim is None else (SHARD, EXPERT)[: 1 + is_dense]

    def sum_axes(self, array: ArrayPlan) -> tuple[str, ...]:
        """The axes over which a gradient, or this device's slice of it, is summed."""
        axes = (SHARD, REPLICATE) if self.is_spread(array) else (SHARD, EXPERT, REPLICATE)
        return live_axes(self.mesh, axes if array.cut.dim is None else (REPLICATE,))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self, num_micro_batches: int = 1) -> NamedSharding:
        """The sharding of a batch: samples over batch axes, after the micro-batch axis."""
        return NamedSharding(self.mesh, batch_spec(live_axes(self.mesh), num_micro_batches))

    def map(self, function: Any) -> Tree:
        """Maps a function of an array's plan over the parameters' tree."""
        return jax.tree.unflatten(self.structure, [function(a) for a in self.table.arrays])

    def shapes(self, use: str = "master") -> Tree:
        """The stored arrays' shapes, in the dtype of a use that `DtypeContract` names."""

        def shape(array: ArrayPlan) -> jax.ShapeDtypeStruct:
            dtype = str(getattr(array.dtypes, use))
            return jax.ShapeDtypeStruct(array.stored_shape, dtype, sharding=self.sharding(array))

        return self.map(shape)

    def with_arrays(self, function: Any, tree: Tree) -> Tree:
        """Maps a function of (array's plan, leaf) over a tree like the parameters'.

        Raises:
            ConfigError: The tree's names differ from the planned ones.
        """
        found = jax.tree.leaves_with_path(tree)
        names, planned = [path_name(path) for path, _ in found], [a.name for a in self.table.arrays]
        if names != planned:
            pairs = itertools.zip_longest(planned, names)
            wanted, given = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"params: expected the tree that was planned, which has {wanted or 'no more'} "
                f"where this one has {given or 'no more'}. Plan this tree."
            )
        leaves = [function(a, leaf) for a, (_, leaf) in zip(self.table.arrays, found, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    @cached_property
    def trained_arrays(self) -> list[ArrayPlan]:
        """The plans of the arrays that have gradients."""
        return [array for array in self.table.arrays if array.trainable]

    @cached_property
    def joined(self) -> list[int]:
        """Trained arrays whose gradients are summed once per step, in the loss's collective."""
        arrays = enumerate(self.trained_arrays)
        return [at for at, a in arrays if a.cut.dim is None and not a.block and a.numel < SMALL]

    @cached_property
    def index_of_path(self) -> dict[tuple[Any, ...], int]:
        """The index of each array in the plan, by its path in the tree."""
        paths = jax.tree.leaves_with_path(self.map(lambda array: array))
        return {path: at for at, (path, _) in enumerate(paths)}

    def under(self, prefix: str) -> list[ArrayPlan]:
        """Returns the arrays of a subtree in the order of its leaves.

        Raises:
            ConfigError: There is no such subtree.
        """
        found = [a for a in self.table.arrays if f"{a.name}.".startswith(f"{prefix}.")]
        if not found:
            names = ", ".join(array.name for array in self.table.arrays[:3])
            raise ConfigError(
                f"unit: expected the name of an array or of a subtree; got {prefix!r}. "
                f"Names look like {names}."
            )
        return found

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the stacked subtrees."""
        return tuple(dict.fromkeys(a.block for a in self.table.arrays if a.block))

    def __repr__(self) -> str:
        return f"XlaPlan:\n{self.table.tree()}"


def plan(
    shapes: Tree,
    config: ShardConfig | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Sequence[str] = (),
    freeze: Sequence[str] = (),
) -> XlaPlan:
    """Plans the sharding of every array of a model, and the collectives of a step.

    Args:
        shapes: Arrays, or the result of `jax.eval_shape(init_fn, key)`: any pytree.
        config: A ShardConfig, a mapping of its fields, or None for the defaults.
        mesh: Mesh of `make_mesh`; None: all devices, arranged for the config's strategy.
        blocks: Dotted paths of subtrees whose arrays have a first axis of layers. The loss function
            receives their shards and runs them with `scan_blocks`. It receives all other arrays
            whole.
        freeze: Name patterns (globs) of arrays that are not updated.

    Raises:
        ConfigError: A setting is impossible or not yet supported on this backend.
    """
    found = plan_with(None, shapes, config, mesh, blocks, freeze)
    wide = {dtype for a in found.table.arrays for dtype in (a.dtypes.compute, a.dtypes.accumulate)}
    if DType.FLOAT64 in wide and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            "master_dtype: expected float32 or less, because jax computes in float64 only if told "
            "to; got float64. Call jax.config.update('jax_enable_x64', True) first."
        )
    return found


def plan_with(
    rules: Rules | None,
    shapes: Tree,
    config: ShardConfig | dict[str, Any] | None,
    mesh: DeviceMesh | None,
    blocks: Sequence[str],
    freeze: Sequence[str],
) -> XlaPlan:
    """Like `plan`; `rules` give the dimensions that tensor and expert axes cut, by name pattern.

    Dimensions are counted without that of layers. Other arrays are whole. The model has to sum and
    to exchange over these axes, as the decoder does.
    """
    settings = ShardConfig.of(config)
    check_supported(settings, backend=Backend.JAX)
    if mesh is None:
        mesh = mesh_for(settings)
    sizes, mesh = sizes_of(mesh, settings.strategy), with_auto_axes(mesh)
    _check_sizes(settings, mesh)
    expert = mesh.shape.get(EXPERT, 1)
    if rules is None and expert * sizes.inner > 1:
        axis, size = (TENSOR, sizes.inner) if sizes.inner > 1 else (EXPERT, expert)
        raise ConfigError(
            f"{axis}: expected 1 for a model of your own, whose products this plan cannot divide; "
            f"got {size}. Leave it out, or let XLA divide them: name the arrays' axes, and "
            "use shard_fsdp(params, mesh=..., rules=...) and create_fsdp_train_step."
        )
    cuts = None if rules is None else rules(expert, sizes.inner)
    table = table_of(shapes, settings, sizes, blocks, freeze, cuts)
    return XlaPlan(table, mesh, jax.tree.structure(shapes), mesh.devices.flat[0].platform)


def table_of(
    shapes: Tree,
    settings: ShardConfig,
    sizes: Mesh,
    blocks: Sequence[str] = (),
    freeze: Sequence[str] = (),
    cuts: Mapping[str, tuple[int, int]] | None = None,
) -> ArraysPlan:
    """Returns the plan as data, without devices; arguments as for `plan`, cuts as of `Rules`."""
    named = named_leaves(shapes)
    names = [name for name, _ in named]
    check_globs("freeze", freeze, names, "arrays")
    check_globs("fp32_modules", settings.fp32_modules, names, "arrays")
    _check_blocks(blocks, names)
    arrays = [
        _array(name, leaf, _block_of(name, blocks), (settings, sizes, tuple(freeze), cuts or {}))
        for name, leaf in named
    ]
    return ArraysPlan(
        type(shapes).__name__,
        settings.strategy,
        sizes,
        tuple(arrays),
        settings.activation_checkpointing,
    )


def batch_spec(axes: tuple[str, ...], num_micro_batches: int = 1) -> PartitionSpec:
    """Returns the spec of samples over mesh axes, after the micro-batch axis if any."""
    return PartitionSpec(*[None] * (num_micro_batches > 1), axes or None)


def batch_specs(axes: tuple[str, ...], batch: Tree, num_micro_batches: int = 1) -> Tree:
    """Returns the spec of each array of a batch; scalars are replicated."""
    samples, lead = batch_spec(axes, num_micro_batches), int(num_micro_batches > 1)
    return jax.tree.map(lambda x: samples if np.ndim(x) > lead else PartitionSpec(), batch)


def place_batch(
    mesh: DeviceMesh, axes: tuple[str, ...], batch: Tree, num_micro_batches: int = 1
) -> Tree:
    """Places this process's samples over the devices along mesh axes; scalars are replicated.

    Raises:
        DataError: The devices do not divide the number of samples.
    """
    lead = (num_micro_batches,) if num_micro_batches > 1 else ()
    size = max(1, math.prod(mesh.shape[axis] for axis in axes) // jax.process_count())

    def place(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
        if is_on_mesh(leaf):
            return jax.device_put(leaf, NamedSharding(mesh, spec))
        if not isinstance(leaf, (jax.Array, int, float, complex)):
            try:
                leaf = np.array(np.asarray(leaf))  # a copy, which the caller cannot write
            except (RuntimeError, TypeError, ValueError) as error:
                raise DataError(
                    f"batch{jax.tree_util.keystr(path)}: expected an array that numpy reads; got "
                    f"{type(leaf).__name__} ({error}). Convert it first."
                ) from error
        if not np.ndim(leaf):
            leaf = jnp.broadcast_to(leaf, lead)
        parts, samples = np.shape(leaf)[: len(lead)], np.shape(leaf)[len(lead) :][:1]
        if parts != lead or (samples and (samples[0] % size or not samples[0])):
            raise DataError(
                f"batch{jax.tree_util.keystr(path)}: expected "
                f"{f'{num_micro_batches} micro-batches, then ' * len(lead)}1 or more samples, a "
                f"number that {size} devices divide; got shape {np.shape(leaf)}. Drop some "
                "(drop_last of your loader), or pad the batch with fullshard.jax.pad_batch."
            )
        sharding = NamedSharding(mesh, spec)
        if jax.process_count() == 1:  # arrays on a device are copied to the others directly
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    _check_samples(batch, len(lead))
    return jax.tree.map_with_path(place, batch, batch_specs(axes, batch, num_micro_batches))


def _check_samples(batch: Tree, lead: int) -> None:
    """Raises DataError if a table, such as weights of classes, would be cut like samples."""
    leaves = [(path, np.shape(x)[lead:]) for path, x in jax.tree.leaves_with_path(batch)]
    counts = {jax.tree_util.keystr(path): shape[0] for path, shape in leaves if shape}
    if len(set(counts.values())) > 1:
        raise DataError(
            "batch: expected one number of samples on the first axis of all arrays, of which each "
            f"device receives a part; got {counts}. Pass a table of another size as variables=, or "
            "let loss_fn close over it."
        )


def own_shape(array: ArrayPlan) -> tuple[int, ...]:
    """Returns the shape of the whole array without padding."""
    return ((array.num_layers,) if array.block else ()) + array.shape


def pad(array: ArrayPlan | None, leaf: jax.Array) -> jax.Array:
    """Pads the whole array, or parts of it, so that it divides; None: a leaf of no array."""
    if array is None or not array.cut.padding:
        return leaf
    lead = leaf.ndim - len(array.shape)
    return jnp.pad(
        leaf, [(0, array.cut.padding * (d - lead == array.cut.dim)) for d in range(leaf.ndim)]
    )


def unpad(array: ArrayPlan | None, leaf: Any) -> Any:
    """Removes the padding of the whole array or of one layer; None: a leaf of no array."""
    if array is None or not array.cut.padding:
        return leaf
    own = array.shape
    lead = (slice(None),) * (leaf.ndim - len(own))
    return leaf[(*lead, *(slice(0, size) for size in own))]


def _array(
    name: str,
    leaf: Any,
    block: str,
    settings: tuple[ShardConfig, Mesh, tuple[str, ...], Mapping[str, tuple[int, int]]],
) -> ArrayPlan:
    config, sizes, freeze, cuts = settings
    shape = tuple(leaf.shape)
    if block and not shape:
        raise ConfigError(f"blocks: expected arrays with an axis of layers; {name} is a scalar.")
    own = shape[1:] if block else shape
    is_narrow = leaf.dtype == np.float64 and not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    try:
        dtype = DType.FLOAT32 if is_narrow else DType(str(leaf.dtype))
    except ValueError:
        raise ConfigError(
            f"{name}: expected a floating point array; got {leaf.dtype}. Keep untrained values "
            "(keys, counters) out of the parameters."
        ) from None
    trainable = not matches(name, freeze)
    spec = ParamSpec((name,), own, dtype, trainable)
    fitting = (cut for glob, cut in cuts.items() if cut[1] > 1 and matches(name, (glob,)))
    dim, parts = next(fitting, (None, 1))
    if dim is not None:
        check_divides("tensor, expert", parts, own[dim], f"dimension {dim} of {name}")
    cut = cut_of(own, sizes.spread(parts).shard, dim, parts)
    layers = shape[0] if block else 0
    dtypes = contract_of(spec, config, UnitSettings())
    return ArrayPlan(name, own, cut, dtypes, trainable, block, layers)


def is_on_mesh(leaf: Any) -> bool:
    """Whether an array has been placed on a mesh."""
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def path_name(path: Any, separator: str = ".") -> str:
    """Returns a tree path as text: `layers.0.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def named_leaves(tree: Tree, separator: str = ".") -> list[tuple[str, Any]]:
    """Returns the leaves of a tree by path."""
    return [(path_name(path, separator), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _check_blocks(blocks: Sequence[str], names: Sequence[str]) -> None:
    subtrees = {name[:at] for name in names for at, sign in enumerate(name) if sign == "."}
    for block in blocks:
        if block not in subtrees:
            near = did_you_mean(block, sorted(subtrees))
            raise ConfigError(
                f"blocks: expected paths of subtrees; got {block!r}, which is none. "
                f"{near or 'There are: ' + ', '.join(sorted(subtrees)[:8]) + '.'}"
            )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice}: expected names that differ; two arrays have it. Rename one.")


def _block_of(name: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def _check_sizes(settings: ShardConfig, mesh: DeviceMesh) -> None:
    for key in (*BATCHES, TENSOR):
        asked, size = getattr(settings, key), mesh.shape.get(key, 1)
        if asked not in (ShardConfig.model_fields[key].default, size):
            raise ConfigError(f"{key}: expected {size}, the mesh's; got {asked}. Leave it out.")
    if settings.strategy == "no_shard" and mesh.shape[SHARD] > 1:
        raise ConfigError(
            f"mesh: expected shard 1 under no_shard; got {mesh.shape[SHARD]}. Make it with "
            "make_mesh(shard=1), or choose a sharded strategy."
        )
