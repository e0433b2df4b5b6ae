"""Memory groups (cgroups) for tests, version 1 or 2, if this process may create them."""

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20
FIRST, SECOND = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A memory group with a limit.

    Attributes:
        folder: Folder of the group.
        limit: File of its limit.
    """

    folder: Path
    limit: Path

    def run(
        self, command: Sequence[str], timeout_s: float, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the group."""
        inside = f'echo 0 > "{self.folder}/cgroup.procs" && exec "$@"'
        words = ["sh", "-c", inside, "sh", *command]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
        )

    def num_kills(self) -> int:
        """Number of processes of the group that the kernel killed for memory."""
        name = "memory.oom_control" if FIRST.is_dir() else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Creates a group, or skips the test with the reason."""
    root, name = (FIRST, "memory.limit_in_bytes") if FIRST.is_dir() else (SECOND, "memory.max")
    folder = root / f"fullshard-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    try:
        try:
            (folder / name).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"a memory group takes no limit here: {error}")
        yield MemoryGroup(folder, folder / name)
    finally:
        folder.rmdir()
