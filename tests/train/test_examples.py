"""The tutorials run as their first lines describe."""

from pathlib import Path

import pytest

from support import forked
from support.processes import python

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "fsdp_basics.py": "step 20  loss 0.",
    "fsdp_transformer.py": "5 units: the model and its blocks",
    "fsdp_checkpoint.py": "equal",
    "fsdp_memory_efficient.py": "FULL_SHARD, recompute",
    "mixture_of_experts.py": "step 40  loss 0.",
}


def test_the_walk_through_a_plan_runs_in_one_process():
    done = python(EXAMPLES / "plan_walk.py", run=forked.run)
    assert "168,313,856 parameters in 11 units" in done.stdout
    assert "depth 2: " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAID)
def test_a_tutorial_runs_on_two_ranks(name):
    # Standalone: torchrun's default port may be another test's.
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", EXAMPLES / name)
    done = python(*words, run=forked.run, timeout=290)
    assert SAID[name] in done.stdout
