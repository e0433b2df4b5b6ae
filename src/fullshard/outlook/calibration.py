"""What a machine reaches, as `fullshard bench calibrate` measured it: tables, and how to read them.

[Note: between measured sizes]
A table has the seconds of operations on a grid of sizes. What an element of work costs is a smooth
function of the logarithms of the sizes: it is interpolated there, a line on every axis.

    seconds / work
        |  *
        |     *                 below the grid: as long as at its edge, which is all latency
        |         *    *    *   above it: in proportion to the work
        +-----------------------  log size
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import exp, isfinite, log, prod
from pathlib import Path
from typing import Any, cast

from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.config.regular_files import read_regular
from fullshard.planner.tracing import ROWS, VIEW, Operation

SCHEMA_VERSION = 1
FILE_NAME = "calibration.json"
AGAIN = "Measure it again with fullshard bench calibrate"

Point = tuple[tuple[int, ...], float]


@dataclass(frozen=True)
class Table:
    """Seconds by size. See [Note: between measured sizes].

    Attributes:
        points: Sizes on a whole grid, with their seconds.
    """

    points: tuple[Point, ...]

    @cached_property
    def _axes(self) -> list[list[int]]:
        sizes = [size for size, _ in self.points]
        return [sorted(set(axis)) for axis in zip(*sizes, strict=True)]

    @cached_property
    def _costs(self) -> dict[tuple[int, ...], float]:
        """Logarithms of seconds by work."""
        return {size: log(seconds / prod(size)) for size, seconds in self.points}

    @property
    def is_whole(self) -> bool:
        """Whether every combination of sizes is there, once."""
        return len(self._costs) == len(self.points) == prod(map(len, self._axes))

    def seconds(self, size: Sequence[int]) -> float:
        """Of a size; see the note for what lies outside."""
        inside = [max(value, axis[0]) for value, axis in zip(size, self._axes, strict=True)]
        places = [_place(axis, value) for value, axis in zip(inside, self._axes, strict=True)]
        cost = 0.0
        for corner in product(*places):
            weight = prod(share for _, share in corner)
            if weight:
                cost += weight * self._costs[tuple(value for value, _ in corner)]
        return prod(inside) * exp(cost)


def _place(axis: list[int], value: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """The axis' values around a value, each with its weight."""
    value = min(value, axis[-1])
    above = min(bisect_right(axis, value), len(axis) - 1)
    low, high = axis[max(0, above - 1)], axis[above]
    share = 0.0 if high == low else (log(value) - log(low)) / (log(high) - log(low))
    return (low, 1 - share), (high, share)


@dataclass(frozen=True, slots=True)
class Host:
    """What a rank's Python takes beside kernels, in seconds.

    Attributes:
        forward_s: More for an operation of a model's forward than when it runs alone.
        backward_s: For one of backward.
        unit_s: For a unit's turn, forward or backward.
        step_s: For a step.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    unit_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Ceilings:
    """What a rank reaches where so many of one host work at once.

    Attributes:
        num_ranks: Number of ranks of the host.
        operations: By kind and dtype.
        transfers: By transport and what it does: seconds by bytes of a whole buffer; with `cpu`
            at the end, of processors.
        host: What the host takes beside kernels, for one rank.
    """

    num_ranks: int
    operations: Mapping[str, Table]
    transfers: Mapping[str, Table]
    host: Host

    def seconds(self, operation: Operation) -> float:
        """Of one operation, beside what the host takes for it."""
        if operation.kind == VIEW:
            return 0.0
        table = self._table(operation)
        return operation.times * table.seconds(operation.size) if table is not None else 0.0

    def _table(self, operation: Operation) -> Table | None:
        """The operation's own; else of its like, in float32, of what copies."""
        kind = operation.kind
        like = [kind, kind.removesuffix(f" {ROWS}"), "add"]
        names = [f"{one} {dtype}" for one in like for dtype in (operation.dtype, "float32")]
        of_size = (self.operations.get(name) for name in names)
        return next((t for t in of_size if t and len(t.points[0][0]) == len(operation.size)), None)

    def transfer_s(self, name: str, num_bytes: int) -> float:
        """Of `direct fetch` and the like; 0 where it was not measured, since there are no peers."""
        table = self.transfers.get(name)
        return table.seconds((num_bytes,)) if table is not None else 0.0


@dataclass(frozen=True)
class Calibration:
    """A machine.

    Attributes:
        machine: What it is, as `describe_machine` says.
        cores: Number of its cores.
        hosts: What was measured, by the number of ranks.
    """

    machine: Mapping[str, object]
    hosts: Mapping[int, Ceilings]

    @property
    def cores(self) -> int:
        cores = self.machine.get("cores")
        return cores if isinstance(cores, int) else 1

    def of(self, num_ranks: int) -> Ceilings | None:
        """Of so many ranks on the host; None where they were not measured."""
        return self.hosts.get(num_ranks)


# ---- the file ------------------------------------------------------------------------------------


def to_json(calibration: Calibration, about: Mapping[str, object]) -> str:
    """A calibration as text, a table a line.

    Args:
        calibration: What to write.
        about: More that a reader wants to know: versions, the command.
    """
    lines: list[str] = []
    for num_ranks, found in sorted(calibration.hosts.items()):
        tables = {
            **{f"operations {name}": t for name, t in found.operations.items()},
            **{f"transfers {name}": t for name, t in found.transfers.items()},
        }
        host = {name: _short(getattr(found.host, name)) for name in Host.__slots__}
        head = f'  "{num_ranks}": {{\n   "host": {json.dumps(host)},\n   "tables": {{\n'
        rows = [f"    {json.dumps(name)}: {_points(t)}" for name, t in sorted(tables.items())]
        lines.append(head + ",\n".join(rows) + "\n   }\n  }")
    top = {"schema_version": SCHEMA_VERSION, "machine": dict(calibration.machine), **about}
    said = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in top.items()]
    return "{\n" + ",\n".join(said) + ',\n "ranks": {\n' + ",\n".join(lines) + "\n }\n}\n"


def _points(table: Table) -> str:
    return json.dumps([[list(size), _short(seconds)] for size, seconds in table.points])


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def read_calibration(path: Path) -> Calibration:
    """What `to_json` wrote.

    Raises:
        ConfigError: The file is not there, is none, of another version, or has a value that is no
            measurement.
    """
    try:
        return _calibration(json.loads(read_regular(path)))
    except OSError as error:
        got = error.strerror or str(error)
        found = _wrong("", "a file of fullshard bench calibrate", got)
    except ConfigProblems as error:
        found = error
    except ValueError:
        found = _wrong("", "JSON", "something else")
    raise found.map(lambda one: replace(one, advice=f"{AGAIN}.", place=str(path)))


def _calibration(values: object) -> Calibration:
    top = _mapping("", values)
    version = top.get("schema_version")
    if version != SCHEMA_VERSION:
        raise _wrong("schema_version", str(SCHEMA_VERSION), show(version))
    machine = _mapping("machine", top.get("machine"))
    hosts: dict[int, Ceilings] = {}
    for written, value in _mapping("ranks", top.get("ranks")).items():
        key = f"ranks.{written}"
        if not str(written).isdecimal() or int(written) < 1:
            raise _wrong(key, "a number of ranks", show(written))
        hosts[int(written)] = _ceilings(key, int(written), _mapping(key, value))
    return Calibration(machine, hosts)


def _ceilings(key: str, num_ranks: int, values: Mapping[str, Any]) -> Ceilings:
    host = _mapping(f"{key}.host", values.get("host"))
    seconds = {
        name: _number(f"{key}.host.{name}", host.get(name), lambda value: value >= 0)
        for name in Host.__slots__
    }
    kinds: dict[str, dict[str, Table]] = {"operations": {}, "transfers": {}}
    for name, points in _mapping(f"{key}.tables", values.get("tables")).items():
        kind, _, rest = str(name).partition(" ")
        where = f"{key}.tables.{name}"
        if kind not in kinds:
            raise _wrong(where, "operations or transfers first", show(kind))
        kinds[kind][rest] = _table(where, points)
    return Ceilings(num_ranks, kinds["operations"], kinds["transfers"], Host(**seconds))


def _table(key: str, points: object) -> Table:
    given = cast("list[Any]", points if isinstance(points, list) else [])
    if not given:
        raise _wrong(key, "a list of [size, seconds]", "nothing of the kind")
    found: list[Point] = []
    for point in given:
        match point:
            case [[*size], seconds] if size and all(type(n) is int and n > 0 for n in size):
                found.append((tuple(size), _number(key, seconds, lambda value: value > 0)))
            case _:
                raise _wrong(key, "a list of [size, seconds]", show(point))
    table = Table(tuple(found))
    if len({len(size) for size, _ in found}) > 1 or not table.is_whole:
        raise _wrong(key, "every combination of its sizes, once", f"{len(found)} points")
    return table


def _mapping(key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(key, "a mapping", show(value))
    return cast("dict[str, Any]", value)


def _number(key: str, value: object, fits: Callable[[float], bool]) -> float:
    if not isinstance(value, int | float) or not isfinite(value) or not fits(value):
        raise _wrong(key, "seconds", show(value))
    return float(value)


def _wrong(key: str, expected: str, got: str) -> ConfigProblems:
    return ConfigProblems([Problem(key, expected, got)])
