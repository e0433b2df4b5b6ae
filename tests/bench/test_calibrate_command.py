"""`fullshard bench calibrate` and `bench time`: results and refusals, without checking times."""

import pytest
import torch
from benchmarks import times
from benchmarks.times import find_cases, summary

from fullshard.bench.calibrate import TINY, KernelTimer, crowded, host_of
from fullshard.engine.tracing import KINDS
from fullshard.errors import ConfigError
from fullshard.outlook.devices import Ceilings, HostOverhead, Table, read_calibration
from support import forked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_operation_has_a_table_on_a_whole_grid(dtype):
    timer = KernelTimer(TINY, lambda: None)
    with torch.no_grad():
        found = timer.tables(dtype)
    assert {f"matmul {layout}" for layout in ("nn", "nt", "tn")} <= set(found)
    assert {*KINDS.values(), "add", "add rows", "copy rows", "norm"} <= set(found)
    assert all(Table(tuple(points)).is_whole for points in found.values())
    assert all(seconds >= 0 for points in found.values() for _, seconds in points)
    assert [size for size, _ in timer.updates()] == [(n,) for n in TINY.updates]


def test_host_time_is_the_rest_of_the_time_of_tiny_models():
    bare = Ceilings(1, {}, {}, HostOverhead())
    measured = {"forward": 1.0, "backward": 2.0, "step 2": 10.0, "step 6": 26.0}
    found = host_of(bare, measured, {"cores": 2})
    assert found.forward_s > 0
    assert found.backward_s > 0
    # Each block is a unit with two turns, in addition to its operations.
    left = 26.0 - 10.0 - 4 * (1.0 + 2.0) / 6
    assert found.unit_s == pytest.approx(left / 8, rel=0.25)
    fast = dict.fromkeys(measured, 0.0)
    assert host_of(bare, fast, {"cores": 2}) == HostOverhead()


def test_ranks_that_share_a_core_take_turns():
    whole = Ceilings(
        2, {"add float32": Table((((1,), 3.0),))}, {}, HostOverhead(1.0, 2.0, 3.0, 4.0)
    )
    messages = {"direct fetch": Table((((1,), 5.0),))}
    found = crowded(whole, 6, messages)
    assert found.operations["add float32"].seconds((1,)) == pytest.approx(9.0)
    assert (found.num_ranks, found.transfers, found.host) == (
        6,
        messages,
        HostOverhead(3.0, 6.0, 9.0, 12.0),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_calibration_is_written_and_read(tmp_path):
    path = tmp_path / "deep" / "calibration.json"
    words = ("--tiny", "--ranks", "1", "--ranks", "2", "--out", path)
    said = forked.result("fullshard", "bench", "calibrate", *words, timeout=500)
    assert [row["num_ranks"] for row in said["rows"]] == [1, 2]
    found = read_calibration(path)
    assert set(found.hosts) == {1, 2}
    assert not found.hosts[1].transfers
    assert {"direct fetch", "direct reduce cpu", "direct replicas"} <= set(found.hosts[2].transfers)
    assert found.hosts[2].host.forward_s >= 0


def test_times_without_a_calibration_name_the_command_to_run(tmp_path):
    with pytest.raises(ConfigError, match="fullshard bench calibrate"):
        times.main(calibration=tmp_path / "none.json")


def test_an_unknown_run_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"--case: expected one of llama .*; got 'lama'"):
        find_cases(["lama"])


def test_the_summary_counts_what_is_within_the_goal():
    said = summary([0.04, -0.3, 0.08])
    assert said == "3 runs: median error 8.0%, largest 30.0%; 2 of them within 10%."


def test_processors_are_not_measured_where_plans_are_those_of_a_gpu(monkeypatch, fullshard):
    monkeypatch.setattr("fullshard.bench.calibrate.num_visible_accelerators", lambda: 2)
    done = fullshard("bench", "calibrate", "--tiny", code=2)
    assert "expected no GPU, because it measures processors; got 2" in done.err
