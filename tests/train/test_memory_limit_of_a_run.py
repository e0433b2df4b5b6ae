"""Runs in a memory group: one that cannot fit is refused; one that just fits finishes."""

import json
import os
import sys
from pathlib import Path

import pytest

from fullshard.launch.machine import CHECK_BYTES
from fullshard.outlook.memory import LAUNCHER_PROCESS, RANK_PROCESS, WORKER_PROCESS
from support.memory_groups import MIB, memory_group
from support.sizes import sizes_of
from support.text import seeded_text

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's"),
    pytest.mark.timeout(200),
]

SIZES = sizes_of(512, 1408, 8, 8, layers=6, model_type="llama", vocab_size=4096)
FILL = """
open("/proc/self/oom_score_adj", "w").write("900")  # the kernel kills this, not its launcher
held = bytearray(1 << 30)
held[::4096] = b"x" * len(held[::4096])
"""


def words_of(folder):
    text = folder / "text.txt"
    text.write_text(seeded_text(6000))
    return [
        f"model.config={json.dumps(SIZES)}",
        f"data.path={text}",
        *("training.max_seq_length=16", "training.max_steps=2", "save_strategy=no"),
        *("training.per_device_train_batch_size=1", "eval_strategy=no"),
        *("launch.num_processes=1", f"training.output_dir={folder / 'out'}"),
    ]


def command(name, words):
    return [sys.executable, "-m", "fullshard", name, *words, "--json"]


def tensor_bytes(folder, words):
    """Returns the peak bytes of tensors in a phase of the run."""
    with memory_group(8 << 30) as group:
        done = group.run(command("plan", words), 100, environment(folder))
    phases = json.loads(done.stdout)["phases"]
    return max(one["device"] + one["host"] * (one["name"] != "load") for one in phases)


def environment(folder):
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def trained(group, folder, words, timeout_s=150):
    done = group.run(command("train", words), timeout_s, environment(folder))
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.long
def test_a_run_that_cannot_fit_is_refused_and_one_that_just_fits_finishes(tmp_path):
    words = words_of(tmp_path)
    least = tensor_bytes(tmp_path, words) + RANK_PROCESS + WORKER_PROCESS + LAUNCHER_PROCESS
    with memory_group(least - 4 * MIB) as group:
        code, found, err = trained(group, tmp_path, words)
        assert (code, group.num_kills()) == (3, 0), err
        assert f"({group.limit})" in found["error"]["message"]
    with memory_group(round(1.05 * least)) as group:
        code, found, err = trained(group, tmp_path, words)
        assert (code, group.num_kills()) == (0, 0), err
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "finished"
    banner = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    assert "limit     the container's memory limit of" in banner


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_850_mib_of_weights_on_disk_train_in_1500_mib_with_the_losses_of_memory(tmp_path):
    sizes = sizes_of(1024, 2816, 16, 16, layers=16, model_type="llama", vocab_size=8192)
    words = [*words_of(tmp_path), f"model.config={json.dumps(sizes)}"]
    found = []
    for limit, more in ((1500 * MIB, ["offload=nvme"]), (12 << 30, [])):
        with memory_group(limit) as group:
            code, _, err = trained(group, tmp_path, [*words, *more], 400)
            assert (code, group.num_kills()) == (0, 0), err
        (tmp_path / "out").rename(run := tmp_path / str(limit))
        files = (run / "model").glob("*.safetensors")
        assert sum(file.stat().st_size for file in files) > 840 * MIB
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        found.append([row.get("loss", row.get("eval_loss")) for row in rows])
    assert len(found[0]) > 2
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (96 * MIB, "for the processes of a run"),
        pytest.param(CHECK_BYTES, "what would help:", marks=pytest.mark.long),
    ],
)
def test_a_group_without_room_for_the_processes_of_a_run_refuses_it(tmp_path, limit, told):
    with memory_group(limit) as group:
        code, found, err = trained(group, tmp_path, words_of(tmp_path))
        assert (code, group.num_kills()) == (3, 0), err
    assert told in found["error"]["message"]
    assert f"({group.limit})" in found["error"]["message"]


def test_a_rank_that_the_kernel_kills_for_memory_names_the_limit(tmp_path):
    (tmp_path / "fill.py").write_text(FILL)
    launch = (
        "from pathlib import Path; from support.launcher import run_local_ranks; "
        f"logs = Path({str(tmp_path)!r}); "
        "raise SystemExit(run_local_ranks('fill', [], num_processes=1, log_dir=logs))"
    )
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join([str(tmp_path), tests, os.environ.get("PYTHONPATH", "")])
    with memory_group(700 * MIB) as group:
        done = group.run([sys.executable, "-c", launch], 100, {**os.environ, "PYTHONPATH": paths})
        assert (done.returncode, group.num_kills()) == (4, 1), done.stderr
    said = f"the container's memory limit of 700.0 MiB ({group.limit}). Reduce the memory per rank"
    assert said in done.stderr
