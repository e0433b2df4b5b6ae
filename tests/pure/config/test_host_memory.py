"""The memory of a container is the limit of its cgroups, of either version."""

import psutil
import pytest

from fullshard.config import host_memory
from fullshard.launch import supervise

GIB = 1 << 30


def tree(folder, groups):
    """Writes groups with the kernel's files; "" is the root."""
    for name, files in groups.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / name / file).write_text(content)


def version_2(limit, high, used, kills):
    """Files of a version 2 group, as Linux writes them; the root group has no limits."""
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon {used}\nfile 4096\ninactive_file 4096\nactive_file 0\n",
        "memory.events": f"low 0\nhigh 0\nmax 7\noom 1\noom_kill {kills}\noom_group_kill 9\n",
    }


def version_1(limit, used, kills):
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"rss {used}\ntotal_inactive_file 4096\ntotal_active_file 0\n",
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


NO_LIMIT = 9223372036854771712  # version 1 writes this
GROUPS = {  # own groups, all groups, file of the lowest limit, file of the own group's kills
    "version 2 in a container": (
        "0::/\n",
        {"": version_2(str(GIB), "max", GIB // 2, 1)},
        "memory.max",
        "memory.events",
    ),
    "version 1 in a container, whose group is not to be seen": (
        "4:memory:/docker/ab\n3:cpu:/docker/ab\n",
        {"memory": version_1(GIB, GIB // 2, 1)},
        "memory/memory.limit_in_bytes",
        None,
    ),
    "version 1 beside version 2": (
        "2:cpu,memory:/job/step\n0::/\n",
        {"memory/job/step": version_1(GIB, GIB // 2, 1)},
        "memory/job/step/memory.limit_in_bytes",
        "memory/job/step/memory.oom_control",
    ),
    "version 2, the limit of an outer group": (
        "0::/kubepods/pod1/run\n",
        {
            "": {"memory.stat": "anon 1\n"},
            "kubepods": version_2("max", "max", GIB // 2, 0),
            "kubepods/pod1": version_2(str(GIB), "max", GIB // 2, 1),
            "kubepods/pod1/run": version_2("max", "max", GIB // 4, 1),
        },
        "kubepods/pod1/memory.max",
        "kubepods/pod1/run/memory.events",
    ),
    "version 2, the own limit is less than the outer one": (
        "0::/job/run\n",
        {
            "job": version_2(str(2 * GIB), "max", 1, 1),
            "job/run": version_2(str(GIB), "max", GIB // 2, 1),
        },
        "job/run/memory.max",
        "job/run/memory.events",
    ),
    "version 2, memory.high is less than memory.max": (
        "0::/job\n",
        {"job": version_2(str(2 * GIB), str(GIB), GIB // 2, 1)},
        "job/memory.high",
        "job/memory.events",
    ),
    "version 1, the limit of an outer group": (
        "9:memory:/docker/ab/run\n1:name=systemd:/docker/ab\n",
        {
            "memory": version_1(NO_LIMIT, GIB // 2, 0),
            "memory/docker/ab": version_1(GIB, GIB // 2, 1),
            "memory/docker/ab/run": version_1(NO_LIMIT, GIB // 4, 1),
        },
        "memory/docker/ab/memory.limit_in_bytes",
        "memory/docker/ab/run/memory.oom_control",
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_lowest_limit_is_named_with_its_file_and_kills_are_the_own_groups(
    tmp_path, monkeypatch, case
):
    own, groups, limited, kills = GROUPS[case]
    tree(tmp_path / "cgroup", groups)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    file = tmp_path / "cgroup" / limited
    assert host_memory.limit() == host_memory.Limit(GIB, file)
    assert str(host_memory.limit()) == f"the container's memory limit of 1.0 GiB ({file})"
    assert host_memory.available_bytes() == GIB // 2 + 4096  # cached files may be evicted
    if kills is None:
        return
    assert host_memory.kill_counters()[-1] == tmp_path / "cgroup" / kills
    before = supervise.num_kills()
    counter = tmp_path / "cgroup" / kills
    counter.write_text(counter.read_text().replace("oom_kill 1\n", "oom_kill 2\n"))
    assert supervise.num_kills() == before + 1


@pytest.mark.parametrize("own", [None, "0::/\n"])
def test_without_a_limit_the_machine_is_named(tmp_path, monkeypatch, own):
    (tmp_path / "memory.max").write_text("max\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    total = psutil.virtual_memory().total
    assert host_memory.limit() == host_memory.Limit(total)
    assert str(host_memory.limit()) == f"the {total / 2**30:,.1f} GiB of this machine"
