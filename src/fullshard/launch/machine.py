"""Describes this machine, without names that identify it, and the number of its ranks."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fullshard.config import host_memory
from fullshard.errors import ConfigError, WillNotFitError
from fullshard.planner.mesh import Topology
from fullshard.planner.text import human_bytes

if TYPE_CHECKING:
    from fullshard.config.schema import LaunchConfig

CHECK_BYTES = 400 << 20  # of a launcher that plans a run, the kernel's memory for it included
DEFAULT_PROCESSES = 2  # without an accelerator: the smallest number that shards
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine() -> dict[str, object]:
    """Returns the hardware class, without names that identify a host."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "vector_flags": [flag for flag in VECTOR_FLAGS if flag in words],
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerators": "not used",
    }


def describe_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of Python and of installed packages, and the system's name."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name == "fullshard":  # run from a source tree
                found[name] = "source tree"
    return found


def describe_command() -> dict[str, str]:
    """Command line, working directory, and the commit of its git repository, if it is in one."""
    program = Path(sys.argv[0] or "python")
    # python -m fullshard has the path of __main__.py
    name = "fullshard" if program.parent.name == "fullshard" else program.name
    found = {"command_line": shlex.join([name, *sys.argv[1:]]), "folder": str(Path.cwd())}
    git = ("git", "describe", "--always", "--dirty=, with changes", "--abbrev=40", "--match=")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
        found["git commit"] = done.stdout.strip()
    return found


def configured_topology(launch: LaunchConfig) -> Topology:
    """Ranks of `launch`; num_processes counts the ranks of all machines, as in Accelerate.

    The default is one rank per visible accelerator on every machine, or 2 without accelerators.
    """
    machines = launch.num_machines
    world = launch.world_size or num_visible_accelerators() * machines or DEFAULT_PROCESSES
    return Topology(world, world // machines if world % machines == 0 else None)


def check_accelerators(count: int, num_ranks: int, asked: str = "launch.num_processes") -> None:
    """Checks that each rank of this machine has a GPU of its own, if there are GPUs.

    Args:
        count: Number of GPUs.
        num_ranks: Number of ranks of this machine.
        asked: The key or the launcher that chose it.

    Raises:
        ConfigError: There are more ranks than GPUs.
    """
    if 0 < count < num_ranks:
        raise ConfigError(
            f"{asked}: expected at most {count} ranks on this machine, one per visible GPU; got "
            f"{num_ranks}. Start fewer, or make more GPUs visible."
        )


def num_visible_accelerators() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_limit() -> None:
    """Checks, before torch is imported, that a container has memory for the check of a run.

    Raises:
        WillNotFitError: The kernel would end or stall the process that checks.
    """
    from fullshard.outlook.memory import LAUNCHER_PROCESS, RANK_PROCESS, WORKER_PROCESS

    limit = host_memory.limit()
    if limit.file is not None and limit.num_bytes < CHECK_BYTES:
        least = human_bytes(LAUNCHER_PROCESS + RANK_PROCESS + WORKER_PROCESS)
        raise WillNotFitError(
            f"memory: expected at least {least} for the processes of a run, and its tensors; got "
            f"{limit}. Raise the limit."
        )


def existing_folder(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
