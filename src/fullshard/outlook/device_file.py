"""Devices that our tables lack, or have with other numbers, from a file of the user's.

MI400:                   # as --gpus names it: 8xMI400
  memory_gib: 402        # that a framework can use
  bf16_tflops: 2300      # dense, on paper
  memory_tb_s: 19.6
  link_gb_s: 300         # to its neighbours in the host, one way
  fabric_gb_s: 50        # to other hosts, a device
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from omegaconf import OmegaConf

from fullshard.config.fields import Count, Number
from fullshard.config.files import read_file
from fullshard.config.model import Section
from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.outlook.devices import GIGA, TERA, Device

USUAL_MATMUL = 0.78  # of the paper's peak that a good matmul reaches: the median of our table

Rate = Annotated[float, Number(above=0)]


class DeviceEntry(Section):
    """One accelerator, in the units of data sheets."""

    memory_gib: Rate | None = None
    """What a framework can use of its memory."""

    bf16_tflops: Rate | None = None
    """bf16 operations a second on paper, without sparsity, in 10^12."""

    matmul_tflops: Rate | None = None
    """What of it a good matmul reaches. None: 0.78 of it."""

    memory_tb_s: Rate | None = None
    """Bandwidth of its memory, in 10^12 bytes a second."""

    link_gb_s: Rate = 50.0
    """To its neighbours in the host, in 10^9 bytes a second, one way."""

    fabric_gb_s: Rate = 12.5
    """To other hosts, in 10^9 bytes a second and device."""

    domain: Count = 8
    """Devices that the fast link joins."""


NEEDED = ("memory_gib", "bf16_tflops", "memory_tb_s")


def read_devices(path: Path) -> dict[str, Device]:
    """Devices by their name in capitals, without spaces.

    Raises:
        ConfigError: The file cannot be read, misses a number, or has one that is none.
    """
    values = cast("Mapping[Any, Any]", OmegaConf.to_container(read_file(path).config))
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
            raise error.map(lambda one, w=where: _below(one, w)) from None
    return found


def _below(problem: Problem, where: str) -> Problem:
    return replace(problem, key=f"{where}.{problem.key}" if problem.key else where)


def _device(name: str, values: object) -> Device:
    if not isinstance(values, dict):
        raise ConfigProblems([Problem("", "a mapping of its numbers", show(values))])
    entry = DeviceEntry(**{str(key): value for key, value in cast("Any", values).items()})
    missing = [key for key in NEEDED if getattr(entry, key) is None]
    if missing:
        advice = "Its data sheet has it"
        raise ConfigProblems(
            [Problem(key, "a number above 0", "nothing", advice) for key in missing]
        )
    peak, bandwidth = entry.bf16_tflops or 0.0, entry.memory_tb_s or 0.0
    return Device(
        name,
        peak * TERA,
        (entry.matmul_tflops or USUAL_MATMUL * peak) * TERA,
        bandwidth * TERA,
        entry.memory_gib or 0.0,
        entry.link_gb_s * GIGA,
        entry.fabric_gb_s * GIGA,
        entry.domain,
    )
