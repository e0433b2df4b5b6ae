"""The planned memory of a run equals its peak by the allocator."""

from dataclasses import astuple

import pytest
import torch
from benchmarks.memory import MIB, MemoryCase, all_cases, find_cases, summary
from benchmarks.memory_rank import live_peak_bytes, measure

from fullshard.errors import ConfigError

TOLERANCE = 0.03
LONG = [  # tested with llama in train/test_{taught,phases,plan_of_adapters}.py
    MemoryCase("gpt2", "shard_grad_op", "block", "bfloat16"),  # tied weights; gradients in bf16
    MemoryCase("qwen3_moe", "no_shard", "selective", accumulation=2),
]


def named(case):
    return "-".join(map(str, astuple(case)))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=named(case), marks=[pytest.mark.slow, pytest.mark.long][case in LONG])
        for case in dict.fromkeys([*LONG, *all_cases()])
    ],
)
def test_planned_and_measured_peaks_agree_within_three_percent(ranks, case):
    found = ranks(case.num_ranks)(measure, case, timeout=300)
    assert all(one["is_traced"] for one in found)
    planned = max(one["planned_bytes"] for one in found)
    measured = max(one["measured_bytes"] for one in found)
    print(
        f"{named(case)}: {planned:,} planned, {measured:,} measured, {planned / measured - 1:+.2%}"
    )
    assert planned == pytest.approx(measured, rel=TOLERANCE), found[0]["rows"]


def test_the_measured_peak_counts_bytes_alive_at_once():
    def one_after_the_other():
        for _ in range(4):
            torch.ones(MIB // 4)
        return torch.ones(MIB // 2)

    assert live_peak_bytes(one_after_the_other) == pytest.approx(2 * MIB, rel=1e-3)


def test_the_sweep_has_ten_architectures_and_every_recompute_and_strategy():
    cases = all_cases()
    assert len({case.kind for case in cases}) == 10
    assert {case.recompute for case in cases if case.kind == "bloom"} == {
        "none",
        "block",
        "selective",
        "every_2",
    }
    assert {case.strategy for case in cases} == {
        "full_shard",
        "shard_grad_op",
        "no_shard",
        "hybrid_shard",
    }


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--model: expected one of llama, .* got 'lama'"):
        find_cases(["lama"])


def test_the_summary_counts_what_is_within_the_bound():
    said = summary([0.01, -0.04, 0.0])
    assert said == "3 runs: median error 1.00%, largest 4.00%; 2 of them within 3 %."
