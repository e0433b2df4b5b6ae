"""What this machine is, without a name that would tell whose it is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine() -> dict[str, object]:
    """Describes the hardware class; no names that identify a host."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = {
            flag
            for line in cpuinfo.read_text().splitlines()
            if line.startswith(("flags", "Features"))
            for flag in line.split()
        }
    return {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "vector_flags": [flag for flag in VECTOR_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerators": "not used",
    }


def describe_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of Python and the given packages, and the system's name."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is on the path only
            found[name] = "source tree"
    return found
