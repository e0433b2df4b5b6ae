"""TRL's trainers on two ranks compute what they compute there under their own DDP."""

import json
import os
import sys
from pathlib import Path

import pytest

from support import forked as subprocess

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

SCRIPT = Path(__file__).with_name("trl_job.py")
NAMES = [
    *(f"{kind}-{head}-{how}" for kind in ("sft", "dpo", "gkd")
      for head in ("untied", "tied") for how in ("full", "lora")),
    "rloo-untied-lora",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, norms and metrics by trainer, of DDP and of ours."""
    folder = tmp_path_factory.mktemp("trl")
    found = []
    for mode in ("ddp", "sharded"):
        command = [sys.executable, "-m", "fullshard", "launch", "--nproc-per-node", "2"]
        command += ["--log-dir", str(folder / f"logs-{mode}"), str(SCRIPT), mode, str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=290, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((folder / f"{mode}.json").read_text()))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_computes_what_it_computes_under_ddp(runs, name):
    theirs, ours = (run[name] for run in runs)
    assert len(ours) == len(theirs) == 2
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine["grad_norm"] > 0
        assert mine == pytest.approx(wanted, rel=2e-5, abs=1e-7)
