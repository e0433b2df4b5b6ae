"""TRL's trainers on two ranks give the results of their own DDP."""

import json
from pathlib import Path

import pytest

from support.trainers import launched

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

SCRIPT = Path(__file__).with_name("trl_job.py")
NAMES = [
    *(f"{kind}-{head}-{how}" for kind in ("sft", "dpo", "gkd")
      for head in ("untied", "tied") for how in ("full", "lora")),
    "rloo-untied-lora",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, norms and metrics by trainer, with DDP and with ours."""
    folder = tmp_path_factory.mktemp("trl")
    found = []
    for mode in ("ddp", "sharded"):
        launched(folder, SCRIPT, mode, folder)
        found.append(json.loads((folder / f"{mode}.json").read_text()))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_gives_the_results_of_ddp(runs, name):
    theirs, ours = (run[name] for run in runs)
    assert len(ours) == len(theirs) == 2
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine["grad_norm"] > 0
        assert mine == pytest.approx(wanted, rel=2e-5, abs=1e-7)
