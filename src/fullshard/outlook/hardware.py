"""What devices hold: memory of common GPUs, and how people write down what they have.

8xH100-80GB    4xA100-40GB    H200    8xH100    8    8x96GB    4xNEWGPU-288GB
^ a machine's  ^ name ^ which variant
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fullshard.config.problems import ConfigProblems, Problem

MIB = 1 << 20

# Total memory as the driver reports it, a little below what the name says, by nominal GB. The
# first variant is meant where a name stands alone.
GPU_MEMORY: dict[str, dict[int, int]] = {
    "A10": {24: 23028 * MIB},
    "A10G": {24: 23028 * MIB},
    "A100": {80: 81920 * MIB, 40: 40960 * MIB},
    "A6000": {48: 49140 * MIB},
    "B200": {180: 183359 * MIB, 192: 183359 * MIB},
    "GH200": {96: 97871 * MIB, 144: 147456 * MIB},
    "H100": {80: 81559 * MIB, 64: 65247 * MIB, 94: 95830 * MIB, 96: 97871 * MIB},
    "H200": {141: 143771 * MIB},
    "H800": {80: 81559 * MIB},
    "L4": {24: 23034 * MIB},
    "L40": {48: 46068 * MIB},
    "L40S": {48: 46068 * MIB},
    "MI250X": {64: 65520 * MIB},  # one of its two dies, which is what a rank gets
    "MI300X": {192: 196592 * MIB},
    "MI325X": {256: 262128 * MIB},
    "MI355X": {288: 294896 * MIB},
    "RTX3090": {24: 24576 * MIB},
    "RTX4090": {24: 24564 * MIB},
    "RTX5090": {32: 32607 * MIB},
    "T4": {16: 15360 * MIB},
    "V100": {32: 32768 * MIB, 16: 16384 * MIB},
}

_FORM = re.compile(
    r"(?:(?P<count>\d+)\s*[x*]\s*)?"
    r"(?P<name>[a-z][a-z0-9 ]*?)?[-_ ]?(?:(?P<size>\d+)\s*(?P<unit>gib|gb))?",
    re.IGNORECASE,
)
_EXPECTED = "a count and a GPU, such as 8xH100-80GB, 4xA100-40GB, H200 or 8"

# What must stay free for the holes between tensors, and for what the plan's estimates miss.
HEADROOM = 0.1


class Fit(StrEnum):
    """Whether a plan fits into a device."""

    FITS = "fits"  # with the headroom left over
    TIGHT = "tight"  # it fits, the headroom does not
    NO = "no"

    def sentence(self, needed_bytes: int, memory_bytes: int) -> str:
        """The verdict with its numbers."""
        share = f"{needed_bytes / memory_bytes:.1%}"
        if needed_bytes > 2 * memory_bytes:
            share = f"{needed_bytes / max(1, memory_bytes):,.1f} times as much"
        match self:
            case Fit.FITS:
                return f"fits, it takes {share}."
            case Fit.TIGHT:
                return f"tight, it takes {share}."
            case Fit.NO:
                return f"will not fit, it would take {share}."


def judge_fit(needed_bytes: int, memory_bytes: int) -> Fit:
    """Judge what the largest rank holds against the memory of a device."""
    if needed_bytes > memory_bytes:
        return Fit.NO
    return Fit.FITS if needed_bytes <= (1 - HEADROOM) * memory_bytes else Fit.TIGHT


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one machine.

    Attributes:
        count: How many.
        name: Which, or "" where only their memory or their number is known.
        memory_bytes: What one of them holds; None where only their number is known.
    """

    count: int
    name: str
    memory_bytes: int | None


def parse_gpus(text: str, key: str = "--gpus", own: Mapping[str, int] | None = None) -> Gpus:
    """Read what a user calls a machine's GPUs.

    Args:
        text: As in the module's docstring.
        key: Under which errors speak of it.
        own: Memory in bytes of devices that the user has described, by name in capitals.

    Raises:
        ConfigError: it cannot be read, or names a GPU or a variant that nobody knows.
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
            advice = f"--devices says what {name} holds: leave {size}{match['unit']} out"
            raise ConfigProblems([Problem(key, f"{count}x{name}", repr(text), advice)])
        return Gpus(count, name, own[name])
    if name in GPU_MEMORY:
        return Gpus(count, name, _variant(name, size, key))
    close = difflib.get_close_matches(name, [*own, *GPU_MEMORY], n=3, cutoff=0.5)
    if size is not None and not close:  # its memory alone is known
        return Gpus(count, name, size * (1 << 30 if match["unit"].lower() == "gib" else 10**9))
    advice = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    advice += (
        f"For another GPU give its memory alone ({count}x{size or 80}GB), or describe it in a file "
        "(--devices)"
    )
    raise ConfigProblems([Problem(key, _EXPECTED, f"unknown GPU '{name}'", advice)])


def _variant(name: str, size: int | None, key: str) -> int:
    variants = GPU_MEMORY[name]
    if size is None:
        return next(iter(variants.values()))
    if size not in variants:
        expected = " or ".join(f"{name}-{known}GB" for known in variants)
        raise ConfigProblems([Problem(key, expected, f"{name}-{size}GB")])
    return variants[size]
