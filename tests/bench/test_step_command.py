"""`fullshard bench step` on a tiny model: all engines train equally, as the JSON reports."""

import json
import re
from functools import partial
from importlib.util import find_spec

import pytest

from support import forked

CONTRACT = {"name", "strategy", "step_time_s", "tokens_per_s", "memory_peak_bytes"}
TRAINING = {"fullshard", "fullshard-c10d", "fsdp2", "fsdp2-zero2", "fsdp1", "ddp"}


run = partial(forked.module, "fullshard", "bench")
result = partial(forked.result, "fullshard", "bench")


@pytest.mark.timeout(540)
def test_every_engine_has_equal_losses_and_a_row(tmp_path):
    words = ("--case", "tiny", "--rounds", "3", "--no-memory", "--out", tmp_path)
    found = result("step", *words, timeout=500)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.keys() >= TRAINING | {"floor"}
    assert all(row.keys() >= CONTRACT for row in rows.values())
    assert all(row["step_time_s"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())
    losses = found["cases"][0]["losses"]
    # The floor does not train, so the equality that the command checks is significant.
    for name in TRAINING:
        assert losses[name] == pytest.approx(losses["fsdp2"], rel=2e-5)
    assert losses["floor"] != pytest.approx(losses["fsdp2"], rel=2e-5)
    assert json.loads((tmp_path / "step.json").read_text()) == found
    assert "| fullshard |" in (tmp_path / "step.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_memory_is_measured_of_an_engine_alone():
    words = ("--case", "tiny", "--rounds", "3", "--engine", "ddp")
    (row,) = result("step", *words, timeout=500)["rows"]
    # DDP needs at least parameters, gradients and two moments of 0.12M float32 elements.
    assert row["memory_peak_bytes"] > 4 * 4 * 100_000


@pytest.mark.peers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.timeout(540)
def test_deepspeed_has_equal_losses_where_it_is_installed():
    names = ("deepspeed", "deepspeed-zero2", "fsdp2")
    engines = [word for name in names for word in ("--engine", name)]
    words = ("--case", "tiny", "--rounds", "3", "--no-memory", *engines)
    found = result("step", *words, timeout=500)
    assert found["absent"] == []
    losses = found["cases"][0]["losses"]
    for name in names:
        assert losses[name] == pytest.approx(losses["fsdp2"], rel=2e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("step", "--engine", "fsdp3"), "fsdp2, .* got 'fsdp3'"),
        (("comm", "--timeout", "nan"), "--timeout: expected a number .*, got 'nan'"),
    ],
)
def test_an_impossible_option_is_refused_before_a_rank_starts(words, said):
    done = run(*words)
    assert done.returncode == 2
    assert re.search(said, done.stderr)


def test_a_dry_run_lists_what_would_run_and_imports_no_torch():
    done = run("step", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert re.search(r"bench step: about .* \(an estimate", done.stderr)
    found = json.loads(done.stdout)
    assert found["cases"] == ["29M", "109M", "29M-4", "109M-bf16", "moe", "lora"]
    assert "fsdp2" in found["engines"]
