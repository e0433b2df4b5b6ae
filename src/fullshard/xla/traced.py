"""Read programs that jax has traced: their collectives, and their use of shards.

[Note: traced collectives]
Whether the backward of a block gathers an array again depends on what its gradients are computed
from: not from a bias that is added, but from one that is multiplied. The names do not show this.
The traced step does, after everything that its results do not need is removed. It also contains the
collectives that the loss function calls itself, such as BatchNorm's means.

[Note: shards of blocks]
A loss function receives shards of stacked arrays, which `scan_blocks` and `gather` make whole. A
shard that it combines itself, such as a norm over all parameters, would count one device's part,
and no other device would receive its gradient. A shard may therefore be moved, or changed element
by element, on its way to a gather, and nothing else.

[Note: sums over samples]
`vmap` turns the sum of BatchNorm over samples and devices into one `psum` over a dimension of the
array and over mesh axes. Its gradient in jax is broadcast over the samples before it is summed over
the devices: one row per sample is sent. As two sums, first over the dimension and then over the
devices, both directions send one row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr

from fullshard.planner.arrays import GATHER, REDUCE, SCATTER, Collectives
from fullshard.xla.census import EXCHANGE

# Primitives of jax -> the collective that XLA compiles them to
_PRIMITIVES = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_to_all": EXCHANGE}
_PRIMITIVES |= {"psum": REDUCE, "pmax": REDUCE, "pmin": REDUCE, "ppermute": "collective-permute"}


def traced_collectives(
    program: Any, others: Mapping[str, Collectives] | None = None, *, on_cpu: bool
) -> dict[str, Collectives]:
    """Returns the collectives of a jaxpr that its results need; see [Note: traced collectives].

    Args:
        program: The jaxpr.
        others: Further collectives, which are added.
        on_cpu: Whether XLA compiles it for CPUs, where it widens what is sent in bfloat16.
    """
    found = dict(others or {})
    needed, _ = dce_jaxpr(program, [True] * len(program.outvars))
    for kind, times, aval in _moved(needed, 1, {}):
        itemsize = 4 if on_cpu and aval.dtype == "bfloat16" else aval.dtype.itemsize
        found[kind] = found.get(kind, Collectives()).plus(times, aval.size * itemsize)
    return found


def _moved(program: Any, times: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, int, Any]]:
    """(kind, number, shape and dtype of the full tensor) of a program that runs `times` times."""
    for step in program.eqns:
        name, params = step.primitive.name, step.params
        kind = _PRIMITIVES.get(name)
        if kind is not None:
            axes = params.get("axes", params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else axes
            if math.prod(sizes.get(axis, 1) for axis in axes) > 1:
                # not the inputs of a sum, which `vmap` may sum along an axis of the array first
                for var in step.invars if kind == SCATTER else step.outvars:
                    yield kind, times, var.aval
            continue
        more = dict(params["mesh"].shape) if name == "shard_map" else {}
        turns = times * (params["length"] if name == "scan" else 1)
        for inner in within(step):
            yield from _moved(inner, turns, {**sizes, **more})


def within(step: Any) -> Iterator[Any]:
    """The programs that a step of a program calls."""
    for param in step.params.values():
        for inner in param if isinstance(param, tuple | list) else (param,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def with_split_sums(program: Any) -> Any:
    """Splits sums over dimensions and mesh axes; see [Note: sums over samples].

    Returns:
        The jaxpr; the given one if it has no such sum.
    """
    steps = [part for step in program.eqns for part in _split(step)]
    unchanged = len(steps) == len(program.eqns) and all(map(operator.is_, steps, program.eqns))
    return program if unchanged else program.replace(eqns=steps)


def _split(step: Any) -> list[Any]:
    axes = step.params.get("axes", ())
    dims = tuple(axis for axis in axes if isinstance(axis, int))
    if step.primitive.name == "psum" and 0 < len(dims) < len(axes) and len(step.invars) == 1:
        inner = jax.make_jaxpr(partial(lax.reduce_sum, axes=dims))(step.invars[0].aval).jaxpr
        (first,), names = inner.eqns, tuple(axis for axis in axes if axis not in dims)
        second = step.replace(invars=first.outvars, params={**step.params, "axes": names})
        return [first.replace(invars=step.invars), second]
    params = {name: _split_param(value) for name, value in step.params.items()}
    changed = any(value is not step.params[name] for name, value in params.items())
    return [step.replace(params=params) if changed else step]


def _split_param(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = tuple(map(_split_param, value))
        return parts if any(map(operator.is_not, parts, value)) else value
    program = getattr(value, "jaxpr", value)
    if not hasattr(program, "eqns"):
        return value
    split = with_split_sums(program)
    if split is program:
        return value
    return split if program is value else value.replace(jaxpr=split)


# Primitives that move elements without computing with them
MOVES = (
    *("reshape", "slice", "dynamic_slice", "split", "pad", "transpose", "squeeze"),
    *("expand_dims", "broadcast_in_dim", "copy", "convert_element_type", "concatenate"),
    *("bitcast_convert_type", "stack"),
)
# Primitives that combine elements although their operands and results may have one shape
_COMBINE = (
    *("dot_general", "conv_general_dilated", "sort", "cumsum", "cumprod", "cummax", "cummin"),
    *("cumlogsumexp", "cholesky", "triangular_solve", *_PRIMITIVES),
)


def is_elementwise(step: Any) -> bool:
    """Whether each element of the results is computed from one element of each operand."""
    shapes = {var.aval.shape for var in step.outvars}
    if step.primitive.name in _COMBINE or len(shapes) != 1:
        return False
    (out,) = shapes
    given = {var.aval.shape for var in step.invars} - {()}
    return all(
        len(one) == len(out) and all(n in (1, m) for n, m in zip(one, out, strict=True))
        for one in given
    )


def is_local(program: Any) -> bool:
    """Whether a program computes element by element, so that shards need no collective."""
    return all(
        all(map(is_local, inner)) if (inner := list(within(step))) else is_elementwise(step)
        for step in program.eqns
    )


_ALSO_MOVES = ("gather", "rev", "dynamic_update_slice", "scatter", "optimization_barrier")


def combined(program: Any, gather: str, sources: Sequence[set[int]], found: set[int]) -> list[Any]:
    """Finds shards that a traced loss combines; see [Note: shards of blocks].

    Args:
        program: The jaxpr.
        gather: Name of the function with a custom gradient that gathers.
        sources: Indices of the shards that each input is made of.
        found: Receives the indices of shards that are combined.

    Returns:
        Indices of the shards that each result is made of.
    """
    known = {id(var): made_of for var, made_of in zip(program.invars, sources, strict=False)}
    for step in program.eqns:
        given = [known.get(id(var), set[int]()) for var in step.invars]
        read, inner = set[int]().union(*given), list(within(step))
        if not read or any(one.debug_info.func_name == gather for one in inner):
            continue
        if inner:  # its inputs are the last of the step's
            outs = _through(step, inner, given, (gather, found))
        elif step.primitive.name in (*MOVES, *_ALSO_MOVES) or is_elementwise(step):
            outs = [read] * len(step.outvars)
        else:
            found |= read
            continue
        known |= {id(var): made_of for var, made_of in zip(step.outvars, outs, strict=False)}
    return [known.get(id(var), ()) for var in program.outvars]


def _through(
    step: Any, inner: Sequence[Any], given: list[set[int]], how: tuple[str, set[int]]
) -> list[set[int]]:
    """The inputs on which the results of a step that calls programs depend."""
    first = step.params.get("num_consts", 0) if step.primitive.name == "scan" else 0
    while True:
        calls = [combined(one, how[0], given[-len(one.invars) :], how[1]) for one in inner]
        outs = [set[int]().union(*one) for one in zip_longest(*calls, fillvalue=())]
        before = [*given]
        for at in range(step.params.get("num_carry", 0) if step.primitive.name == "scan" else 0):
            given[first + at] = given[first + at] | outs[at]  # the next turn's
        if given == before:
            return outs
