"""The measured speed of a machine: tables that `fullshard bench calibrate` writes.

[Note: between measured sizes]
A table has the seconds of operations on a grid of sizes. The cost per element of work is a smooth
function of the logarithms of the sizes, so it is interpolated linearly between them.

    seconds / work
        |  *
        |     *                 below the grid: the time at its edge, which is all latency
        |         *    *    *   above it: in proportion to the work
        +-----------------------  log size
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import exp, log, prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from fullshard.config.regular_files import read_regular
from fullshard.errors import ConfigProblems, Problem, show
from fullshard.planner.text import format_json
from fullshard.planner.tracing import ROWS, VIEW, Operation

SCHEMA_VERSION = 1
FILE_NAME = "calibration.json"
AGAIN = "Measure it again with fullshard bench calibrate."
TABLE_WIDTH = 4000  # characters: a table fits on one line of the file

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Point = tuple[tuple[PositiveInt, ...], Annotated[float, Field(gt=0, allow_inf_nan=False)]]


@dataclass(frozen=True)
class Table:
    """Seconds by size. See [Note: between measured sizes].

    Attributes:
        points: Sizes on a complete grid, with their seconds.
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
        """Whether the points are a complete grid: every combination of its sizes, once."""
        if len({len(size) for size, _ in self.points}) != 1:
            return False
        return len(self._costs) == len(self.points) == prod(map(len, self._axes))

    def seconds(self, size: Sequence[int]) -> float:
        """Seconds of an operation of a size; the note covers sizes outside of the grid."""
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
class HostOverhead:
    """Overhead of a rank's Python in addition to its kernels, in seconds.

    Attributes:
        forward_s: Per operation of a forward, beyond its own time.
        backward_s: Per operation of a backward.
        unit_s: Per unit and pass, forward or backward.
        step_s: Per step.
    """

    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    unit_s: Seconds = 0.0
    step_s: Seconds = 0.0


@dataclass(frozen=True)
class Ceilings:
    """Speed of a rank while `num_ranks` ranks of one host work at once.

    Attributes:
        num_ranks: Number of ranks on the host.
        operations: Tables by kind and dtype, as in `add float32`.
        transfers: Tables by transport and action, as in `direct fetch`: seconds by bytes of a whole
            buffer. Names that end in ` cpu` have processor seconds.
        host: Overhead of one rank's Python.
    """

    num_ranks: int
    operations: Mapping[str, Table]
    transfers: Mapping[str, Table]
    host: HostOverhead

    def seconds(self, operation: Operation) -> float:
        """Seconds of one operation, without the host's overhead."""
        if operation.kind == VIEW:
            return 0.0
        table = self._table(operation)
        return operation.times * table.seconds(operation.size) if table is not None else 0.0

    def _table(self, operation: Operation) -> Table | None:
        """The operation's table; else that of its kind in float32; else that of a sum."""
        kind = operation.kind
        like = [kind, kind.removesuffix(f" {ROWS}"), "add"]
        names = [f"{one} {dtype}" for one in like for dtype in (operation.dtype, "float32")]
        of_size = (self.operations.get(name) for name in names)
        return next((t for t in of_size if t and len(t.points[0][0]) == len(operation.size)), None)

    def transfer_s(self, name: str, num_bytes: int) -> float:
        """Seconds of `direct fetch` and the like; 0 for one rank, which has no peers."""
        table = self.transfers.get(name)
        return table.seconds((num_bytes,)) if table is not None else 0.0


@dataclass(frozen=True)
class Calibration:
    """All measurements of one machine.

    Attributes:
        machine: Description of the machine, made by `describe_machine`.
        hosts: Measurements by number of ranks.
    """

    machine: Mapping[str, object]
    hosts: Mapping[int, Ceilings]

    @property
    def cores(self) -> int:
        """Number of cores of the machine."""
        cores = self.machine.get("cores")
        return cores if isinstance(cores, int) else 1

    def of(self, num_ranks: int) -> Ceilings | None:
        """Measurements with a number of ranks; None if there are none."""
        return self.hosts.get(num_ranks)


# ---- the file ------------------------------------------------------------------------------------


_TableName = Annotated[str, Field(pattern="^(operations|transfers) ")]


@dataclass
class _Ranks:
    """The part of a file that was measured with one number of ranks."""

    host: HostOverhead
    tables: dict[_TableName, Annotated[list[Point], Field(min_length=1)]]


@dataclass
class _CalibrationFile:
    """The members of a calibration file that are read."""

    schema_version: Literal[1]
    machine: dict[str, object]
    ranks: dict[PositiveInt, _Ranks]


def to_json(calibration: Calibration, about: Mapping[str, object]) -> str:
    """Returns the text of a calibration file, one table per line.

    Args:
        calibration: Calibration to write.
        about: Further members for readers: versions, the command.
    """
    ranks = {
        str(num_ranks): {
            "host": {name: _short(getattr(found.host, name)) for name in HostOverhead.__slots__},
            "tables": {
                f"{kind} {name}": [[list(size), _short(seconds)] for size, seconds in table.points]
                for kind in ("operations", "transfers")
                for name, table in sorted(getattr(found, kind).items())
            },
        }
        for num_ranks, found in sorted(calibration.hosts.items())
    }
    top = {"schema_version": SCHEMA_VERSION, "machine": dict(calibration.machine), **about}
    return format_json({**top, "ranks": ranks}, width=TABLE_WIDTH) + "\n"


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def read_calibration(path: Path) -> Calibration:
    """Reads a file that `to_json` made.

    Raises:
        ConfigError: The file cannot be read, has another version, or has a wrong value.
    """
    try:
        values = TypeAdapter(_CalibrationFile).validate_json(read_regular(path))
    except OSError as error:
        got = error.strerror or str(error)
        problem = Problem("", "a file of fullshard bench calibrate", got, AGAIN, str(path))
        raise ConfigProblems([problem]) from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        message, got = wrong["msg"], show(wrong["input"])
        expected = message.removeprefix("Input should be ")
        if expected == message:  # a missing key, text that is not JSON
            expected, got = "", message[0].lower() + message[1:]
        raise ConfigProblems([Problem(key, expected, got, AGAIN, str(path))]) from error
    hosts: dict[int, Ceilings] = {}
    for num_ranks, found in values.ranks.items():
        kinds: dict[str, dict[str, Table]] = {"operations": {}, "transfers": {}}
        for name, points in found.tables.items():
            kind, _, rest = name.partition(" ")
            table = kinds[kind][rest] = Table(tuple(points))
            if not table.is_whole:
                key, expected = f"ranks.{num_ranks}.tables.{name}", "a complete grid of sizes"
                problem = Problem(key, expected, f"{len(points)} points", AGAIN, str(path))
                raise ConfigProblems([problem])
        tables = kinds["operations"], kinds["transfers"]
        hosts[num_ranks] = Ceilings(num_ranks, *tables, found.host)
    return Calibration(values.machine, hosts)
