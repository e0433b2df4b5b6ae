"""The memory of this host, or of the container around this process: the one reader of cgroups.

    version 2   /sys/fs/cgroup/GROUP/memory.max                        memory.current
    version 1   /sys/fs/cgroup/memory/GROUP/memory.limit_in_bytes      memory.usage_in_bytes

A limit counts for a group and for all groups inside of it, so every group from this process's own
up to the root is read. Inside a container the root is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

# Limit, use, what of the use the kernel takes back when memory is asked for, and its kills.
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"), "memory.events")
_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)


def total_bytes() -> int:
    """Memory of the host, or the least limit of the groups that this process is in."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Memory that this process and others of its groups may still allocate."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of every group with a limit; none where there are no cgroups."""
    for folder, (limit, usage, given_back, _) in _groups():
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            yield most, used - sum(int(stat.get(name, 0)) for name in given_back)


def kill_counters() -> list[Path]:
    """Files of this process's own groups that count what the kernel killed, `oom_kill N`."""
    own = {names: folder for folder, names in reversed(list(_groups()))}
    return [folder / names[-1] for names, folder in own.items()]


def _groups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, str], str]]]:
    """Folders of the groups that this process is in, and the names of their files."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = CGROUP / "memory" if controllers else CGROUP
            own = root / name.lstrip("/")
            for folder in (own, *own.parents):
                yield folder, _VERSION_1 if controllers else _VERSION_2
                if folder == root:
                    break
