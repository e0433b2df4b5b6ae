"""Gathers, and the scan that gathers one block at a time. For use inside `shard_map`.

[Note: gathers on XLA]
A gather and the reduction of its gradient are one function with a custom gradient, so that every
backend runs the plan's collectives. The shard is cast before the gather, and the gradient is sent
in the reduce dtype. The gradient is reduce-scattered over the shard axis first, and the resulting
slice is summed over the replicate axis. The gradient that jax derives would sum full gradients over
the replicate axis.

`shard_map` without varying types lets a model scan from a constant, as on one device.

[Note: other axes]
Devices of the tensor axis share a batch and hold parts of arrays, which a model computes with as
they are. Two functions make the whole of it: `shared` before products with divided rows, `summed`
after products with divided columns.

    x --> shared --> rows of this device --> ... --> columns of this device --> summed --> x
    its gradient is summed                             the gradient of the sum is every device's

Devices of the expert axis have batches of their own and different experts. Any number of tokens may
choose a device's experts, and shapes must not depend on it. Each device therefore receives the
tokens of all, computes with those that chose its experts, and the partial sums are added:

    own tokens --> brought --> all tokens --> own experts --> partial sums --> taken_back --> own
                   all-gather                                                  reduce-scatter

They are collectives of the traced step like all others.

[Note: messages on CPUs]
There is one XLA collective per array, except on CPUs, where small arrays that are asked for at once
are one collective: devices wait for the slowest in each, and XLA's compiler for CPUs combines only
all-reduces. Between CPU processes, XLA's gloo is fastest if each rank sends every other rank only
the data that it needs, so all three collectives use this exchange:

    sum, 2 ranks      exchange     add up, in rank order    exchange
    a0 a1             a0 b0        s0                       s0 s1
    b0 b1             a1 b1        s1                       s0 s1

All arrays of a block are then one message per dtype. The number of bytes is the same; an
all-reduce is a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from fullshard.config.values import RecomputeKind
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArrayPlan
from fullshard.xla.plan import EXPERT, SHARD, SMALL, TENSOR, Tree, XlaPlan, live_axes, pad, unpad
from fullshard.xla.traced import MOVES, combined, with_split_sums

BLOCK_INPUT = "fullshard.block_input"
Arrays = Sequence[jax.Array]
Axes = tuple[str, ...]
T = TypeVar("T")
_GATHERS = ("all_gather", "all_to_all")  # see [Note: messages on CPUs]


def gather(plan: XlaPlan, unit: str, shards: Tree) -> Tree:
    """Gathers the shards of an array or subtree into whole arrays in the compute dtype.

    Args:
        plan: The model's plan.
        unit: Dotted path of the array or subtree.
        shards: This device's shards; for stacked arrays, those of one layer.
    """
    return gather_arrays(plan, plan.under(unit), shards)


def gather_arrays(plan: XlaPlan, arrays: Sequence[ArrayPlan], shards: Tree) -> Tree:
    """Gathers arrays in the order of the tree's leaves. See [Note: gathers on XLA]."""
    leaves, structure = jax.tree.flatten(shards)

    @jax.custom_vjp
    def gathered_by_fullshard(*shards: jax.Array) -> list[jax.Array]:
        return _collect(plan, arrays, shards)

    def forward(*shards: jax.Array) -> tuple[list[jax.Array], None]:
        return _collect(plan, arrays, shards), None

    def backward(_: None, grads: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        own = [at for at, array in enumerate(arrays) if array.trainable]
        found = _reduce(plan, [arrays[at] for at in own], [grads[at] for at in own])
        unread = [jnp.zeros(shard.shape, shard.dtype) for shard in leaves]  # of frozen arrays
        reduced = _at(own, unread, lambda _: found)
        return tuple(x.astype(shard.dtype) for x, shard in zip(reduced, leaves, strict=True))

    gathered_by_fullshard.defvjp(forward, backward)
    pairs = zip(arrays, gathered_by_fullshard(*leaves), strict=True)
    return jax.tree.unflatten(structure, [unpad(array, leaf) for array, leaf in pairs])


def call_loss(plan: XlaPlan, loss: Callable[[Tree], T], params: Tree) -> T:
    """Return the results of a loss function. Its sums are split; see [Note: sums over samples]
    in xla/traced.py.

    Raises:
        ConfigError: It combines the elements of a shard; see [Note: shards of blocks] in
            xla/traced.py.
    """
    traced, shapes = jax.make_jaxpr(loss, return_shape=True)(params)
    found = set[int]()
    shards = [{at} if array.block else set[int]() for at, array in enumerate(plan.table.arrays)]
    found.update(*combined(traced.jaxpr, "gathered_by_fullshard", shards, found))
    for array in [plan.table.arrays[at] for at in sorted(found)]:
        raise ConfigError(
            f"loss_fn: expected {array.name} to be gathered, because the plan has "
            f"blocks={[array.block]} and the loss receives a shard of it. Compute with it inside "
            "fullshard.jax.scan_blocks (a block's regularizer too: outputs=True) or after gather, "
            "or leave the path out of blocks."
        )
    split = traced.replace(jaxpr=with_split_sums(traced.jaxpr))
    results = jaxpr_as_fun(split)(*jax.tree.leaves(params))
    pairs = zip(results, traced.out_avals, strict=True)
    arrays = [jnp.asarray(x, aval.dtype) for x, aval in pairs]  # a constant is a number
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def whole_but_blocks(plan: XlaPlan, params: Tree) -> Tree:
    """The parameters as a loss function receives them: whole, but stacked ones as shards.

    The caller reduces the gradients of whole ones with `reduce_whole`.
    """
    arrays = plan.table.arrays
    own = [at for at, array in enumerate(arrays) if not array.block]

    def whole(shards: Arrays) -> list[jax.Array]:
        chosen = [arrays[at] for at in own]
        return list(map(unpad, chosen, _collect(plan, chosen, shards)))

    return jax.tree.unflatten(plan.structure, _at(own, jax.tree.leaves(params), whole))


def once(plan: XlaPlan, array: ArrayPlan, shard: jax.Array) -> jax.Array:
    """A shard that a user may differentiate: jax adds the gradients of its copies.

    A gather of a stacked shard has summed each of them over all copies already.
    """
    copies = math.prod(plan.mesh.shape[axis] for axis in plan.sum_axes(array))
    return _passed(shard, _keep, lambda grad: grad / copies) if array.block else shard


def reduce_whole(plan: XlaPlan, grads: Arrays) -> list[jax.Array]:
    """Reduces the gradients of trained arrays that are not stacked: returns this device's shards.

    Those of arrays that join the step's sums are returned as they are.

    Args:
        plan: The model's plan.
        grads: Gradients of all trained arrays.
    """
    arrays = enumerate(plan.trained_arrays)
    own = [at for at, array in arrays if not array.block and at not in plan.joined]
    chosen = [plan.trained_arrays[at] for at in own]
    return _at(own, grads, lambda wholes: _reduce(plan, chosen, list(map(pad, chosen, wholes))))


def _at(places: Sequence[int], values: Arrays, function: Any) -> list[jax.Array]:
    """Replaces the values at some places by the results of a function of them all."""
    found = list(values)
    for at, new in zip(places, function([values[at] for at in places]), strict=True):
        found[at] = new
    return found


def _collect(plan: XlaPlan, arrays: Sequence[ArrayPlan], shards: Arrays) -> list[jax.Array]:
    met = [shard.astype(a.dtypes.compute) for a, shard in zip(arrays, shards, strict=True)]
    for axes, own in _by_axes(arrays, plan.shard_axes):
        met = _at(own, met, partial(all_gather, **_how(plan, arrays, axes, own)))
    return met


def _reduce(plan: XlaPlan, arrays: Sequence[ArrayPlan], grads: Arrays) -> list[jax.Array]:
    found = [grad.astype(a.dtypes.reduce) for a, grad in zip(arrays, grads, strict=True)]
    for axes, own in _by_axes(arrays, plan.shard_axes):
        found = _at(own, found, partial(reduce_scatter, **_how(plan, arrays, axes, own)))
        for at in own:
            found[at] = found[at].astype(arrays[at].dtypes.accumulate)
    for axes, own in _by_axes(arrays, plan.sum_axes):
        found = _at(own, found, partial(all_reduce, axes=axes))
    return [x.astype(a.dtypes.accumulate) for x, a in zip(found, arrays, strict=True)]


def _by_axes(
    arrays: Sequence[ArrayPlan], axes_of: Callable[[ArrayPlan], Axes]
) -> list[tuple[Axes, list[int]]]:
    """The arrays that a collective needs, by the axes of it; those without axes need none."""
    found: dict[Axes, list[int]] = {}
    for at, array in enumerate(arrays):
        found.setdefault(axes_of(array), []).append(at)
    return [(axes, own) for axes, own in found.items() if axes]


def _how(
    plan: XlaPlan, arrays: Sequence[ArrayPlan], axes: Axes, own: Sequence[int]
) -> dict[str, Any]:
    """Arguments of a gather, or of its reduction."""
    dims = [arrays[at].cut.dim for at in own]
    return {"axis": axes, "dims": dims, "limit": _limit(plan, arrays)}


def _limit(plan: XlaPlan, arrays: Sequence[ArrayPlan]) -> int:
    """Arrays of fewer elements are sent together; see [Note: messages on CPUs]."""
    if plan.platform != "cpu":
        return 0
    return sys.maxsize if over_gloo() and any(array.block for array in arrays) else SMALL


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
    """Runs identical blocks one after another and gathers each before it runs.

        forward    gather 0, block 0, gather 1, block 1 ...
        backward   gather 1, block 1, reduce 1, gather 0 ...     if the strategy reshards

    Args:
        block: (parameters of one layer, x) -> x, of the same shapes and dtypes.
        x: Input of the first block.
        stacked: Shards whose first axis counts layers.
        plan: The model's plan; its `activation_checkpointing` selects what the backward recomputes.
        unit: Path of the stacked subtree; None if there is only one.
        inputs: A tree whose first axis counts layers. Each block receives its slice as a third
            argument, for example dropout keys or rates of stochastic depth.
        outputs: Whether blocks return (x, output).

    Returns:
        The last block's x; with `outputs`, also the outputs, stacked along a first axis.
    """
    if unit is None and len(plan.blocks) != 1:
        raise ConfigError(
            f"scan_blocks: expected the unit, because the plan has {len(plan.blocks)} stacked "
            "subtrees. Name it, or give fullshard.jax.plan its path in `blocks`."
        )
    arrays = plan.under(unit or plan.blocks[0])
    every, num_layers = plan.table.recompute.every, arrays[0].num_layers
    _check_layers(inputs, num_layers)

    def body(at: int, x: Any, group: Tree) -> tuple[Any, Any]:
        # Sliced here, so that the backward keeps the group itself and no copies.
        shards, given = group if every == 1 else jax.tree.map(lambda leaf: leaf[at], group)
        met = gather_arrays(plan, arrays, shards), checkpoint_name(x, BLOCK_INPUT)
        found = block(*met) if inputs is None else block(*met, given)
        return found if outputs else (found, None)

    def run(x: Any, first: int, num_groups: int, size: int) -> tuple[Any, Any]:
        """Runs `num_groups` groups of `size` layers; the first of each group is recomputed."""
        unrolled = num_groups == 1  # XLA would inline one iteration and share its work
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


def _check_layers(inputs: Tree, num_layers: int) -> None:
    if wrong := [x.shape for x in jax.tree.leaves(inputs) if x.shape[:1] != (num_layers,)]:
        raise ConfigError(
            f"scan_blocks: expected inputs whose first axis is the {num_layers} layers; got shape "
            f"{wrong[0]}. Let the block close over what all layers share."
        )


def _bodies(body: Any, plan: XlaPlan, size: int, *, prevent_cse: bool) -> list[Any]:
    """The bodies of a group; the first one has activation checkpointing."""
    table = plan.table
    if prevent_cse and plan.platform == "cpu":  # XLA would drop the barrier, and share the work
        return [partial(body, at) for at in range(size)]

    def kept(at: int, kind: RecomputeKind) -> Any:
        policy = _policy(kind, reshards=table.reshards)
        one = partial(body, at)
        if policy is None:
            return one
        return jax.checkpoint(one, policy=policy, prevent_cse=prevent_cse)

    return [kept(at, RecomputeKind.NONE if at else table.recompute.kind) for at in range(size)]


def _policy(kind: RecomputeKind, *, reshards: bool) -> Any:
    """Which values the backward keeps, by the primitive that produced them; None: all."""
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
    """Whether the primitive is a gather, or the custom-gradient function around it."""
    if primitive.name in _GATHERS:  # of arrays, not of tokens
        return SHARD in params["axis_name"]
    if not primitive.name.startswith("custom_vjp"):
        return False
    inner = getattr(params.get("call_jaxpr"), "eqns", ())
    return any(_is_gather(step.primitive, step.params) for step in inner)


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    # Moves are recomputed, since they are cheap. If saved, they would keep a gathered weight alive.
    return primitive.name not in MOVES and not _is_gather(primitive, params)


def all_gather(
    parts: Arrays, axis: str | Axes, dims: Sequence[int], limit: int = sys.maxsize
) -> list[jax.Array]:
    """Concatenates the shards of all devices of mesh axes along each array's dimension.

    Arrays of fewer than `limit` elements are sent together.
    """
    num = lax.axis_size(axis)

    def gather(part: jax.Array, dim: int = 0) -> jax.Array:
        return lax.all_gather(part, axis, axis=dim, tiled=True)

    def together(chosen: Arrays, dims: Sequence[int]) -> list[jax.Array]:
        if len(chosen) == 1 and not over_gloo():
            return list(map(gather, chosen, dims))
        times, send = (num, partial(_exchange, axis)) if over_gloo() else (1, gather)
        found = _packed([jnp.broadcast_to(x, (times, *x.shape)) for x in chosen], send)
        return [jnp.concatenate([*rows], dim) for rows, dim in zip(found, dims, strict=True)]

    return _by_size(parts, dims, limit // num, together)


def reduce_scatter(
    wholes: Arrays, axis: str | Axes, dims: Sequence[int], limit: int = sys.maxsize
) -> list[jax.Array]:
    """Sums over mesh axes and returns this device's shard along each array's dimension."""
    num = lax.axis_size(axis)

    def scatter(whole: jax.Array, dim: int = 0) -> jax.Array:
        return lax.psum_scatter(whole, axis, scatter_dimension=dim, tiled=True)

    def together(chosen: Arrays, dims: Sequence[int]) -> list[jax.Array]:
        if len(chosen) == 1 and not over_gloo():
            return list(map(scatter, chosen, dims))
        pairs = zip(chosen, dims, strict=True)
        rows = [jnp.stack(jnp.split(whole, num, dim)) for whole, dim in pairs]
        found = _packed(rows, partial(_exchange, axis) if over_gloo() else scatter)
        return [rows.sum(0, dtype=rows.dtype) for rows in found]

    return _by_size(wholes, dims, limit, together)


def _by_size(
    arrays: Arrays, dims: Sequence[int], limit: int, send: Callable[..., list[jax.Array]]
) -> list[jax.Array]:
    """Sends arrays below the limit together, and the others one by one."""
    small = [at for at, array in enumerate(arrays) if array.size < limit]
    found = list(arrays)
    groups = [small] * bool(small) + [[at] for at in range(len(arrays)) if at not in small]
    for group in groups:
        found = _at(group, found, partial(send, dims=[dims[at] for at in group]))
    return found


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


def summed(plan: XlaPlan, x: jax.Array) -> jax.Array:
    """The sum of all devices' parts over the tensor axis. See [Note: other axes]."""
    return _over(plan, TENSOR, x, (_add, _keep))


def shared(plan: XlaPlan, x: jax.Array) -> jax.Array:
    """A value that all devices of the tensor axis have; its gradient is the sum of theirs."""
    return _over(plan, TENSOR, x, (_keep, _add))


def brought(plan: XlaPlan, rows: jax.Array) -> jax.Array:
    """The rows of all devices of the expert axis, in their order."""
    return _over(plan, EXPERT, rows, (_join, _divide))


def taken_back(plan: XlaPlan, rows: jax.Array) -> jax.Array:
    """This device's rows of the sum over the expert axis."""
    return _over(plan, EXPERT, rows, (_divide, _join))


def first_expert(plan: XlaPlan, num_own: int) -> jax.Array | int:
    """The first of the `num_own` experts of this device."""
    axes = live_axes(plan.mesh, (EXPERT, TENSOR))
    return lax.axis_index(axes) * num_own if axes else 0


def _over(plan: XlaPlan, axis: str, x: jax.Array, passes: tuple[Any, Any]) -> jax.Array:
    """Applies one collective in forward, and another in backward."""
    if not live_axes(plan.mesh, (axis,)):
        return x
    return _passed(x, *passes)


def _passed(x: jax.Array, forward: Any, backward: Any) -> jax.Array:
    """Applies a function whose gradient is another one."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, grad: (backward(grad),))
    return function(x)


def _add(x: jax.Array) -> jax.Array:
    return all_reduce([x], (TENSOR,))[0]


def _keep(x: jax.Array) -> jax.Array:
    return x


def _join(rows: jax.Array) -> jax.Array:
    return all_gather([rows], EXPERT, [0])[0]


def _divide(rows: jax.Array) -> jax.Array:
    return reduce_scatter([rows], EXPERT, [0])[0]


def _packed(rows: Arrays, send: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Sends the rows of all arrays of a dtype at once."""
    found: list[jax.Array] = list(rows)
    for dtype in dict.fromkeys(array.dtype for array in rows):
        chosen = [at for at, array in enumerate(rows) if array.dtype == dtype]
        flat = [rows[at].reshape(rows[at].shape[0], -1) for at in chosen]
        came = send(jnp.concatenate(flat, 1))
        stops = [sum(part.shape[1] for part in flat[:count]) for count in range(1, len(flat))]
        for at, part in zip(chosen, jnp.split(came, stops, 1), strict=True):
            found[at] = part.reshape(came.shape[0], *rows[at].shape[1:])
    return found


def _exchange(axis: str | Axes, rows: jax.Array) -> jax.Array:
    """Sends row i to rank i; row i of the result comes from rank i."""
    if rows.dtype != jnp.bfloat16:
        return lax.all_to_all(rows, axis, 0, 0, tiled=True)
    words = lax.bitcast_convert_type(rows, jnp.uint16)  # XLA would widen it for CPUs
    return lax.bitcast_convert_type(_exchange(axis, words), jnp.bfloat16)


def over_gloo() -> bool:
    """Whether the devices are the CPUs of several processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
