"""ZeRO-3 as jax users write it: sharded arrays, constrained activations, XLA does the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.planner.arrays import ArrayPlan
from fullshard.xla.decoder import DecoderConfig, head_of, hidden_of, token_loss
from fullshard.xla.opt_state import opt_shardings
from fullshard.xla.plan import SHARD, Tree, XlaPlan
from fullshard.xla.step import State


def auto_step(
    decoder: DecoderConfig, placed: XlaPlan, tx: optax.GradientTransformation, learning_rate: float
) -> Callable[[State, Any], tuple[State, dict[str, Any]]]:
    """Returns a jitted step, (state, batch) -> (state, metrics), without a plan.

    Args:
        decoder: The model.
        placed: Sharding of its arrays, and whether backward gathers blocks again; XLA alone
            issues the collectives.
        tx: The optimizer.
        learning_rate: Learning rate of every step.
    """
    tx = optax.with_extra_args_support(tx)
    samples = NamedSharding(placed.mesh, PartitionSpec(SHARD))
    pin = partial(lax.with_sharding_constraint, shardings=samples)
    arrays = placed.under("model.layers")

    def scan(block: Any, x: jax.Array, stacked: Tree) -> jax.Array:
        structure = jax.tree.structure(stacked)

        def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
            leaves = zip(arrays, jax.tree.leaves(layer), strict=True)
            met = [whole(placed, array, leaf) for array, leaf in leaves]
            return pin(block(jax.tree.unflatten(structure, met), x)), None

        turn = jax.checkpoint(body, policy=_all_but_gathered) if placed.table.reshards else body
        return lax.scan(turn, pin(x), stacked)[0]

    def loss(params: Tree, batch: Any) -> jax.Array:
        met = placed.with_arrays(
            lambda a, leaf: leaf if a.block else whole(placed, a, leaf), params
        )
        hidden = hidden_of(decoder, placed, met, batch, scan)
        logits = pin(hidden @ head_of(decoder, met).T)[:, :-1]
        total, count = token_loss(logits, batch["labels"][:, 1:])
        return total / count

    def run(state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        grads = lax.with_sharding_constraint(grads, placed.shardings)
        rate = jnp.asarray(learning_rate, jnp.float32)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, learning_rate=rate)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1, placed), {"loss": value}

    lies = State(placed.shardings, opt_shardings(placed, tx), placed.replicated, placed)
    return jax.jit(run, donate_argnums=0, out_shardings=(lies, placed.replicated))


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Saves all results for backward except gathered arrays, reshapes, copies and casts."""
    name = primitive.name
    return not name.startswith("custom_vjp") and name not in (
        *("sharding_constraint", "reshape", "slice", "squeeze", "transpose", "copy"),
        *("broadcast_in_dim", "convert_element_type"),
    )


def whole(placed: XlaPlan, array: ArrayPlan, leaf: jax.Array) -> jax.Array:
    """Gathers the array; its gradient is sharded like the array, which jax would not derive."""
    axes = tuple(placed.sharding(array).spec)[bool(array.block) :]
    cut = NamedSharding(placed.mesh, PartitionSpec(*axes))
    gathered = jax.custom_vjp(partial(lax.with_sharding_constraint, shardings=placed.replicated))
    gathered.defvjp(
        lambda x: (lax.with_sharding_constraint(x, placed.replicated), None),
        lambda _, grad: (lax.with_sharding_constraint(grad, cut),),
    )
    return gathered(leaf)
