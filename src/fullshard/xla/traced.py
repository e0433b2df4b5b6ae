"""Read programs that jax has traced or compiled: their collectives, and their use of shards.

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

[Note: counted collectives]
`census` counts the collectives of a compiled program, to check the plan. Counts in loops are
multiplied by trip counts, and called computations are followed. A collective that XLA combined
counts once per tensor. Bytes are those of the full tensor: the output of an all-gather, the input
of a reduce-scatter, the operand of an all-reduce.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr

from fullshard.errors import ConfigError
from fullshard.planner.arrays import GATHER, REDUCE, SCATTER, Collectives

EXCHANGE = "all-to-all"
KINDS = (GATHER, SCATTER, REDUCE, EXCHANGE, "collective-permute", "collective-broadcast")
_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_ITEMSIZE |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$")
_OP = re.compile(r"= (?P<result>\(.*?\)|\S+) (?P<op>[a-z\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


# ---- compiled programs


def census(compiled: Any, *, num_trips: int | None = None) -> dict[str, Collectives]:
    """Returns the count and bytes of each kind of collective in a program.

    Args:
        compiled: The result of `.compile()` of a lowered jax function, or its HLO text.
        num_trips: Trip count for loops whose HLO does not contain it (on TPUs).

    Raises:
        ConfigError: A loop with collectives has no trip count.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    computations, entry = _computations(text)
    found: dict[str, Collectives] = defaultdict(Collectives)

    def walk(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            match = _OP.search(line)
            if match is None:
                continue
            op = match["op"].removesuffix("-start")
            if op in KINDS:
                sizes = _sizes(op, match, line)
                kind = found[op]
                count, moved = len(sizes) * times, sum(sizes) * times
                found[op] = Collectives(kind.count + count, kind.num_bytes + moved)
            elif op == "while":
                walk(_one_of(line, "body"), times * _trips(line, num_trips, computations))
            elif op in ("call", "fusion", "conditional", "async"):
                for names in _CALLED.findall(line):
                    for called in names.split(","):
                        walk(called.strip().removeprefix("%"), times)

    walk(entry, 1)
    return {kind: found[kind] for kind in KINDS if kind in found}


def group_size(line: str) -> int:
    """Number of devices in a collective's group, from any of HLO's three notations."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]+)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    raise ConfigError(f"census: expected replica groups in a known form; got {line.strip()[:200]}.")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            found[name] = []
        elif name:
            found[name].append(line)
    return found, entry


def _sizes(op: str, match: re.Match[str], line: str) -> list[int]:
    """Bytes of each tensor in a collective."""
    shapes = _SHAPE.findall(match["result"])
    if match["op"].endswith("-start") and op != REDUCE:  # (operands, results)
        shapes = shapes[len(shapes) // 2 :]
    parts = group_size(line) if op == SCATTER else 1
    if op == EXCHANGE and match["result"].startswith("("):  # a part of one tensor for each device
        parts, shapes = len(shapes), shapes[:1]
    return [
        parts * math.prod(int(size) for size in sizes.split(",") if size) * _ITEMSIZE[dtype]
        for dtype, sizes in shapes
    ]


def _trips(line: str, given: int | None, computations: dict[str, list[str]]) -> int:
    if match := _TRIPS.search(line):
        return int(match[1])
    body = _one_of(line, "body")
    if given is None and any(f" {kind}" in text for text in computations[body] for kind in KINDS):
        raise ConfigError(
            f"census: expected the trip count of loop {body}; the program does not say it. "
            "Give it as num_trips."
        )
    return given or 1


def _one_of(line: str, key: str) -> str:
    match = re.search(rf"{key}=%([\w.\-]+)", line)
    assert match is not None, line
    return match[1]


# ---- traced programs

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
