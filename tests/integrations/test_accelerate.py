"""An Accelerate loop on two ranks computes what it computes there under Accelerate's DDP."""

import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from support import forked as subprocess

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

SCRIPT = Path(__file__).with_name("accelerate_job.py")


def run(folder, mode, *resume):
    command = [sys.executable, "-m", "fullshard", "launch", "--nproc-per-node", "2"]
    command += [
        "--log-dir",
        str(folder / "logs"),
        str(SCRIPT),
        mode,
        str(folder),
        *map(str, resume),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = "-".join([mode, *(path.name for path in resume)])
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, run(folder, "ddp"), run(folder, "sharded")


def same(found, wanted):
    assert len(found) == len(wanted) > 3
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_norms_rates_metrics_and_weights_are_those_of_ddp(runs):
    folder, theirs, ours = runs
    same(ours, theirs)
    saved = [
        load_file(folder / f"model-{mode}" / "model.safetensors") for mode in ("sharded", "ddp")
    ]
    assert saved[0].keys() == saved[1].keys()
    for name, value in saved[0].items():
        assert_close(value, saved[1][name], rtol=1e-9, atol=1e-12)


def test_a_state_dict_that_rank_0_asks_for_alone_is_an_error_on_all(runs):
    folder, _, _ = runs
    for rank in range(2):
        text = (folder / f"alone-{rank}").read_text()
        assert "expected the same call on every rank" in text


@pytest.mark.parametrize(
    ("mode", "state"), [("sharded", "ddp"), ("sharded", "sharded"), ("ddp", "sharded")]
)
def test_a_state_that_either_saved_is_resumed_by_either(runs, mode, state):
    folder, theirs, _ = runs
    resumed = run(folder, mode, folder / f"state-{state}")
    same(resumed, theirs[len(theirs) - len(resumed) :])
