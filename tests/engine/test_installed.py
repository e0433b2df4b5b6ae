"""`pip install .` into an existing environment, and ten lines under plain torchrun."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.processes import python

TEN_LINES = """
import torch, torch.distributed as dist
import fullshard as fs
dist.init_process_group("gloo")
torch.manual_seed(0)
model = fs.shard(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    loss = (model(torch.randn(8, 64)) - 1).pow(2).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
state = fs.full_state_dict(model)
if dist.get_rank() == 0: print(fs.__file__, tuple(state["3.weight"].shape), loss.item() < 0.9)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_lines_run_under_torchrun_where_pip_installed_them(tmp_path):
    """Runs `pip install .` with an existing torch; the checkout is not on the path."""
    root = Path(__file__).parents[2]
    script, site = tmp_path / "train.py", tmp_path / "site"
    script.write_text(TEN_LINES)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--no-deps", "--no-build-isolation"] if find_spec("hatchling") else ["--no-deps"]
    python(*install, "--target", site, root)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = python(*launch, cwd=tmp_path, env=env)
    assert done.stdout.split("\n")[0] == f"{site / 'fullshard/__init__.py'} (64, 64) True"
