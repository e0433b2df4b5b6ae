"""Speed and memory of devices, the names that users give them, and the measured speed of a machine.

[Note: measured matmuls]
`matmul` is the measured speed of a large bf16 matmul. Where it was not measured, it is the usual
share of the peak on devices of that maker. Link speeds are in one direction.

[Note: a machine's GPUs]

    8xH100-80GB    4xA100-40GB    H200    8xH100    8    8x96GB    4xNEWGPU-288GB
    ^ how many     ^ name ^ which variant

[Note: a file of devices]
The table, devices.yaml, and the files of users have this form:

    MI400:                   # the name in --gpus: 8xMI400
      memory_gib: 402        # usable by a framework
      bf16_tflops: 2300      # dense peak
      memory_tb_s: 19.6
      link_gb_s: 300         # to neighbours in the host, one way
      fabric_gb_s: 50        # to other hosts, per device

[Note: between measured sizes]
`fullshard bench calibrate` measures tables of a machine. A table has the seconds of operations on a
grid of sizes. The cost per element of work is a smooth function of the logarithms of the sizes, so
it is interpolated linearly between them.

    seconds / work
        |  *
        |     *                 below the grid: the time at its edge, which is all latency
        |         *    *    *   above it: in proportion to the work
        +-----------------------  log size
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import exp, log, prod
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from fullshard.config.fields import Count, Flag, Number, Section
from fullshard.config.files import read_file
from fullshard.config.regular_files import packaged_table, read_regular
from fullshard.config.values import ConfigProblems, Problem, show
from fullshard.planner.text import format_json
from fullshard.planner.tracing import ROWS, VIEW, Operation

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; a rank uses one.

    Attributes:
        name: Name in the table.
        peak: Dense bf16 operations per second in the data sheet.
        matmul: Operations per second of a good matmul.
        bandwidth: Memory bandwidth in bytes per second.
        memory_gib: Memory that a framework can use.
        link: Bytes per second to neighbours in the host, one way.
        fabric: Bytes per second and device to other hosts, if the fabric is not named.
        domain: Number of devices that the fast link joins.
        is_tpu: XLA compiles whole programs for it, and its links form a torus.
        sold: Total memory in MiB as the driver reports it, by nominal GB. A name without a size
            means the first variant.
    """

    name: str
    peak: float
    matmul: float
    bandwidth: float
    memory_gib: float
    link: float
    fabric: float
    domain: int = 8
    is_tpu: bool = False
    sold: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)

    @property
    def is_hopper(self) -> bool:
        """Whether it is of the Hopper generation, whose matmuls are limited by power."""
        return self.name[:2] in ("H1", "H2", "H8", "GH")


def find_device(text: str, memory_gb: float | None = None) -> Device:
    """Returns the device that a text names, in the variant with that memory.

    Raises:
        KeyError: The table has no such device.
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    names = sorted(DEVICES, key=lambda name: -len(name))
    for name in names:
        if re.sub(r"[^a-z0-9]", "", name.lower()) in plain:
            return _variant(DEVICES[name], plain, memory_gb)
    raise KeyError(text)


def _variant(device: Device, plain: str, memory_gb: float | None) -> Device:
    said = re.search(r"(\d+)gb", plain)
    size = memory_gb or (float(said[1]) if said else None)
    if device.name == "A100" and size is not None and size <= 48:
        return DEVICES["A100-40"]
    if device.name == "H100" and size is not None and 90 < size < 100:
        return DEVICES["H100-96"]
    if device.name == "H100" and "pcie" in plain:
        return DEVICES["H100-PCIE"]
    return device


# ---- names of a machine's GPUs -------------------------------------------------------------------

_FORM = re.compile(
    r"(?:(?P<count>\d+)\s*[x*]\s*)?"
    r"(?P<name>[a-z][a-z0-9 ]*?)?[-_ ]?(?:(?P<size>\d+)\s*(?P<unit>gib|gb))?",
    re.IGNORECASE,
)
_EXPECTED = "a count and a GPU, such as 8xH100-80GB, 4xA100-40GB, H200 or 8"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one machine.

    Attributes:
        count: Number of GPUs.
        name: Name of the device; "" if only the memory or the number is known.
        memory_bytes: Memory of one GPU; None if only the number is known.
    """

    count: int
    name: str
    memory_bytes: int | None


def parse_gpus(text: str, key: str = "--gpus", own: Mapping[str, int] | None = None) -> Gpus:
    """Reads the value of `--gpus`.

    Args:
        text: See [Note: a machine's GPUs].
        key: Name of the option in errors.
        own: Memory in bytes of devices that the user has described, by name in capitals.

    Raises:
        ConfigError: The text cannot be read, or names an unknown GPU or variant.
    """
    text = text.strip()
    if text.isdecimal() and int(text) > 0:
        return Gpus(int(text), "", None)
    match = _FORM.fullmatch(text)
    if match is None or not (match["name"] or match["size"]) or match["count"] == "0":
        raise ConfigProblems([Problem(key, _EXPECTED, repr(text))])
    count = int(match["count"] or 1)
    name = (match["name"] or "").replace(" ", "").upper()
    size = int(match["size"]) if match["size"] else None
    own = own or {}
    if name in own:
        if size is not None:
            advice = f"--devices gives the memory of {name}: leave {size}{match['unit']} out"
            raise ConfigProblems([Problem(key, f"{count}x{name}", repr(text), advice)])
        return Gpus(count, name, own[name])
    if name in GPU_MEMORY:
        return Gpus(count, name, _memory_of(name, size, key))
    close = difflib.get_close_matches(name, [*own, *GPU_MEMORY], n=3, cutoff=0.5)
    if size is not None and not close:  # only its memory is known
        return Gpus(count, name, size * (1 << 30 if match["unit"].lower() == "gib" else 10**9))
    advice = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    advice += (
        f"For another GPU give only its memory ({count}x{size or 80}GB), or describe it in a file "
        "(--devices)"
    )
    raise ConfigProblems([Problem(key, _EXPECTED, f"unknown GPU '{name}'", advice)])


def _memory_of(name: str, size: int | None, key: str) -> int:
    variants = GPU_MEMORY[name]
    if size is None:
        return next(iter(variants.values()))
    if size not in variants:
        expected = " or ".join(f"{name}-{known}GB" for known in variants)
        raise ConfigProblems([Problem(key, expected, f"{name}-{size}GB")])
    return variants[size]


# ---- a file of devices ---------------------------------------------------------------------------

USUAL_MATMUL = 0.78  # share of the peak that a good matmul reaches: the median of our table

Rate = Annotated[float, Number(above=0)]


class DeviceEntry(Section):
    """One accelerator, in the units of data sheets."""

    memory_gib: Rate
    """Memory that a framework can use, in GiB."""

    bf16_tflops: Rate
    """Dense bf16 peak in the data sheet, in 10^12 operations per second."""

    memory_tb_s: Rate
    """Memory bandwidth, in 10^12 bytes per second."""

    matmul_tflops: Rate | None = None
    """Speed of a good matmul, in 10^12 operations per second. None: 0.78 of bf16_tflops."""

    link_gb_s: Rate = 50.0
    """Speed to neighbours in the host, in 10^9 bytes per second, one way."""

    fabric_gb_s: Rate = 12.5
    """Speed to other hosts, in 10^9 bytes per second and device."""

    domain: Count = 8
    """Number of devices that the fast link joins."""

    is_tpu: Flag = False
    """XLA compiles whole programs for it, and its links form a torus."""

    sold: dict[int, int] | None = None
    """Total memory in MiB as the driver reports it, by nominal GB."""

    def device(self, name: str) -> Device:
        """The device in operations and bytes per second."""
        matmul = self.matmul_tflops or (1 if self.is_tpu else USUAL_MATMUL) * self.bf16_tflops
        speeds = self.bf16_tflops * TERA, matmul * TERA, self.memory_tb_s * TERA
        links = self.link_gb_s * GIGA, self.fabric_gb_s * GIGA
        more = self.domain, self.is_tpu, self.sold or {}
        return Device(name, *speeds, self.memory_gib, *links, *more)


def read_devices(path: Path) -> dict[str, Device]:
    """Returns the devices of a file by name in capitals, without spaces.

    Raises:
        ConfigError: The file cannot be read, or a number is missing or invalid.
    """
    values = read_file(path).values
    found: dict[str, Device] = {}
    for written, entry in values.items():
        name = str(written).upper().replace(" ", "")
        try:
            if not re.fullmatch(r"[A-Z][A-Z0-9]*[A-Z0-9]", name) or re.search(r"\dG(I?)B$", name):
                raise ConfigProblems([Problem("", "a name of letters and digits", show(written))])
            if name in found:
                raise ConfigProblems([Problem("", "each device once", f"{name} twice")])
            found[name] = _device(name, entry)
        except ConfigProblems as error:
            where = f"{path}: {written}"
            raise error.map(lambda one, w=where: one.below(w)) from None
    return found


def _device(name: str, values: object) -> Device:
    if not isinstance(values, dict):
        raise ConfigProblems([Problem("", "a mapping with its numbers", show(values))])
    return DeviceEntry(**{str(key): value for key, value in cast("Any", values).items()}).device(
        name
    )


# ---- the table -----------------------------------------------------------------------------------

_TABLE: dict[str, Any] = packaged_table("fullshard.outlook", "devices.yaml")
DEVICES = {name: _device(name, row) for name, row in _TABLE.items()}
GPU_MEMORY = {
    name.replace(" ", ""): {gb: mib << 20 for gb, mib in device.sold.items()}
    for name, device in DEVICES.items()
    if device.sold
}


# ---- the measured speed of a machine -------------------------------------------------------------

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


# ---- the file of a calibration -------------------------------------------------------------------

SCHEMA_VERSION = 1
CALIBRATION_FILE = "calibration.json"
AGAIN = "Measure it again with fullshard bench calibrate."
TABLE_WIDTH = 4000  # characters: a table fits on one line of the file

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
