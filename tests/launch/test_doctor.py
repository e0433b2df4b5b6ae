"""`fullshard doctor` tests real ranks, names faults with their remedy, and leaves no files."""

import json
import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from fullshard.launch import doctor as doctors
from fullshard.launch.doctor import GIB, DoctorReport, Finding, Health, anonymous, examine
from fullshard.launch.supervise import LaunchResult
from support import forked as subprocess
from support.memory_groups import memory_group

ROOT = Path(__file__).parents[2]


def doctor(tmp_path, *words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "fullshard", "doctor", *words],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_communication_of_ranks_is_tested_and_measured(tmp_path):
    done = doctor(tmp_path, "--json", HF_TOKEN="secret", MASTER_ADDR="node-17.example")
    found = json.loads(done.stdout)
    assert (done.returncode, found["broken"]) == (0, False), done.stderr
    ranks = found["ranks"]
    assert ranks["num_ranks"] >= 1
    assert ranks["fetch_gb_per_s"] > 0
    assert ranks["reduce_gb_per_s"] > 0
    assert ranks["latency_ms"] > 0
    assert {"python", "torch", "fullshard"} <= found["versions"].keys()
    assert found["memory"]["host_bytes"] > 0
    assert found["memory"]["disk_bytes"] > 0
    assert found["variables"]["MASTER_ADDR"] == "(set)"
    assert "secret" not in done.stdout + done.stderr
    assert "node-17" not in done.stdout + done.stderr
    assert found["report"] in done.stderr  # with --json the text goes to standard error
    assert list(tmp_path.iterdir()) == []  # the disk was tested, and no file is left


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_the_memory_is_that_of_the_container(tmp_path):
    with memory_group(3 * GIB) as group:
        words = ("-m", "fullshard", "doctor", "--json", "--nproc-per-node", "1", "--out", tmp_path)
        done = group.run([sys.executable, *map(str, words)], 110, dict(os.environ))
    found = json.loads(done.stdout)
    assert found["memory"]["cgroup_limit_bytes"] == 3 * GIB
    assert 0 < found["memory"]["host_bytes"] < 3 * GIB
    assert f"GiB free of the container's memory limit of 3.0 GiB ({group.limit})" in done.stderr


@pytest.fixture
def findings(monkeypatch):
    """`findings(what, folder)` returns the findings about a subject without starting ranks."""
    names = ("backend", "transport", "fetch_gb_per_s", "reduce_gb_per_s", "latency_ms")
    ended = None, LaunchResult(0), [dict.fromkeys(names, 1.0)]
    monkeypatch.setattr(doctors, "call_on_ranks", lambda *_: ended)
    return lambda what, folder: [one for one in examine(folder).findings if one.what == what]


def test_an_existing_folder_is_not_removed(findings, tmp_path):
    for out in (tmp_path, tmp_path / "runs"):
        assert all(one.health is Health.OK for one in findings("disk", out))
    assert list(tmp_path.iterdir()) == []


def test_faults_are_named_and_set_the_exit_code(tmp_path):
    done = doctor(
        tmp_path, GLOO_SOCKET_IFNAME="nope0", CUDA_LAUNCH_BLOCKING="1", OMP_NUM_THREADS="9999"
    )
    assert done.returncode == 1
    assert "BROKEN  variables: GLOO_SOCKET_IFNAME=nope0, which is no interface here" in done.stdout
    assert "warn    variables: CUDA_LAUNCH_BLOCKING=1: every kernel waits" in done.stdout
    assert "warn    variables: OMP_NUM_THREADS=9999 on" in done.stdout
    assert "BROKEN  ranks: " in done.stdout  # the ranks ran into the effect of the variable
    assert str(ROOT) not in done.stdout.split("For a bug report:")[1]


def test_an_unwritable_folder_is_a_fault(tmp_path):
    (tmp_path / "file").touch()
    done = doctor(tmp_path, "--out", "file/runs", "--nproc-per-node", "1")
    assert done.returncode == 1
    assert "BROKEN  disk: cannot write into file/runs" in done.stdout


@pytest.mark.parametrize(
    ("number", "low", "said"),
    [
        (resource.RLIMIT_NOFILE, 500, ("at most 500 open files", "ulimit -n 65536")),
        (resource.RLIMIT_AS, 7 << 30, ("of address space per process", "ulimit -v unlimited")),
        (resource.RLIMIT_FSIZE, 4096, ("at most 4,096 bytes per file", "ulimit -f unlimited")),
    ],
)
def test_low_limits_of_a_process_are_named(findings, tmp_path, monkeypatch, number, low, said):
    monkeypatch.setattr(resource, "getrlimit", lambda one: (low if one == number else -1, -1))
    found = findings("limits", tmp_path)
    assert any(said[0] in f.says and f.do == said[1] for f in found), found


def test_the_block_for_a_bug_report_names_no_host_and_no_home():
    text = f"{Path.home()}/x on {socket.gethostname()}"
    finding = Finding("disk", Health.BROKEN, text)
    report = DoctorReport({}, {}, {}, {}, {}, (finding,)).report()
    assert "broken: disk: " in report
    for name in (str(Path.home()), socket.gethostname()):
        if len(name) > 1 and name != "localhost":
            assert name not in report


@pytest.mark.parametrize("text", ["", "nothing to hide"])
def test_text_without_names_is_not_masked(text):
    assert anonymous(text) == text
