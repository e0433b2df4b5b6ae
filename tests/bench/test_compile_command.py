"""`python -m benchmarks.compile`: every engine's blocks are one graph, compiled once."""

import warnings

import pytest
import torch._dynamo
from benchmarks.compile import Job
from benchmarks.compile_rank import measure

from fullshard.bench.step import find_case


def measured():
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            return measure(Job(find_case("tiny"), num_rounds=3, backend="aot_eager"))
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_blocks_are_one_graph_under_both_engines(ranks):
    for found in ranks(2)(measured, timeout=100):
        compiled = {"fullshard": 0, "fullshard compiled": 1, "fsdp2": 0, "fsdp2 compiled": 1}
        assert found["graphs"] == compiled
        assert found["recompiled"] == 0
        assert {len(times) for times in found["times"].values()} == {3}
        for losses in found["losses"].values():
            assert losses == found["losses"]["fsdp2"]
