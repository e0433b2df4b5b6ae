"""Maps the leaves of an optimizer's state to parameters.

A leaf belongs to a parameter if its path ends with the parameter's path and the shapes are equal,
inside any chain, mask or partition. It is sharded and padded like the parameter. All other leaves
(counts, keys, rates, factors) are replicated. The optimizer sees no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars, isfunction, ismethod
from typing import Any

import jax
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from fullshard.config.schema import TrainingConfig
from fullshard.config.values import Optimizer
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArrayPlan
from fullshard.xla.plan import Tree, XlaPlan, own_shape, pad, path_name, unpad


@dataclass(frozen=True)
class Leaf:
    """An array of an optimizer's state.

    Attributes:
        name: Path in the state, without the parameter's path.
        at: Index of the parameter that the leaf belongs to, or None.
        value: The array or its shape.
    """

    name: str
    at: int | None
    value: Any


def leaves_of(plan: XlaPlan, opt_state: Tree) -> list[Leaf]:
    """Returns the leaves in tree order, with or without padding."""
    arrays, known = plan.table.arrays, plan.index_of_path

    def leaf_of(path: tuple[Any, ...], value: Any) -> Leaf:
        for start in range(len(path) + 1):
            at = known.get(path[start:])
            if at is not None and value.shape in (own_shape(arrays[at]), arrays[at].stored_shape):
                return Leaf(path_name(path[:start]), at, value)
        return Leaf(path_name(path), None, value)

    return [leaf_of(path, value) for path, value in jax.tree.leaves_with_path(opt_state)]


def map_state(
    plan: XlaPlan, function: Callable[[ArrayPlan | None, Any], Any], opt_state: Tree
) -> Tree:
    """Maps a function of (plan of the leaf's parameter, leaf) over the state's tree."""
    arrays = plan.table.arrays
    found = [
        function(None if leaf.at is None else arrays[leaf.at], leaf.value)
        for leaf in leaves_of(plan, opt_state)
    ]
    return jax.tree.unflatten(jax.tree.structure(opt_state), found)


def trained(plan: XlaPlan, tree: Tree) -> Tree:
    """Returns the tree with None in place of frozen arrays."""
    return plan.with_arrays(lambda array, leaf: leaf if array.trainable else None, tree)


def merged(plan: XlaPlan, params: Tree, mine: Tree) -> Tree:
    """Returns the parameters with the trained arrays replaced."""
    changed = iter(jax.tree.leaves(mine))
    return plan.with_arrays(lambda array, leaf: next(changed) if array.trainable else leaf, params)


def abstract_opt_state(plan: XlaPlan, tx: optax.GradientTransformation) -> Tree:
    """Returns the shapes and shardings of the stored optimizer state."""
    own = plan.map(lambda a: jax.ShapeDtypeStruct(own_shape(a), str(a.dtypes.master)))

    def kept(array: ArrayPlan | None, leaf: Any) -> jax.ShapeDtypeStruct:
        if array is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.replicated)
        return jax.ShapeDtypeStruct(array.stored_shape, leaf.dtype, sharding=plan.sharding(array))

    return map_state(plan, kept, jax.eval_shape(tx.init, trained(plan, own)))


def rules_of(tx: optax.GradientTransformation) -> tuple[str, ...]:
    """Returns the update rules of optax in a transformation, such as `scale_by_adam`.

    Several rules name their states as Adam does. Only the functions that `tx` is made of tell them
    apart; a rule that is not optax's own has no name here.
    """
    rules, seen = set[str](), list[Any]()
    queue: list[Any] = [tx.init, tx.update]
    while queue:
        item = queue.pop()
        if any(item is other for other in seen):
            continue
        seen.append(item)
        match item:
            case partial():
                queue += [item.func, item.args, item.keywords]
            case dict():
                queue += item.values()
            case tuple() | list():
                queue += item
            case _ if ismethod(item):
                queue += [item.__func__, vars(item.__self__)]
            case _ if isfunction(item):
                bound = dict(getclosurevars(item).nonlocals)
                if {"inner_factory", "numeric_hps"} <= bound.keys():  # of inject_hyperparams
                    numbers = bound["numeric_hps"] | dict.fromkeys(bound["sched_hps"], 0.5)
                    bound["inner"] = bound["inner_factory"](**bound["other_hps"], **numbers)
                queue += bound.values()
                name = item.__qualname__.partition(".")[0] * item.__module__.startswith("optax.")
                rules.add(f"nesterov {name}" if bound.get("nesterov") is True else name)
    return tuple(
        sorted(rule for rule in rules if "scale_by_" in rule and rule != "scale_by_schedule")
    )


def opt_shardings(plan: XlaPlan, tx: optax.GradientTransformation) -> Tree:
    """Shardings of an optimizer's state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_opt_state(plan, tx))


def fresh(plan: XlaPlan, tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Returns the initial state of an optimizer."""

    def make(params: Tree) -> Tree:
        return map_state(plan, pad, tx.init(trained(plan, plan.with_arrays(unpad, params))))

    return jax.jit(make, out_shardings=opt_shardings(plan, tx))(params)


def updated(
    plan: XlaPlan,
    tx: optax.GradientTransformationExtraArgs,
    grads: Tree,
    before: tuple[Tree, Tree],
    loss: jax.Array,
    extra: dict[str, jax.Array],
) -> tuple[Tree, Tree]:
    """Returns parameters and optimizer state after one update.

    Args:
        plan: Plan of the parameters.
        tx: The optimizer.
        grads: Gradients of trained parameters.
        before: Parameters and state before the update.
        loss: The step's loss, which optax names `value`.
        extra: Scalars for the optimizer, such as learning_rate.

    Raises:
        ConfigError: The optimizer does not use a scalar of that name, or needs something else.
    """
    params, opt_state = before

    def each(function: Callable[[ArrayPlan, Any], Any], tree: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(function, plan.trained_arrays, leaves)))

    mine, grads = each(unpad, trained(plan, params)), each(unpad, grads)
    state = map_state(plan, unpad, opt_state)

    def update(extra: dict[str, jax.Array]) -> tuple[Tree, Tree]:
        given = grads, _with_hyperparams(state, extra), mine
        try:
            try:
                found = tx.update(*given, **{"value": loss, **extra})
            except TypeError as error:
                if "unexpected keyword argument 'value'" not in str(error):
                    raise
                found = tx.update(*given, **extra)  # optax.contrib.sam does not accept a value
            if jax.tree.structure(found[1]) != jax.tree.structure(state):  # optax.monitor
                raise TypeError("the structure of the state has changed")
            return found
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "tx: expected an optimizer that updates from gradients, parameters, the loss (its "
                f"`value`) and the step's scalars; its update says: {error}. Choose another, pass "
                "a missing scalar as step(..., name=value), or remove one that it does not accept."
            ) from error

    _check_read(update, extra)
    updates, state = update(extra)
    changed = each(pad, optax.apply_updates(mine, updates))
    return merged(plan, params, changed), map_state(plan, pad, state)


def _with_hyperparams(opt_state: Tree, extra: dict[str, jax.Array]) -> Tree:
    """Replaces hyperparameters in the state of `optax.inject_hyperparams`."""

    def is_injected(node: Any) -> bool:
        return isinstance(getattr(node, "hyperparams", None), dict)

    def replace_in(node: Any) -> Any:
        if not is_injected(node):
            return node
        replaced = {n: extra[n].astype(v.dtype) for n, v in node.hyperparams.items() if n in extra}
        return node._replace(hyperparams=node.hyperparams | replaced)

    return jax.tree.map(replace_in, opt_state, is_leaf=is_injected)


def _check_read(update: Callable[[Any], Any], extra: dict[str, jax.Array]) -> None:
    if not extra:
        return
    program = jax.make_jaxpr(update)(extra).jaxpr
    _, read = dce_jaxpr(program, [True] * len(program.outvars))
    for name, is_read in zip(sorted(extra), read, strict=True):
        if not is_read:
            raise ConfigError(
                f"{name}: expected a number that the optimizer reads; this one does not read it. "
                f"Make it with optax.inject_hyperparams(...)({name}=...), or leave {name} out."
            )


def of_run(training: TrainingConfig, weight_decay: Tree) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run, as `build_optimizer` makes it of torch: AdamW, or plain SGD.

    Its update receives `learning_rate`.

    Args:
        training: Kind of the optimizer and its numbers.
        weight_decay: One coefficient per parameter.
    """
    if training.optim is Optimizer.SGD:
        return _rated(optax.identity(), weight_decay)
    return adamw((training.adam_beta1, training.adam_beta2), training.adam_epsilon, weight_decay)


def adamw(
    betas: tuple[float, float], epsilon: float, weight_decay: Tree
) -> optax.GradientTransformationExtraArgs:
    """AdamW with decoupled weight decay; arguments as for `of_run`."""
    return _rated(optax.scale_by_adam(*betas, epsilon), weight_decay)


def _rated(
    inner: optax.GradientTransformation, weight_decay: Tree
) -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params)
        updates = jax.tree.map(lambda u, p, d: u + d * p, updates, params, weight_decay)
        rate = extra["learning_rate"]
        return jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
