"""Rows, the JSON object and the Markdown page, made from figures that are written here."""

import json
import math

import pytest

from fullshard.bench.cases import CASES, PEERS, find_case, groups_of, installed_peers
from fullshard.bench.page import CpuClock, others_share
from fullshard.bench.step import (
    COLUMNS,
    MEMORY_KEYS,
    CaseResult,
    EngineResult,
    loss_differences,
    loss_errors,
    page_of,
    rows_of,
)
from fullshard.errors import ConfigError

CONTRACT = {"name", "strategy", "step_time_s", "tokens_per_s", "memory_peak_bytes"}


def result(others=0.0, became_idle=True, **differences):
    def engine(name, step_s):
        memory = dict(zip(MEMORY_KEYS, (3 * 2**20, 4 * 2**20, 5 * 2**20), strict=True))
        distance = 1 if name == "fsdp2" else None
        difference = None if name == "floor" else differences.get(name, 0.0)
        times = tuple(step_s * x for x in (1.0, 1.5, 0.9))
        return EngineResult(
            *(PEERS[name], times, (1.0, 1.5, 0.9), 0.4, (8.0, 7.5), difference, distance),
            memory=memory,
        )

    speeds = {"fullshard": 0.6, "fsdp2": 1.0, "floor": 0.5}
    engines = {name: engine(name, step_s) for name, step_s in speeds.items()}
    return CaseResult(CASES["tiny"], engines, others, became_idle)


def page(found):
    return page_of([found], ("deepspeed",), "fullshard x")


def test_every_row_has_the_contracts_keys_and_numbers():
    rows = rows_of(result())
    assert [row["name"] for row in rows] == ["fullshard", "fsdp2", "floor"]
    for row in rows:
        assert row.keys() >= CONTRACT
    assert rows[0]["step_time_s"] == 0.6
    assert rows[0]["tokens_per_s"] == pytest.approx(2 * 2 * 16 / 0.6)
    assert rows[0]["memory_peak_bytes"] == 3 * 2**20
    assert rows[0]["ratio_to_fsdp2"]["value"] == pytest.approx(0.6)
    assert rows[2]["loss_difference"] is None


def test_the_json_object_is_plain_and_lists_what_is_absent():
    found = json.loads(json.dumps(page(result()).to_dict()))
    assert found["absent"] == ["deepspeed"]
    assert {"machine", "versions", "command", "method", "schema_version"} <= found.keys()
    assert found["cases"][0]["removed_share"]["value"] == pytest.approx(0.8)
    assert found["cases"][0]["times_s"]["fsdp2"] == [1.0, 1.5, 0.9]


def test_the_page_shows_every_engine_the_command_and_what_is_absent():
    found = page(result())
    text = found.to_markdown()
    for words in ("fullshard x", "deepspeed", "fsdp2 (prefetch 1)", "| floor |", "0.600", "idle"):
        assert words in text
    assert all(len(cells) == len(COLUMNS) for cells in found.cells)


@pytest.mark.parametrize(("others", "became_idle"), [(0.5, True), (0.0, False)])
def test_figures_of_a_busy_machine_are_marked(others, became_idle):
    busy = result(others, became_idle)
    assert all(row["loaded"] for row in page(busy).to_dict()["rows"])
    assert "LOADED" in page(busy).to_markdown()
    assert not any(row["loaded"] for row in rows_of(result()))


@pytest.mark.parametrize("wrong", [1e-3, math.nan])
def test_an_engine_with_other_losses_is_named_and_marked(wrong):
    found = result(fullshard=wrong)
    (error,) = loss_errors(found)
    assert error.startswith("tiny: losses of fullshard: expected")
    assert [row["equal_losses"] for row in rows_of(found)] == [False, True, True]
    json.dumps(page(found).to_dict(), allow_nan=False)
    assert "Do not compare its speed" in page(found).to_markdown()


def test_rounding_in_the_losses_passes():
    assert loss_errors(result(fullshard=1e-6)) == []


def test_losses_are_laid_beside_fsdp2s_wherever_it_stands():
    found = loss_differences({"ddp": [2.0, 4.0], "fsdp2": [2.0, 5.0], "fullshard": [2.0, math.nan]})
    assert (found["ddp"], found["fsdp2"]) == (0.2, 0.0)
    assert math.isnan(found["fullshard"])
    assert loss_differences({"ddp": [2.0], "fsdp1": [2.0]}) == {"ddp": 0.0, "fsdp1": 0.0}
    assert loss_differences({}) == {}


def test_unknown_cases_and_engines_are_named_with_the_choices():
    with pytest.raises(ConfigError, match="29M"):
        find_case("30M")
    with pytest.raises(ConfigError, match="fsdp2"):
        installed_peers(("fsdp3",))


def test_a_peer_that_is_not_installed_is_listed_as_absent(monkeypatch):
    monkeypatch.setattr("fullshard.bench.cases.find_spec", lambda name: name == "torch" or None)
    present, absent = installed_peers(("fsdp2", "deepspeed", "fsdp2"))
    assert ([peer.name for peer in present], absent) == (["fsdp2"], ["deepspeed"])


def names_of(groups):
    return [[peer.name for peer in group] for group in groups]


def test_engines_that_fit_together_are_one_group():
    peers, _ = installed_peers(("ddp", "floor", "fsdp2"))
    assert names_of(groups_of(peers, CASES["109M"], 10**12)) == [["ddp", "floor", "fsdp2"]]


def test_engines_that_do_not_fit_are_paired_with_fsdp2_group_by_group():
    names = ("fullshard", "fullshard-c10d", "fsdp2", "fsdp1", "ddp", "floor")
    peers, _ = installed_peers(names)
    case = CASES["109M"]
    engine_bytes = 20 * 109_160_448 * 2
    assert names_of(groups_of(peers, case, 4 * engine_bytes)) == [
        ["fullshard", "fsdp2", "floor", "fullshard-c10d"],
        ["fsdp2", "fsdp1", "ddp"],
    ]
    assert names_of(groups_of(peers, case, 0)) == [
        ["fullshard", "fsdp2", "floor"],
        ["fsdp2", "fullshard-c10d", "fsdp1"],
        ["fsdp2", "ddp"],
    ]


@pytest.mark.parametrize(("name", "numel"), [("29M", 29_414_400), ("109M", 109_160_448)])
def test_a_case_knows_how_many_parameters_its_model_has(name, numel):
    import torch

    from fullshard.bench.engines import GPT

    assert CASES[name].numel == numel
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(CASES[name]).parameters()) == numel


def test_the_share_of_others_leaves_our_own_time_out():
    import psutil

    cores = psutil.cpu_count() or 1
    start, end = CpuClock(0.0, 0.0), CpuClock(10.0, 6.0 * cores)
    assert others_share(start, end, own_cpu_s=5.0 * cores) == pytest.approx(0.1)
    assert others_share(start, end, own_cpu_s=7.0 * cores) == 0.0
