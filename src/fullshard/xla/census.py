"""Counts the collectives of a compiled program, to check the plan.

Counts in loops are multiplied by trip counts, and called computations are followed. A collective
that XLA combined counts once per tensor. Bytes are those of the full tensor: the output of an
all-gather, the input of a reduce-scatter, the operand of an all-reduce.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

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
