"""Counts the collectives of a program: of a traced one for the plan, of a compiled one to check it.

Counts in loops are multiplied by trip counts, and called computations are followed. A collective
that XLA combined counts once per tensor. Bytes are those of the full tensor: the output of an
all-gather, the input of a reduce-scatter, the operand of an all-reduce.

[Note: traced collectives]
Whether the backward of a block gathers an array again depends on what its gradients are computed
from: not from a bias that is added, but from one that is multiplied. No name says this. The traced
step does, after everything that its results do not need is removed. It also contains the
collectives that the loss function calls itself, such as BatchNorm's means.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

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


# Primitives of jax -> the collective that XLA compiles them to
_PRIMITIVES = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_to_all": EXCHANGE}
_PRIMITIVES |= {"psum": REDUCE, "pmax": REDUCE, "pmin": REDUCE, "ppermute": "collective-permute"}


def traced_collectives(program: Any, *, on_cpu: bool) -> dict[str, Collectives]:
    """Returns the collectives of a jaxpr that its results need; see [Note: traced collectives].

    Args:
        program: The jaxpr.
        on_cpu: Whether XLA compiles it for CPUs, where it widens what is sent in bfloat16.
    """
    found: dict[str, Collectives] = {}
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
        for param in params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _moved(inner, turns, {**sizes, **more})


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
