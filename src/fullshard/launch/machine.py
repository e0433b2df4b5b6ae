"""What this machine is, without a name that would tell whose it is, and its ranks."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fullshard.planner.mesh import Topology

if TYPE_CHECKING:
    from fullshard.config.schema import LaunchConfig

DEFAULT_PROCESSES = 2  # where there is no accelerator: enough to shard anything at all
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


def configured_topology(launch: LaunchConfig) -> Topology:
    """The ranks of `launch`: num_processes counts those of all machines, as Accelerate does.

    Left out, it is one rank for each accelerator that is visible here, on every machine, else 2.
    """
    machines = launch.num_machines
    world = launch.num_processes or num_visible_accelerators() * machines or DEFAULT_PROCESSES
    return Topology(world, world // machines if world % machines == 0 else None)


def num_visible_accelerators() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
