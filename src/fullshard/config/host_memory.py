"""The memory of this host, or of the container around this process: the one reader of cgroups.

    version 2   /sys/fs/cgroup/GROUP/memory.max, memory.high           memory.current
    version 1   /sys/fs/cgroup/memory/GROUP/memory.limit_in_bytes      memory.usage_in_bytes

A limit applies to a group and to all groups inside it, so every group from this process's own up to
the root is read. Inside a container the root is the container's own group. The kernel kills a
process of a group above memory.max, and stalls those of a group above memory.high.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


# Limits, use, and count of kills.
_VERSION_2 = (("memory.max", "memory.high"), "memory.current", "memory.events")
_VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "memory.oom_control")


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory that the processes of a run share.

    Attributes:
        num_bytes: Its size in bytes.
        file: The file that sets it; None: it is the memory of the machine.
    """

    num_bytes: int
    file: Path | None = None

    def __str__(self) -> str:
        shift, unit = (30, "GiB") if self.num_bytes >= 1 << 30 else (20, "MiB")
        size = f"{self.num_bytes / (1 << shift):,.1f} {unit}"
        container = f"the container's memory limit of {size} ({self.file})"
        return container if self.file else f"the {size} of this machine"


def limit() -> Limit:
    """The least limit of the groups that this process is in, or the memory of the machine."""
    found = [Limit(psutil.virtual_memory().total), *(one for one, _ in _limits())]
    return min(found, key=lambda one: one.num_bytes)


def available_bytes() -> int:
    """Memory that this process and others of its groups may still allocate."""
    left = [one.num_bytes - used for one, used in _limits()]
    return min([psutil.virtual_memory().available, *left])


def _limits() -> Iterator[tuple[Limit, int]]:
    """Every limit, and the bytes in use that the kernel cannot reclaim; none without cgroups."""
    for folder, (limits, use, _) in _groups():
        for file in (folder / name for name in limits):
            with suppress(OSError, ValueError):  # "max": no limit
                most, used = int(file.read_text()), int((folder / use).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                stat = {name.removeprefix("total_"): n for name, n in map(str.split, lines)}
                files = (int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
                yield Limit(most, file), used - sum(files)


def kill_counters() -> list[Path]:
    """Files of this process's own groups that count what the kernel killed, `oom_kill N`."""
    own = {names: folder for folder, names in reversed(list(_groups()))}
    return [folder / names[-1] for names, folder in own.items()]


def _groups() -> Iterator[tuple[Path, tuple[tuple[str, ...], str, str]]]:
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
