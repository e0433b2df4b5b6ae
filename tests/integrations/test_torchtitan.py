"""torchtitan's trainer with our fully_shard computes what it computes with torch's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("torchtitan", "spmd_types", "tyro", "triton", "torchdata")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {MISSING}, which make setup does not install: "
        "pip install --no-deps torchtitan==0.3.0 spmd_types tyro triton docstring_parser typeguard "
        "shtab tomli torchdata tiktoken",
    ),
]  # fmt: skip
SCRIPT = Path(__file__).with_name("torchtitan_job.py")


def run(mode, folder, *settings):
    command = [sys.executable, "-m", "fullshard", "launch", "--nproc-per-node", "2"]
    command += ["--log-dir", folder.parent / "logs", SCRIPT, mode, folder, *settings]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=290, check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},  # what it compiles has no CPU backward
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / f"{mode}.json").read_text())


def assert_equal(found, wanted):
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    return folder, {mode: run(mode, folder / mode) for mode in ("torch", "sharded")}


def test_losses_and_norms_of_twenty_steps_are_those_of_torchs_fsdp2(runs):
    _, found = runs
    assert len(found["torch"]) == 20
    assert_equal(found["sharded"], found["torch"])


@pytest.mark.parametrize(
    ("mode", "saver"), [("sharded", "sharded"), ("sharded", "torch"), ("torch", "sharded")]
)
def test_a_checkpoint_of_either_is_resumed_by_either(runs, mode, saver):
    folder, found = runs
    resumed = folder / f"{mode}-of-{saver}"
    shutil.copytree(folder / saver / "checkpoint" / "step-10", resumed / "checkpoint" / "step-10")
    assert_equal(run(mode, resumed), found["torch"][10:])
