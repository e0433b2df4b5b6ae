"""`python -m benchmarks.gpu` without a GPU runs and reports that it measured nothing."""

import pytest
import torch
from benchmarks import gpu

from support import forked


def test_tiny_blocks_run_in_both_worlds_under_every_engine():
    rows = forked.result("benchmarks.gpu", "--tiny", "--rounds", "3")["rows"]
    found = [(row["world_size"], row["name"]) for row in rows]
    assert found == [(world, name) for world in gpu.WIRES for name in gpu.ENGINES]
    assert all(row["step_s"] >= row["host_s"] > 0 for row in rows)
    plain, ours, fsdp2 = (row["num_copies"] for row in rows[:3])
    assert plain < ours < fsdp2


@pytest.mark.skipif(torch.cuda.is_available(), reason="says something about its absence")
def test_without_a_gpu_nothing_is_measured_and_the_results_say_so():
    page = gpu.run(3, tiny=False, command="", say=lambda _: None)
    assert not page.rows
    assert "Absent: gpu. torch sees no CUDA device" in page.to_markdown()
