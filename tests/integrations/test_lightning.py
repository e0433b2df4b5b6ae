"""Lightning's Trainer with our fully_shard gives the results of torch's."""

import json
import subprocess
from pathlib import Path

import pytest

from support.peers import LIGHTNING, with_site
from support.trainers import launched

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("lightning_job.py")


def run(folder, mode, form, *resume):
    env = with_site(*LIGHTNING)
    launched(folder, SCRIPT, mode, folder, form, *resume, run=subprocess.run, env=env)
    name = "-".join([f"{mode}-{form}", *(path.parent.name for path in resume)])
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    forms = [(mode, form) for form in ("files", "file") for mode in ("torch", "sharded")]
    return folder, {(mode, form): run(folder, mode, form) for mode, form in forms}


@pytest.mark.parametrize("form", ["files", "file"])
def test_norms_losses_and_validation_are_those_of_torchs_fsdp2(runs, form):
    _, found = runs
    assert len(found["torch", form]) == 12
    assert found["sharded", form] == pytest.approx(found["torch", form], rel=1e-12)


@pytest.mark.parametrize("form", ["files", "file"])
@pytest.mark.parametrize(
    ("mode", "saver"), [("sharded", "sharded"), ("sharded", "torch"), ("torch", "sharded")]
)
def test_each_engine_resumes_checkpoints_of_the_other(runs, mode, saver, form):
    folder, found = runs
    resumed = run(folder, mode, form, folder / f"{saver}-{form}" / "epoch=0.ckpt")
    assert resumed == pytest.approx(found["torch", form][-7:], rel=1e-12)
