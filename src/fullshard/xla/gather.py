"""Gathers, and the scan over blocks that gathers one at a time. For use inside of `shard_map`.

[Note: gathers on XLA]
A gather and its reduction are one function with a gradient of its own, so that both are those of
the plan on every backend. The shard is cast before it travels; the gradient travels in the reduce
dtype. It is scattered over the shard axis first, and what the replicate axis then sums is a slice:
the gradient that jax would derive sums whole gradients there.

Under `shard_map` without varying types a model may scan from a constant, as it does on one device.

[Note: messages over gloo]
Each collective is one of XLA's per array, except between CPU processes. XLA's gloo is fastest when
each rank sends every other rank only what that rank needs, so all three are such an exchange:

    sum, 2 ranks      exchange     add up, in rank order    exchange
    a0 a1             a0 b0        s0                       s0 s1
    b0 b1             a1 b1        s1                       s0 s1

The arrays of a block travel as one message per dtype: in each exchange the ranks wait for the
slowest, and XLA does not join collectives on CPUs. The number of bytes is the same; a sum is a
reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fullshard.config.values import RecomputeKind
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArrayPlan
from fullshard.planner.mesh import Mesh
from fullshard.xla.mesh import REPLICATE, SHARD
from fullshard.xla.plan import Tree, XlaPlan, unpad

BLOCK_INPUT = "fullshard.block_input"
# Cheap to compute again; saved, they would keep a gathered weight alive in another shape.
_MOVES = (
    *("reshape", "slice", "dynamic_slice", "split", "pad", "transpose", "squeeze"),
    *("expand_dims", "broadcast_in_dim", "copy", "convert_element_type", "concatenate"),
)


_GATHERS = ("all_gather", "all_to_all")  # see [Note: messages over gloo]


def gather(plan: XlaPlan, unit: str, shards: Tree) -> Tree:
    """Whole arrays, in the compute dtype, of an array or a subtree given as shards.

    Args:
        plan: Plan of the model.
        unit: Dotted path of the array or subtree.
        shards: This device's parts; of stacked arrays those of one layer.
    """
    arrays = plan.under(unit)
    plan.gathered.update(array.name for array in arrays)
    return gather_arrays(arrays, shards, plan.table.mesh)


def gather_arrays(arrays: Sequence[ArrayPlan], shards: Tree, mesh: Mesh) -> Tree:
    """The same, of given arrays in the order of the tree's leaves. See [Note: gathers on XLA]."""
    leaves, structure = jax.tree.flatten(shards)
    whole = jax.custom_vjp(lambda *shards: _collect(arrays, shards))

    def forward(*shards: jax.Array) -> tuple[list[jax.Array], None]:
        return _collect(arrays, shards), None

    def backward(_: None, grads: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        found = zip(_reduce(arrays, grads, mesh), leaves, strict=True)
        return tuple(grad.astype(shard.dtype) for grad, shard in found)

    whole.defvjp(forward, backward)
    pairs = zip(arrays, whole(*leaves), strict=True)
    return jax.tree.unflatten(structure, [unpad(array, leaf) for array, leaf in pairs])


def collect(array: ArrayPlan, shard: jax.Array) -> jax.Array:
    """Gathers an array that is not stacked; the caller reduces its gradient with `reduce`."""
    return unpad(array, _collect([array], [shard])[0])


def reduce(array: ArrayPlan, grad: jax.Array, mesh: Mesh) -> jax.Array:
    """This device's part of the sum of all devices' gradients, in the accumulate dtype."""
    widths = [(0, to - here) for here, to in zip(grad.shape, array.padded_shape, strict=True)]
    return _reduce([array], [jnp.pad(grad, widths) if array.cut.padding else grad], mesh)[0]


def _collect(arrays: Sequence[ArrayPlan], shards: Sequence[jax.Array]) -> list[jax.Array]:
    met = [shard.astype(a.dtypes.compute) for a, shard in zip(arrays, shards, strict=True)]
    dims = {at: array.cut.dim for at, array in enumerate(arrays) if array.cut.dim is not None}
    wholes = all_gather([met[at] for at in dims], SHARD, list(dims.values()))
    for at, whole in zip(dims, wholes, strict=True):
        met[at] = whole
    return met


def _reduce(arrays: Sequence[ArrayPlan], grads: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    found = [
        grad.astype(a.dtypes.reduce) if a.trainable else _unread(a, grad, mesh)
        for a, grad in zip(arrays, grads, strict=True)
    ]
    trained = [at for at, array in enumerate(arrays) if array.trainable]
    parted = {at: dim for at in trained if (dim := arrays[at].cut.dim) is not None}
    parts = reduce_scatter([found[at] for at in parted], SHARD, list(parted.values()))
    for at, part in zip(parted, parts, strict=True):
        found[at] = part.astype(arrays[at].dtypes.accumulate)
    whole = [at for at in trained if at not in parted]
    sizes = {SHARD: mesh.shard, REPLICATE: mesh.replicate}
    for chosen, axes in ((list(parted), (REPLICATE,)), (whole, (SHARD, REPLICATE))):
        live = [axis for axis in axes if sizes[axis] > 1]
        sums = all_reduce([found[at] for at in chosen], live)
        for at, summed in zip(chosen, sums, strict=True):
            found[at] = summed.astype(arrays[at].dtypes.accumulate)
    return found


def _unread(array: ArrayPlan, grad: jax.Array, mesh: Mesh) -> jax.Array:
    """Zeros for the unused gradient of an array that is not trained."""
    parts = [mesh.shard if at == array.cut.dim else 1 for at in range(grad.ndim)]
    sizes = [size // part for size, part in zip(grad.shape, parts, strict=True)]
    return jnp.zeros(sizes, array.dtypes.accumulate)


def scan_blocks(  # noqa: PLR0913  (settings by name)
    block: Callable[..., Any],
    x: Any,
    stacked: Tree,
    plan: XlaPlan,
    unit: str | None = None,
    *,
    inputs: Tree = None,
    outputs: bool = False,
) -> Any:
    """Run like blocks one after another, each gathered when it is its turn.

        forward    gather 0, block 0, gather 1, block 1 ...
        backward   gather 1, block 1, reduce 1, gather 0 ...     under a strategy that reshards

    Args:
        block: (parameters of one layer, x) -> x, of the same shapes and dtypes.
        x: Input of the first block.
        stacked: Shards, with a first axis of layers.
        plan: Plan of the model; its `activation_checkpointing` says what backward recomputes.
        unit: Path of the stacked subtree; None: the only one.
        inputs: A tree with a first axis of layers, of which each block gets its part as a third
            argument: keys of dropout, rates of stochastic depth.
        outputs: Whether blocks return (x, output).

    Returns:
        The last block's x; with `outputs` also the outputs, with a first axis of layers.
    """
    if unit is None and len(plan.blocks) != 1:
        raise ConfigError(
            f"scan_blocks: expected the unit, because the plan has {len(plan.blocks)} stacked "
            "subtrees. Name it, or give fullshard.jax.plan its path in `blocks`."
        )
    arrays, mesh = plan.under(unit or plan.blocks[0]), plan.table.mesh
    every, num_layers = plan.table.recompute.every, arrays[0].num_layers
    plan.gathered.update(array.name for array in arrays)

    def body(at: int, x: Any, group: Tree) -> tuple[Any, Any]:
        # Taken out of the group in here, so that backward reads the group itself and no copies.
        shards, given = group if every == 1 else jax.tree.map(lambda leaf: leaf[at], group)
        met = gather_arrays(arrays, shards, mesh), checkpoint_name(x, BLOCK_INPUT)
        found = block(*met) if inputs is None else block(*met, given)
        return found if outputs else (found, None)

    def run(x: Any, first: int, num_groups: int, size: int) -> tuple[Any, Any]:
        """`num_groups` groups of `size` layers; the first of each is the one recomputed."""
        unrolled = num_groups == 1  # XLA drops a loop of one turn, and might share its work
        bodies = _bodies(body, plan, size, prevent_cse=unrolled)

        def turn(x: Any, group: Tree) -> tuple[Any, Any]:
            found: list[Any] = []
            for run_block in bodies:
                x, output = run_block(x, group)
                found.append(output)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

        def grouped(leaf: jax.Array) -> jax.Array:
            if every == 1:
                return leaf
            part = leaf[first : first + num_groups * size]
            return part.reshape(num_groups, size, *leaf.shape[1:])

        x, found = lax.scan(turn, x, jax.tree.map(grouped, (stacked, inputs)))
        return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)

    whole, rest = divmod(num_layers, every)
    parts: list[Any] = []
    for first, num_groups, size in ((0, whole, every), (whole * every, 1, rest)):
        if num_groups * size:
            x, found = run(x, first, num_groups, size)
            parts.append(found)
    return (x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)) if outputs else x


def _bodies(body: Any, plan: XlaPlan, size: int, *, prevent_cse: bool) -> list[Any]:
    """A group's bodies: the first with the activation checkpointing that was asked for."""
    table = plan.table

    def kept(at: int, kind: RecomputeKind) -> Any:
        policy = _policy(kind, reshards=table.reshards)
        one = partial(body, at)
        if policy is None:
            return one
        return jax.checkpoint(one, policy=policy, prevent_cse=prevent_cse)

    return [kept(at, RecomputeKind.NONE if at else table.recompute.kind) for at in range(size)]


def _policy(kind: RecomputeKind, *, reshards: bool) -> Any:
    """What backward finds again, by the primitive that made it; None: everything."""
    policies = jax.checkpoint_policies
    match kind:
        case RecomputeKind.NONE:
            return _all_but_gathered if reshards else None
        case RecomputeKind.BLOCK:
            chosen = policies.nothing_saveable
        case RecomputeKind.SELECTIVE:
            chosen = policies.dots_with_no_batch_dims_saveable
        case RecomputeKind.OFFLOAD:
            chosen = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[BLOCK_INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if _is_gather(primitive, params):
            return not reshards
        return chosen(primitive, *args, **params)

    return policy


def _is_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether it is a gather, or the function with a gradient of its own around it."""
    if primitive.name in _GATHERS:
        return True
    if not primitive.name.startswith("custom_vjp"):
        return False
    inner = params.get("call_jaxpr")
    return any(step.primitive.name in _GATHERS for step in getattr(inner, "eqns", ()))


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _MOVES and not _is_gather(primitive, params)


Arrays = Sequence[jax.Array]


def all_gather(parts: Arrays, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """Concatenates the parts of all devices along a mesh axis on each array's dimension."""
    pairs = list(zip(parts, dims, strict=True))
    if not over_gloo():
        return [lax.all_gather(part, axis, axis=dim, tiled=True) for part, dim in pairs]
    num = lax.axis_size(axis)
    found = _exchange([jnp.broadcast_to(part, (num, *part.shape)) for part in parts], axis)
    return [jnp.concatenate([*rows], dim) for rows, dim in zip(found, dims, strict=True)]


def reduce_scatter(wholes: Arrays, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """Sums over a mesh axis and returns this device's part on each array's dimension."""
    pairs = list(zip(wholes, dims, strict=True))
    if not over_gloo():
        return [lax.psum_scatter(w, axis, scatter_dimension=dim, tiled=True) for w, dim in pairs]
    num = lax.axis_size(axis)
    found = _exchange([jnp.stack(jnp.split(whole, num, dim)) for whole, dim in pairs], axis)
    return [rows.sum(0, dtype=rows.dtype) for rows in found]


def all_reduce(values: Arrays, axes: Sequence[str]) -> list[jax.Array]:
    """Sums over mesh axes."""
    if not over_gloo():
        return [lax.psum(value, tuple(axes)) if axes else value for value in values]
    summed, dims = list(values), [0] * len(values)
    for axis in axes:
        flat = [jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(axis))) for x in summed]
        wholes = all_gather(reduce_scatter(flat, axis, dims), axis, dims)
        summed = [w[: x.size].reshape(x.shape) for w, x in zip(wholes, summed, strict=True)]
    return summed


def _exchange(rows: Arrays, axis: str) -> list[jax.Array]:
    """Row i of each array goes to rank i; row i of what comes is that of rank i."""
    found: list[jax.Array] = list(rows)
    for dtype in dict.fromkeys(array.dtype for array in rows):
        chosen = [at for at, array in enumerate(rows) if array.dtype == dtype]
        flat = [rows[at].reshape(rows[at].shape[0], -1) for at in chosen]
        came = lax.all_to_all(jnp.concatenate(flat, 1), axis, 0, 0, tiled=True)
        stops = [sum(part.shape[1] for part in flat[:count]) for count in range(1, len(flat))]
        for at, part in zip(chosen, jnp.split(came, stops, 1), strict=True):
            found[at] = part.reshape(rows[at].shape)
    return found


def over_gloo() -> bool:
    """Whether the devices are CPUs of several processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
