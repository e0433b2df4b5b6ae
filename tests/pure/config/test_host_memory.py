"""The memory of a container is what its cgroups allow, of either version."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fullshard.config import host_memory

GIB = 1 << 30
LAYOUTS = {
    "version 2 in a container": ("0::/\n", "", 2),
    "version 2 in a slice of a host": ("0::/user.slice/job.scope\n", "user.slice", 2),
    "version 1 in a container": ("4:memory:/docker/ab\n3:cpu:/docker/ab\n", "memory", 1),
    "version 1 beside version 2": ("2:cpu,memory:/job/step\n0::/\n", "memory/job/step", 1),
}
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_limit_of_any_group_around_the_process_counts(tmp_path, monkeypatch, layout):
    own, limited, version = LAYOUTS[layout]
    limit, usage, prefix = FILES[version]
    folder = tmp_path / "cgroup" / limited
    folder.mkdir(parents=True)
    (folder / limit).write_text(f"{GIB}\n")
    (folder / usage).write_text(f"{GIB // 2}\n")
    cached = f"{prefix}inactive_file {GIB // 8}\n{prefix}active_file {GIB // 8}\n"
    (folder / "memory.stat").write_text(f"anon 1\n{cached}")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    assert host_memory.total_bytes() == GIB
    assert host_memory.available_bytes() == GIB - GIB // 4


@pytest.mark.parametrize("own", [None, "0::/\n"])
def test_without_a_limit_it_is_the_hosts(tmp_path, monkeypatch, own):
    (tmp_path / "memory.max").write_text("max\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", Path(tmp_path, "own"))
    assert host_memory.total_bytes() == psutil.virtual_memory().total
