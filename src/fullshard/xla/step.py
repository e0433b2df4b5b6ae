"""A training step as one compiled function.

    state, batch --> in shard_map   scan over micro-batches: gather, loss, gradients, reduce
                                    (a teacher's arrays are given beside the batch)
                                    sum loss and tokens, norm of the gradients
                     outside of it  clip, optimizer                             --> state, metrics

Gradients leave `shard_map` as ordinary sharded arrays, so any optax transformation works on them,
including those on whole matrices. The state keeps the plan's shardings and is updated in place.

[Note: random keys]
`step(state, batch, rng=key)` passes a key to the loss, `loss_fn(parameters, batch, rng=...)`. The
global batch has micro-batches x devices parts, in the order of its samples. The key of part i is

    fold_in(fold_in(key, state.step), i)

so one device that runs all parts in turn with these keys computes the same.

[Note: losses]
A loss function receives one device's samples of one micro-batch and returns sums over them:

    loss_fn(params, batch)                   -> total, count
    loss_fn(params, batch)                   -> total, count, metrics
    loss_fn(params, batch, variables=...)    -> total, count, metrics, variables
    loss_fn(params, batch, rng=...)             if the step is given a key

The step adds totals, counts and metrics of all devices and micro-batches and divides by the count.
A term that is not a sum over tokens, such as a regularizer, is therefore multiplied by the count:
`total + weight * norm * count` is the mean plus `weight * norm`, on any number of devices.

`variables` is `state.variables`, such as BatchNorm's running averages. The returned variables are
passed to the device's next micro-batch. At the end of the step they are averaged over devices;
integers and keys are those of the first device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core, lax
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.errors import ConfigError
from fullshard.planner.arrays import Collectives
from fullshard.xla.gather import all_reduce, call_loss, once, reduce_whole, whole_but_blocks
from fullshard.xla.opt_state import fresh, merged, opt_shardings, rules_of, trained, updated
from fullshard.xla.plan import (
    OVERLAP,
    TENSOR,
    Tree,
    XlaPlan,
    batch_specs,
    live_axes,
    own_shape,
    pad,
    place_batch,
    unpad,
)
from fullshard.xla.processes import place_alike
from fullshard.xla.traced import census, is_local, traced_collectives

_WORD = 4  # bytes of the narrowest integers that are sent
NORM_EPSILON = 1e-6  # as in torch; optax has none


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "step", "variables"),
    meta_fields=("plan", "rules"),
)
@dataclass(frozen=True)
class State:
    """The training state.

    Attributes:
        params: Sharded arrays in the master dtype, with the plan's padding.
        opt_state: The optimizer's state; None without an optimizer.
        step: Number of updates so far, an int32 scalar.
        plan: The model's plan.
        variables: State that the loss updates without gradients, such as BatchNorm's averages;
            replicated. None if there is none.
        rules: The optimizer's rules by name, as `rules_of` returns them.
    """

    params: Tree
    opt_state: Any
    step: Any
    plan: XlaPlan
    variables: Any = None
    rules: tuple[str, ...] = ()


class Beside(NamedTuple):
    """Further arguments of a loss function; None if absent.

    Attributes:
        given: The arrays of `Fixed`.
        rng: The step's key.
        variables: The state's variables.
    """

    given: Tree = None
    rng: Any = None
    variables: Tree = None


@dataclass(frozen=True)
class Fixed:
    """Constant arrays that a loss reads, such as a teacher's weights.

    Attributes:
        plan: Plan of these arrays, on the step's mesh.
        params: The sharded arrays.
    """

    plan: XlaPlan
    params: Tree


def init(
    plan: XlaPlan,
    init_fn: Callable[[Any], Tree],
    tx: optax.GradientTransformation | None = None,
    key: Any = None,
    variables: Tree = None,
) -> State:
    """Initialises a sharded state, never whole on a device, with the same bits on every mesh.

    Args:
        plan: Plan of the tree that `init_fn` returns.
        init_fn: key -> parameters.
        tx: The optimizer.
        key: A jax.random.key; None: seed 0.
        variables: State that the loss updates without gradients, such as BatchNorm's averages.
    """
    key = place_alike("key", jax.random.key(0) if key is None else key, plan.replicated)
    return with_optimizer(plan, born_sharded(plan, init_fn)(key), tx, variables=variables)


def born_sharded(plan: XlaPlan, init_fn: Callable[[Any], Tree]) -> Any:
    """The compiled function of `init`: key -> sharded parameters."""
    return jax.jit(lambda key: plan.with_arrays(stored, init_fn(key)), out_shardings=plan.shardings)


def with_optimizer(
    plan: XlaPlan,
    params: Tree,
    tx: optax.GradientTransformation | None,
    step: int = 0,
    variables: Tree = None,
) -> State:
    """Makes a state from sharded parameters with a new optimizer state."""
    opt_state, rules = (None, ()) if tx is None else (fresh(plan, tx, params), rules_of(tx))
    own = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), variables)
    variables = place_alike("variables", own, plan.replicated)  # a step donates them
    count = scalar(np.int32(step), plan.replicated)
    return State(params, opt_state, count, plan, variables, rules)


def scalar(value: Any, sharding: Any) -> jax.Array:
    """Makes a replicated scalar without `device_put`, which would compare it by a collective."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))


class Step:
    """A function (state, batch) -> (state, metrics). It donates the given state.

    The metrics are `loss`, the mean over all label tokens of the global batch; `grad_norm` before
    clipping; `num_tokens`; and the metrics of the loss function, divided by the number of tokens.
    """

    def __init__(
        self, plan: XlaPlan, runs: tuple[Any, Any], num_micro_batches: int, given: Fixed | None
    ) -> None:
        self.plan = plan
        self.num_micro_batches = num_micro_batches
        self._run, self._update = runs
        self._is_traced = False
        self._given = None if given is None else given.params

    def __call__(
        self, state: State, batch: Any, *, rng: Any = None, **extra: Any
    ) -> tuple[State, dict[str, Any]]:
        """Runs one update.

        Args:
            state: State from `init`, `load` or a step.
            batch: Arrays whose first axis counts this process's samples (after an axis of
                micro-batches if there are several), and scalars, which all devices receive.
            rng: A jax.random.key, which may be the same in every step; see [Note: random keys].
            **extra: Scalars for the optimizer's update, such as learning_rate; they replace those
                of `optax.inject_hyperparams`. Its `value` is the step's loss unless given.

        Raises:
            ConfigError: The optimizer does not use such a scalar, or the state is another's.
            DataError: The number of samples is not divisible by the number of devices.
        """
        check_state(self.plan, state)
        arguments = state, self.place(batch), _arrays(extra), self._given, rng
        if not self._is_traced:
            self._traced(*arguments)
        found = self._run(*arguments)
        if jax.default_backend() == "cpu":
            # Concurrent steps on several CPU devices of a process can deadlock on its threads.
            jax.block_until_ready(found)
        return found

    def place(self, batch: Any) -> Any:
        """Places this process's part of a batch as arrays over all devices."""
        mesh = self.plan.mesh
        return place_batch(mesh, live_axes(mesh), batch, self.num_micro_batches)

    def compile(
        self, state: Any, batch: Any, compiler_options: Any = None, *, rng: Any = None, **extra: Any
    ) -> Any:
        """Compiles the step; accepts shapes in place of arrays.

        The plan then also contains the collectives that XLA's partitioner adds for an optimizer
        that combines elements of an array. It compiles only the optimizer to count them.
        """
        grads = trained(self.plan, self.plan.shapes("accumulate"))
        loss = jax.ShapeDtypeStruct((), _wide(self.plan, jnp.zeros((), jnp.float32)))
        before = state.params, state.opt_state
        update = self._update.trace(grads, before, loss, _arrays(extra))
        added = dict[str, Collectives]()
        if not is_local(update.jaxpr.jaxpr):  # one trip of a loop until something has converged
            added = census(update.lower().compile(compiler_options), num_trips=1)
        traced = self._traced(state, batch, _arrays(extra), self._given, rng, added=added)
        return traced.lower().compile(compiler_options)

    def _traced(self, *arguments: Any, added: Mapping[str, Collectives] | None = None) -> Any:
        """Traces the step, which jax keeps for the call, and reads its collectives."""
        traced, plan, self._is_traced = self._run.trace(*arguments), self.plan, True
        moved = traced_collectives(traced.jaxpr.jaxpr, added, on_cpu=plan.platform == "cpu")
        plan.table = plan.table.with_traced(self.num_micro_batches, moved)
        return traced

    def num_compiled(self) -> int:
        """The number of compiled programs: one unless shapes changed."""
        return self._run._cache_size()


def train_step(  # noqa: PLR0913  (settings by name)
    plan: XlaPlan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    max_grad_norm: float | None = None,
    num_micro_batches: int = 1,
    given: Fixed | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """Makes the compiled function of one update.

    Args:
        plan: Plan of the parameters.
        loss_fn: (parameters, batch) -> (summed loss, number of label tokens) of one device's
            samples. It receives whole arrays in the compute dtype, and shards of stacked blocks.
            See [Note: losses] for further arguments and results.
        tx: Any optax transformation. Elementwise ones need no communication.
        max_grad_norm: Clips the global norm to this value, as torch does.
        num_micro_batches: Number of micro-batches whose gradients are accumulated per update.
        given: Constant arrays, passed to the loss as a third argument in the same form as
            parameters. They have no gradients.
        compiler_options: XLA options, added to those of `OVERLAP`.
    """
    if num_micro_batches < 1 or not (max_grad_norm is None or max_grad_norm >= 0):
        raise ConfigError(
            "train_step: expected num_micro_batches of 1 or more, and None or a max_grad_norm of 0 "
            f"or more; got {num_micro_batches} and {max_grad_norm}. Mend the argument."
        )
    if not plan.trained_arrays:
        raise ConfigError(
            "plan: expected an array that is trained; got none. Leave freeze out, or use eval_step."
        )
    update, rules = partial(updated, plan, optax.with_extra_args_support(tx)), rules_of(tx)

    def run(
        state: State, batch: Any, extra: dict[str, Any], met: Tree = None, rng: Any = None
    ) -> tuple[State, dict[str, Any]]:
        rng = None if rng is None else jax.random.fold_in(rng, state.step)
        mapped = gradients(plan, loss_fn, num_micro_batches, batch, given)
        grads, metrics, variables = mapped(state.params, batch, Beside(met, rng, state.variables))
        if max_grad_norm is not None:
            factor = max_grad_norm / (metrics["grad_norm"] + NORM_EPSILON)
            grads = jax.tree.map(lambda g: g * jnp.minimum(factor, 1.0).astype(g.dtype), grads)
        found = jax.tree.structure(state.opt_state), state.rules, _forms(state.params)
        if found != (jax.tree.structure(stored[1]), rules, _forms(plan.shapes())):
            raise ConfigError(
                "state: expected the optimizer state of the step's tx, and parameters as planned; "
                "got another state, or none, or other shapes or dtypes. Pass the same tx and plan "
                "to fullshard.jax.init, shard or load."
            )
        before = state.params, state.opt_state
        params, opt_state = update(grads, before, metrics["loss"], extra)
        return State(params, opt_state, state.step + 1, plan, variables, rules), metrics

    whole, stored = plan.replicated, (plan.shardings, opt_shardings(plan, tx))
    options = {**OVERLAP.get(plan.platform, {}), **(compiler_options or {})} or None
    compiled = partial(jax.jit, compiler_options=options)
    placed = State(*stored, whole, plan, whole, rules), whole
    ran = compiled(run, donate_argnums=0, out_shardings=placed)
    return Step(plan, (ran, compiled(update, out_shardings=stored)), num_micro_batches, given)


def _forms(params: Tree) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]


def _seeing(loss_fn: LossFn, given: Fixed | None) -> Callable[[Tree], LossFn]:
    """The loss as a function of (parameters, batch), with the given arrays bound.

    The given arrays outside of blocks are gathered here, once for all micro-batches.
    """
    if given is None:
        return lambda _: loss_fn
    plan = given.plan

    def seeing(beside: Tree) -> LossFn:
        met = lax.stop_gradient(whole_but_blocks(plan, beside))
        return lambda params, batch, **more: loss_fn(params, batch, met, **more)

    return seeing


def eval_step(plan: XlaPlan, loss_fn: LossFn) -> Callable[[State, Any], tuple[Any, ...]]:
    """Makes (state, batch) -> the loss function's results, summed over all devices.

    The result is (summed loss, label tokens), and the metrics if the loss returns them. Variables
    are not changed.
    """

    def totals(params: Tree, batch: Any, variables: Tree) -> tuple[Any, ...]:
        given = {} if variables is None else {"variables": variables}
        met = whole_but_blocks(plan, plan.with_arrays(partial(once, plan), params))
        sums = sums_of(plan, loss_fn, met, batch, given, new=False)
        near = jax.tree.map(partial(_near, plan), sums[1:3])
        total, count, (metrics, near), _ = _over_devices(plan, (*sums[:2], (sums[2], near)))
        found = total, *jax.tree.map(_limited, (count, metrics), near)
        return found[:2] if sums.metrics is None else found

    axes = live_axes(plan.mesh)

    @jax.jit
    def run(params: Tree, batch: Any, variables: Tree) -> tuple[Any, ...]:
        specs = plan.specs, batch_specs(axes, batch), PartitionSpec()
        return _on_devices(plan, totals, specs, PartitionSpec())(params, batch, variables)

    def evaluate(state: State, batch: Any) -> tuple[Any, ...]:
        check_state(plan, state)
        found = run(state.params, place_batch(plan.mesh, axes, batch), state.variables)
        return jax.block_until_ready(found)

    return evaluate


def check_state(plan: XlaPlan, state: State) -> None:
    """Refuses a state whose arrays are stored otherwise, and one that a step has used up."""
    if state.plan is not plan and _stored(state.plan) != _stored(plan):
        raise ConfigError(
            "state: expected arrays that are stored as in the step's plan; got those of a plan "
            "with other shapes, master dtypes or another mesh. Make the state with this plan "
            "(fullshard.jax.shard), or save and load it."
        )
    is_traced = isinstance(state.step, core.Tracer)  # by a jax.jit around the step
    if isinstance(state.step, jax.Array) and not is_traced and state.step.is_deleted():
        raise ConfigError(
            "state: expected the state that the last step returned; got one that a step has used "
            "up. Write `state, metrics = step(state, batch)`, or save a state to return to it."
        )


def _stored(plan: XlaPlan) -> Any:
    return plan.mesh, [
        replace(a, trainable=True, dtypes=a.dtypes.master) for a in plan.table.arrays
    ]


def _on_devices(plan: XlaPlan, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """The function of all devices, each with its part."""
    return jax.shard_map(  # see [Note: gathers on XLA] in xla/gather.py
        function, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def gradients(
    plan: XlaPlan, loss_fn: LossFn, num_micro_batches: int, batch: Any, given: Fixed | None = None
) -> Any:
    """Makes (parameters, batch, Beside) -> gradients, metrics and variables, over all devices.

    Args:
        plan: Plan of the parameters; its mesh may be abstract.
        loss_fn: Loss function, as in `train_step`.
        num_micro_batches: Number of micro-batches.
        batch: The batch, or its shapes.
        given: Constant arrays, as in `train_step`.
    """
    whole = PartitionSpec()
    beside = Beside(whole if given is None else given.plan.specs, whole, whole)
    specs = plan.specs, batch_specs(live_axes(plan.mesh), batch, num_micro_batches), beside
    function = partial(_gradients, plan, _seeing(loss_fn, given), num_micro_batches)
    return _on_devices(plan, function, specs, (trained(plan, plan.specs), whole, whole))


def _gradients(
    plan: XlaPlan,
    seeing: Callable[[Tree], LossFn],
    num_micro_batches: int,
    params: Tree,
    batch: Any,
    beside: Beside,
) -> tuple[Tree, dict[str, jax.Array], Tree]:
    """Computes one device's gradients of the mean over all label tokens, metrics, and variables.

    Arrays outside of blocks are gathered once for all micro-batches, because only some XLA backends
    move such a gather out of the loop.
    """
    met, loss_fn = whole_but_blocks(plan, params), seeing(beside.given)

    def summed(
        mine: Tree, met: Tree, batch: Any, variables: Tree, at: Any
    ) -> tuple[jax.Array, Sums]:
        more = {} if variables is None else {"variables": variables}
        if beside.rng is not None:
            more["rng"] = _key(plan, beside.rng, at)
        found = sums_of(plan, loss_fn, merged(plan, met, mine), batch, more)
        return found.total, found

    def micro_batch(carry: Any, turn: Any) -> tuple[Any, Any]:
        (kept, variables), (at, batch) = carry, turn
        value_and_grad = jax.value_and_grad(summed, has_aux=True)
        here = met if num_micro_batches == 1 else plan.with_arrays(partial(_in_turn, at), met)
        (_, sums), grads = value_and_grad(trained(plan, here), here, batch, variables, at)
        found = reduce_whole(plan, jax.tree.leaves(grads))
        kept = [old + new.astype(old.dtype) for old, new in zip(kept, found, strict=True)]
        near = jax.tree.map(partial(_near, plan), (sums.metrics, sums.count))
        return (kept, sums.variables), (sums.total, sums.count, near)

    mine = jax.tree.leaves(trained(plan, params))
    pairs = zip(plan.trained_arrays, mine, strict=True)
    zeros = [jnp.zeros(x.shape, array.dtypes.accumulate) for array, x in pairs]
    carry = (zeros, beside.variables)
    if num_micro_batches == 1:
        (grads, variables), sums = micro_batch(carry, (0, batch))
    else:
        turns = (jnp.arange(num_micro_batches), batch)
        (grads, variables), sums = lax.scan(micro_batch, carry, turns)
        sums = jax.tree.map(lambda x: x.astype(_wide(plan, x)).sum(0), sums)
    sums = *sums[:2], (*sums[2], _squares(plan, grads), [grads[at] for at in plan.joined])
    total, count, (metrics, near, parts, added), variables = _over_devices(plan, sums, variables)
    for at, grad in zip(plan.joined, added, strict=True):
        grads[at] = grad.astype(grads[at].dtype)
        parts[plan.trained_arrays[at].cut.tensor is not None] += jnp.sum(jnp.square(grads[at]))
    squares = parts[0] + sum(all_reduce(parts[1:], live_axes(plan.mesh, (TENSOR,))))
    divisor = jnp.where(near == 0, 1, near)
    grads = [grad / divisor.astype(grad.dtype) for grad in grads]
    means = {**(metrics or {}), "loss": total, "grad_norm": jnp.sqrt(squares)}
    metrics = jax.tree.map(lambda x: x / divisor, means) | {"num_tokens": _limited(count, near)}
    structure = jax.tree.structure(trained(plan, params))
    return jax.tree.unflatten(structure, grads), metrics, variables


def _in_turn(at: Any, array: Any, leaf: jax.Array) -> jax.Array:
    """Makes XLA gather the blocks in each micro-batch; it would keep gathered ones for all."""
    return lax.optimization_barrier((leaf, at))[0] if array.block else leaf


def _key(plan: XlaPlan, rng: Any, at: Any) -> Any:
    """See [Note: random keys]."""
    axes = live_axes(plan.mesh)
    part = at * plan.table.mesh.num_copies + (lax.axis_index(axes) if axes else 0)
    return jax.random.fold_in(rng, part)


def _over_devices(
    plan: XlaPlan, sums: tuple[Any, Any, Any], variables: Tree = None
) -> tuple[Any, Any, Any, Tree]:
    """Sums loss, tokens and other sums over devices, and averages variables, in one collective.

    Integers and keys travel as bytes, whose sums float32 keeps. Variables that are not
    floating-point are those of the first device.
    """
    axes, copies = live_axes(plan.mesh), plan.table.mesh.num_copies
    is_first = lax.axis_index(axes) == 0 if axes else True

    def share(leaf: jax.Array) -> jax.Array:
        part = _parts(leaf)
        is_float = jnp.issubdtype(part.dtype, jnp.floating)
        return part.astype(_wide(plan, part)) / copies if is_float else part * is_first

    sums = jax.tree.map(lambda x: x.astype(_wide(plan, x)), sums)
    leaves, structure = jax.tree.flatten((*sums, variables))
    parts = [*map(_parts, jax.tree.leaves(sums)), *map(share, jax.tree.leaves(variables))]
    dtype = jnp.result_type(*(x.dtype for x in parts if jnp.issubdtype(x.dtype, jnp.floating)))
    flat = jnp.concatenate([jnp.ravel(x).astype(dtype) for x in parts])
    ends = np.cumsum([x.size for x in parts])[:-1].tolist()
    added = zip(leaves, parts, jnp.split(all_reduce([flat], axes)[0], ends), strict=True)
    return jax.tree.unflatten(structure, [_whole(x, to.reshape(p.shape)) for x, p, to in added])


def _parts(leaf: jax.Array) -> jax.Array:
    """The numbers that a leaf consists of: both parts if complex, the bytes of integers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _parts(jax.random.key_data(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    words = leaf if leaf.dtype.itemsize >= _WORD else leaf.astype(jnp.int32)
    return jnp.stack([words >> 8 * at & 255 for at in range(words.dtype.itemsize)])


def _whole(leaf: jax.Array, parts: jax.Array) -> jax.Array:
    """The leaf, whose value is replaced by that of its parts or of their sums."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _whole(jax.random.key_data(leaf), parts)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return lax.complex(parts[0], parts[1]).astype(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return parts.astype(leaf.dtype)
    words = parts.astype(leaf.dtype if leaf.dtype.itemsize >= _WORD else jnp.int32)
    placed = jnp.stack([word << 8 * at for at, word in enumerate(words)])
    return placed.sum(0, dtype=words.dtype).astype(leaf.dtype)


def _near(plan: XlaPlan, value: jax.Array) -> jax.Array:
    """A number in a floating-point dtype, whose sums do not wrap as those of int32 do."""
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value.astype(_wide(plan, value if is_float else jnp.zeros((), jnp.float32)))


def _limited(value: jax.Array, near: jax.Array) -> jax.Array:
    """A sum; of integers the nearest that the dtype has, where it would wrap."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value
    limits = jnp.iinfo(value.dtype)
    far = jnp.where(near < 0, *(jnp.array(x, value.dtype) for x in (limits.min, limits.max)))
    return jnp.where(jnp.abs(near) < float(limits.max), value, far)


def _wide(plan: XlaPlan, value: Any) -> Any:
    """The dtype in which values of this dtype are summed."""
    if jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.promote_types(value.dtype, jnp.int32)
    dtypes = (array.dtypes.accumulate for array in plan.table.arrays)
    wide = jnp.result_type(jnp.float32, *map(str, dtypes))
    return max(value.dtype, wide, key=lambda dtype: dtype.itemsize)  # jax promotes no float8


def _squares(plan: XlaPlan, grads: Sequence[jax.Array]) -> list[jax.Array]:
    """This device's share of the sum of squares of reduced gradients: copies share it equally.

    Arrays that other axes cut have a sum of their own.
    """
    found = [jnp.zeros((), jnp.float32) for _ in range(1 + (plan.table.most_parts > 1))]
    for at, array in enumerate(plan.trained_arrays):
        mesh = plan.table.mesh_of(array)
        copies = mesh.num_copies if array.cut.dim is None else mesh.replicate
        share = 0 if at in plan.joined else jnp.sum(jnp.square(grads[at])) / copies
        found[array.cut.tensor is not None] += share
    return found


def stored(array: Any, leaf: jax.Array) -> jax.Array:
    if tuple(leaf.shape) != own_shape(array):
        raise ConfigError(
            f"{array.name}: expected shape {own_shape(array)}, as planned; got "
            f"{tuple(leaf.shape)}. Plan the tree that init_fn returns."
        )
    return pad(array, leaf.astype(array.dtypes.master))


def _arrays(extra: dict[str, Any]) -> dict[str, Any]:
    """Scalars as arrays of one dtype, so that a new value does not recompile."""
    wide = jnp.result_type(float)
    found = {name: jnp.asarray(value, wide) for name, value in extra.items()}
    if vectors := [f"{name} of shape {x.shape}" for name, x in found.items() if x.shape]:
        raise ConfigError(
            f"step: expected numbers for the optimizer; got {vectors[0]}. Give each group of "
            "parameters its own optimizer (optax.partition)."
        )
    return found


def full_params(state: State) -> Tree:
    """Returns all parameters as whole numpy arrays on every process. A collective."""
    return state.plan.with_arrays(whole_array, state.params)


def whole_array(array: Any, leaf: jax.Array) -> Any:
    """Returns a parameter, or one of its states, as a whole numpy array without padding."""
    if not leaf.is_fully_addressable:
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # pyright: ignore[reportAttributeAccessIssue]
        leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
    return unpad(array, np.asarray(leaf))


LossFn = Callable[..., tuple[Any, ...]]
RESERVED = ("loss", "grad_norm", "num_tokens")


class Sums(NamedTuple):
    """The results of a loss function. See [Note: losses]."""

    total: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: dict[str, jax.Array] | None
    variables: Any


def sums_of(
    plan: XlaPlan, loss_fn: LossFn, params: Tree, batch: Any, more: Any, *, new: bool = True
) -> Sums:
    """Calls a loss function and checks its results and its use of shards.

    Args:
        plan: The model's plan.
        loss_fn: The loss function.
        params: The parameters as it receives them.
        batch: One device's samples.
        more: Its further arguments by name.
        new: Whether it has to return variables if it receives some.

    Raises:
        ConfigError: The results have another form, or it combines elements of a shard.
    """

    def sums(params: Tree) -> Sums:
        return _checked(loss_fn(params, batch, **more), more.get("variables"), new=new)

    try:
        signature(loss_fn).bind(params, batch, **more)
    except TypeError as error:
        raise ConfigError(
            f"loss_fn: expected a function of (params, batch{''.join(f', {n}' for n in more)}): "
            f"{error}. step(..., rng=key) passes rng, init(..., variables=...) passes variables; "
            "eval_step passes no rng, which needs a default there."
        ) from error
    return call_loss(plan, sums, params)


def _checked(found: Any, variables: Any, *, new: bool) -> Sums:
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4:
        size = f" of {len(found)}" if isinstance(found, tuple) else ""
        raise _wrong(type(found).__name__ + size)
    total, count, metrics, changed = (*found, None, None)[:4]
    if not isinstance(metrics, Mapping | None):
        raise _wrong(f"metrics that are a {type(metrics).__name__}")
    if taken := [name for name in RESERVED if name in (metrics or ())]:
        raise _wrong(f"metrics with the name {taken[0]!r}, which the step uses")
    total = _sum("total", total, (jnp.floating,))
    count = _sum("count", count, (jnp.floating, jnp.integer))
    if metrics is not None:
        of_metrics = partial(_sum, "metric", kinds=(jnp.floating, jnp.integer, jnp.bool_))
        metrics = jax.tree.map(of_metrics, dict(metrics))
    return Sums(total, count, metrics, _like(variables, changed) if new else None)


def _sum(what: str, value: Any, kinds: tuple[Any, ...]) -> jax.Array:
    """A number in a dtype in which the sums of devices and micro-batches fit."""
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise _wrong(f"a {what} that is a {type(value).__name__}") from error
    if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise _wrong(f"a {what} of {value.dtype}")
    if value.shape and what != "metric":
        raise _wrong(f"a {what} of shape {value.shape}")
    return value.astype(jnp.promote_types(value.dtype, jnp.int32))


def _like(old: Any, new: Any) -> Any:
    """The new variables in the dtypes of the old ones."""
    forms = [(jax.tree.structure(x), [*map(jnp.shape, jax.tree.leaves(x))]) for x in (old, new)]
    if forms[0] != forms[1]:
        raise _wrong(f"variables of the form {forms[1]}; it was given {forms[0]}")
    return jax.tree.map(lambda a, b: jnp.asarray(b, getattr(a, "dtype", None)), old, new)


def _wrong(got: str) -> ConfigError:
    return ConfigError(
        f"loss_fn: expected (summed loss, number of label tokens), both scalars, then a mapping of "
        f"summed metrics and, where the state has variables, the new ones; got {got}. A mean is "
        "returned as (mean * count, count)."
    )
