"""Real checkpoints of DeepSpeed and Accelerate are imported with the values that they load."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import fullshard as fs
from support import forked as subprocess
from support import peer_writers

pytestmark = pytest.mark.peers
SCRIPT = Path(peer_writers.__file__)


def written(what, folder, tool):
    """Runs the tool on two ranks, each in a process."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, what, folder, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(peer_writers.WORLD_SIZE)
    ]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return folder / "theirs"


def check(fullshard, theirs, folder):
    """Imports, loads, and compares with the state dict that the tool assembled."""
    done = fullshard("ckpt", "import", theirs, folder / "ours", "--json", code=0)
    model = fs.shard(peer_writers.net())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fs.load(folder / "ours", model)
    found = fs.full_state_dict(model)
    wanted = torch.load(folder / "reference.pt")
    # DeepSpeed's tool drops frozen float32 parameters of stage 1; the module contains them.
    wanted.setdefault("frozen.weight", peer_writers.net().frozen.weight.detach())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.float()), name
    untrained = peer_writers.net().state_dict()
    assert not torch.equal(found["inner.weight"], untrained["inner.weight"])
    return done.json


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_of_every_stage_become_whole_masters(fullshard, tmp_path, stage):
    facts = check(fullshard, written(f"zero-{stage}", tmp_path, "deepspeed"), tmp_path)
    assert facts["step"] == 2
    assert facts["left_out"] == ["the optimizer's states"]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerates_sharded_and_whole_state_dicts_are_read(fullshard, tmp_path, kind):
    facts = check(fullshard, written(f"fsdp-{kind}", tmp_path, "accelerate"), tmp_path)
    sharded = kind == "SHARDED_STATE_DICT"
    assert facts["optimizer"] == ("AdamW" if sharded else None)
    assert facts["left_out"] == ([] if sharded else ["the optimizer's states"])
