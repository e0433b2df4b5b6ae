"""The tutorials run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "fsdp_basics.py": "step 20  loss 0.",
    "fsdp_transformer.py": "5 units: the model and its blocks",
    "fsdp_checkpoint.py": "equal",
    "fsdp_memory_efficient.py": "FULL_SHARD, recompute",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAID)
def test_a_tutorial_runs_on_two_ranks(name):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run(
        [*words, str(EXAMPLES / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SAID[name] in done.stdout
