"""An Accelerate loop on two ranks gives the results of Accelerate's DDP."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from support.trainers import launched

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

SCRIPT = Path(__file__).with_name("accelerate_job.py")


def run(folder, mode, *resume):
    launched(folder, SCRIPT, mode, folder, *resume)
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


def test_asking_for_a_state_dict_on_rank_0_only_is_an_error_on_all(runs):
    folder, _, _ = runs
    for rank in range(2):
        text = (folder / f"alone-{rank}").read_text()
        assert "expected the same call on every rank" in text


@pytest.mark.parametrize(
    ("mode", "state"), [("sharded", "ddp"), ("sharded", "sharded"), ("ddp", "sharded")]
)
def test_each_engine_resumes_states_of_the_other(runs, mode, state):
    folder, theirs, _ = runs
    resumed = run(folder, mode, folder / f"state-{state}")
    same(resumed, theirs[len(theirs) - len(resumed) :])
