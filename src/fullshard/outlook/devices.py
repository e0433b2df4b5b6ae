"""Speed and memory of devices, and the names that users give them.

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
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

from fullshard.config.fields import Count, Flag, Number, Section
from fullshard.config.files import read_file
from fullshard.config.regular_files import packaged_table
from fullshard.errors import ConfigProblems, Problem, show

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


ROWS: dict[str, Any] = packaged_table("fullshard.outlook", "devices.yaml")
DEVICES = {name: _device(name, row) for name, row in ROWS.items()}
GPU_MEMORY = {
    name.replace(" ", ""): {gb: mib << 20 for gb, mib in device.sold.items()}
    for name, device in DEVICES.items()
    if device.sold
}
