"""A training step as one compiled function.

    state, batch --> in shard_map   scan over micro-batches: gather, loss, gradients, reduce
                                    (a teacher's arrays are given beside the batch)
                                    sum loss and tokens, norm of the gradients
                     outside of it  clip, optimizer                             --> state, metrics

Gradients leave `shard_map` as ordinary sharded arrays, so any optax transformation works on them,
also one that looks at whole matrices. State goes in and comes out in the plan's shardings, and in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.errors import ConfigError, DataError
from fullshard.xla import wire
from fullshard.xla.gather import collect, reduce
from fullshard.xla.mesh import SHARD, live_axes
from fullshard.xla.plan import Tree, XlaPlan, batch_spec, pad, unpad

LossFn = Callable[..., tuple[jax.Array, jax.Array]]
NORM_EPSILON = 1e-6  # torch's: optax clips without


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "step"),
    meta_fields=("plan",),
)
@dataclass(frozen=True)
class State:
    """What a step changes.

    Attributes:
        params: Sharded arrays in the master dtype, padded where the plan says.
        opt_state: The optimizer's; None where there is none.
        step: Updates so far, an int32 scalar.
        plan: Plan of the model.
    """

    params: Tree
    opt_state: Any
    step: Any
    plan: XlaPlan


@dataclass(frozen=True)
class Given:
    """Arrays that a loss reads and no step changes, such as a teacher's.

    Attributes:
        plan: Plan of these arrays, on the mesh of the step.
        params: Sharded.
    """

    plan: XlaPlan
    params: Tree


def init(
    plan: XlaPlan,
    init_fn: Callable[[Any], Tree],
    tx: optax.GradientTransformation | None = None,
    key: Any = None,
) -> State:
    """A state that is born sharded: no device ever holds the whole, and any mesh gives one bits.

    Args:
        plan: Plan of the tree that `init_fn` gives.
        init_fn: key -> parameters.
        tx: The optimizer.
        key: A jax.random.key; None: of seed 0.
    """
    key = jax.random.key(0) if key is None else key
    return with_optimizer(plan, born_sharded(plan, init_fn)(key), tx)


def born_sharded(plan: XlaPlan, init_fn: Callable[[Any], Tree]) -> Any:
    """The compiled function of `init`: key -> sharded parameters."""

    def build(key: Any) -> Tree:
        return plan.with_arrays(_stored, init_fn(key))

    return jax.jit(build, out_shardings=plan.shardings)


def with_optimizer(
    plan: XlaPlan, params: Tree, tx: optax.GradientTransformation | None, step: int = 0
) -> State:
    """A state from sharded parameters, with a fresh optimizer."""
    opt_state = None
    if tx is not None:
        make = jax.jit(tx.init, out_shardings=opt_shardings(plan, tx))
        opt_state = make(trained(plan, params))
    return State(params, opt_state, scalar(np.int32(step), plan.replicated), plan)


def scalar(value: Any, sharding: Any) -> jax.Array:
    """A number that every process has already: `device_put` would compare them by a collective."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))


def trained(plan: XlaPlan, tree: Tree) -> Tree:
    """The tree with None for arrays that are not updated."""
    return plan.with_arrays(lambda array, leaf: leaf if array.trainable else None, tree)


def opt_shardings(plan: XlaPlan, tx: optax.GradientTransformation) -> Tree:
    """Shardings of an optimizer's state: what is shaped like a parameter lies like it."""
    shapes = trained(plan, plan.map(_stored_shape))
    state = jax.eval_shape(tx.init, shapes)
    shardings = trained(plan, plan.shardings)

    def like(leaf: Any, shape: Any, sharding: Any) -> Any:
        return sharding if leaf.shape == shape.shape else plan.replicated

    return optax.tree_map_params(
        tx,
        like,
        state,
        shapes,
        shardings,
        transform_non_params=lambda _: plan.replicated,
    )


class Step:
    """(state, batch) -> (state, metrics). The state that is given is used up.

    Metrics: `loss`, the mean over all label tokens of the global batch; `grad_norm` before
    clipping; `num_tokens`.
    """

    def __init__(
        self, plan: XlaPlan, run: Any, num_micro_batches: int, given: Given | None
    ) -> None:
        self.plan = plan
        self.num_micro_batches = num_micro_batches
        self._run = run
        self._beside = None if given is None else given.params

    def __call__(self, state: State, batch: Any, **extra: Any) -> tuple[State, dict[str, Any]]:
        """One update.

        Args:
            state: State of `init` or `load`.
            batch: Arrays whose first axis is this process's samples (behind an axis of
                micro-batches, where there are several).
            **extra: Given to the optimizer's update, such as learning_rate.
        """
        found = self._run(state, self.place(batch), _arrays(extra), self._beside)
        if jax.default_backend() == "cpu":
            # Steps in flight on several CPU devices of a process wait for each other's threads.
            jax.block_until_ready(found)
        return found

    def place(self, batch: Any) -> Any:
        """This process's part of a batch as arrays over all devices."""
        return place_batch(self.plan, batch, self.num_micro_batches)

    def compile(self, state: Any, batch: Any, compiler_options: Any = None, **extra: Any) -> Any:
        """The compiled step; shapes will do in place of arrays."""
        lowered = self._run.lower(state, batch, _arrays(extra), self._beside)
        return lowered.compile(compiler_options)

    def num_compiled(self) -> int:
        """How many programs were made of it: one, unless shapes changed."""
        return self._run._cache_size()


def train_step(
    plan: XlaPlan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    max_grad_norm: float | None = None,
    num_micro_batches: int = 1,
    given: Given | None = None,
) -> Step:
    """Compile what one update does.

    Args:
        plan: Plan of the parameters.
        loss_fn: (parameters, batch) -> (summed loss, number of label tokens) of one device's
            samples. It meets whole arrays in the compute dtype, and shards of stacked blocks.
        tx: Any optax transformation. Those that change single elements cost no communication.
        max_grad_norm: Clip above it, as torch does.
        num_micro_batches: Batches whose gradients are added before the update.
        given: Further arrays, met by the loss as a third argument in the same way. Nobody asks
            for their gradients, and every step reads the same ones.
    """
    tx = optax.with_extra_args_support(tx)
    mapped = jax.shard_map(
        partial(gradients, plan, _seeing(loss_fn, given), num_micro_batches),
        mesh=plan.mesh,
        in_specs=(
            plan.specs,
            batch_spec(plan.mesh, num_micro_batches),
            PartitionSpec() if given is None else given.plan.specs,
        ),
        out_specs=(trained(plan, plan.specs), PartitionSpec()),
        check_vma=False,  # see [Note: gathers on XLA]
    )

    def run(
        state: State, batch: Any, extra: dict[str, Any], beside: Tree = None
    ) -> tuple[State, dict[str, Any]]:
        grads, metrics = mapped(state.params, batch, beside)
        if max_grad_norm is not None:
            factor = max_grad_norm / (metrics["grad_norm"] + NORM_EPSILON)
            grads = jax.tree.map(lambda g: g * jnp.minimum(factor, 1.0).astype(g.dtype), grads)
        mine = trained(plan, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, mine, **extra)
        params = _merge(plan, state.params, optax.apply_updates(mine, updates))
        return State(params, opt_state, state.step + 1, plan), metrics

    shardings = State(plan.shardings, opt_shardings(plan, tx), plan.replicated, plan)
    compiled = jax.jit(run, donate_argnums=0, out_shardings=(shardings, plan.replicated))
    return Step(plan, compiled, num_micro_batches, given)


def _seeing(loss_fn: LossFn, given: Given | None) -> Callable[[Tree], LossFn]:
    """The loss of (parameters, batch), from the shards of what is given.

    What of it lies outside of blocks is gathered here, once for all micro-batches.
    """
    if given is None:
        return lambda _: loss_fn
    plan = given.plan

    def seeing(beside: Tree) -> LossFn:
        met = lax.stop_gradient(whole_but_blocks(plan, beside))
        return lambda params, batch: loss_fn(params, batch, met)

    return seeing


def eval_step(plan: XlaPlan, loss_fn: LossFn) -> Callable[[State, Any], tuple[Any, Any]]:
    """(state, batch) -> (summed loss, label tokens) over all devices."""

    def totals(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        total, count = loss_fn(whole_but_blocks(plan, params), batch)
        summed = _sum_over(plan, jnp.stack([total, count.astype(total.dtype)]))
        return summed[0], summed[1]

    mapped = jax.shard_map(
        totals,
        mesh=plan.mesh,
        in_specs=(plan.specs, batch_spec(plan.mesh, 1)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    run = jax.jit(mapped)
    return lambda state, batch: jax.block_until_ready(run(state.params, place_batch(plan, batch)))


def place_batch(plan: XlaPlan, batch: Any, num_micro_batches: int = 1) -> Any:
    """This process's samples as arrays over all devices.

    Raises:
        DataError: They do not divide over the devices.
    """
    axis, sharding = int(num_micro_batches > 1), plan.batch_sharding(num_micro_batches)
    world = plan.table.mesh.world_size // jax.process_count()

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return leaf
        if leaf.ndim <= axis or leaf.shape[axis] % world:
            raise DataError(
                f"batch: expected a multiple of {world} samples (the process's devices) on axis "
                f"{axis}; got shape {tuple(leaf.shape)}. Fill it up with fullshard.jax.pad_batch."
            )
        return jax.make_array_from_process_local_data(sharding, leaf)

    return jax.tree.map(place, batch)


def whole_but_blocks(plan: XlaPlan, params: Tree) -> Tree:
    """What a loss function meets: arrays outside of blocks whole, stacked ones as shards."""
    return plan.with_arrays(
        lambda array, leaf: leaf if array.block else collect(array, leaf), params
    )


def gradients(
    plan: XlaPlan,
    seeing: Callable[[Tree], LossFn],
    num_micro_batches: int,
    params: Tree,
    batch: Any,
    beside: Tree,
) -> tuple[Tree, dict[str, jax.Array]]:
    """Gradients of the mean over all label tokens, and what they were like; on one device.

    What lies outside of blocks is gathered once for all micro-batches: XLA would take such a
    gather out of their loop on some backends and not on others.
    """
    met, loss_fn = whole_but_blocks(plan, params), seeing(beside)
    arrays = [array for array in plan.table.arrays if array.trainable]

    def summed(mine: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        return loss_fn(_merge(plan, met, mine), batch)

    def micro_batch(carry: Any, batch: Any) -> tuple[Any, None]:
        value_and_grad = jax.value_and_grad(summed, has_aux=True)
        (total, count), grads = value_and_grad(trained(plan, met), batch)
        found = [
            grad if array.block else reduce(array, grad, plan.table.mesh)
            for array, grad in zip(arrays, jax.tree.leaves(grads), strict=True)
        ]
        sums = jnp.stack([total, count.astype(total.dtype)])
        add = partial(jax.tree.map, lambda kept, new: kept + new.astype(kept.dtype))
        return add(carry, (found, sums)), None

    mine = jax.tree.leaves(trained(plan, params))
    wide = jnp.float64 if any(a.dtypes.accumulate == "float64" for a in arrays) else jnp.float32
    zeros = [jnp.zeros(x.shape, a.dtypes.accumulate) for a, x in zip(arrays, mine, strict=True)]
    carry = (zeros, jnp.zeros(2, wide))
    if num_micro_batches == 1:
        (grads, sums), _ = micro_batch(carry, batch)
    else:
        (grads, sums), _ = lax.scan(micro_batch, carry, batch)
    total, count = _sum_over(plan, sums)
    grads = [grad / jnp.maximum(count, 1).astype(grad.dtype) for grad in grads]
    norm = _norm(plan, grads)
    loss = total / jnp.maximum(count, 1)
    structure = jax.tree.structure(trained(plan, params))
    metrics = {"loss": loss, "grad_norm": norm, "num_tokens": count}
    return jax.tree.unflatten(structure, grads), metrics


def _norm(plan: XlaPlan, grads: Sequence[jax.Array]) -> jax.Array:
    """The global norm: parted arrays are summed over the shard axis, whole ones count once."""
    arrays = [array for array in plan.table.arrays if array.trainable]
    parted = whole = jnp.zeros((), jnp.float32)
    for array, grad in zip(arrays, grads, strict=True):
        square = jnp.sum(jnp.square(grad))
        if array.cut.dim is None:
            whole = whole + square
        else:
            parted = parted + square
    if plan.table.mesh.shard > 1:
        (parted,) = wire.total([parted], (SHARD,))
    return jnp.sqrt(parted + whole)


def _sum_over(plan: XlaPlan, value: jax.Array) -> jax.Array:
    return wire.total([value], live_axes(plan.mesh))[0]


def _merge(plan: XlaPlan, params: Tree, mine: Tree) -> Tree:
    """Updated arrays where there are such, else those of before."""
    updated = iter(jax.tree.leaves(mine))
    return plan.with_arrays(lambda array, leaf: next(updated) if array.trainable else leaf, params)


def _stored(array: Any, leaf: jax.Array) -> jax.Array:
    own = ((array.num_layers,) if array.block else ()) + array.shape
    if tuple(leaf.shape) != own:
        raise ConfigError(
            f"{array.name}: expected shape {own}, as planned; got {tuple(leaf.shape)}. Plan the "
            "tree that init_fn gives."
        )
    return pad(array, leaf.astype(array.dtypes.master))


def _stored_shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.stored_shape, jnp.dtype(str(array.dtypes.master)))


def _arrays(extra: dict[str, Any]) -> dict[str, Any]:
    """Numbers as arrays of one dtype, so that another value is no other program."""
    wide = jnp.result_type(float)
    return {name: jnp.asarray(value, wide) for name, value in extra.items()}


def full_params(state: State) -> Tree:
    """All parameters whole, as numpy arrays on every process. A collective."""
    return state.plan.with_arrays(whole_array, state.params)


def whole_array(array: Any, leaf: jax.Array) -> Any:
    """One parameter, or a state of it, as a numpy array without padding."""
    if not leaf.is_fully_addressable:
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # pyright: ignore[reportAttributeAccessIssue]
        leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
    return unpad(array, np.asarray(leaf))
