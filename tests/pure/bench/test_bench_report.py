"""Rows, the JSON object and the Markdown page, from constant figures."""

import json
import math
from types import SimpleNamespace

import pytest

from fullshard.bench import measurement, step
from fullshard.bench.step import (
    CASES,
    COLUMNS,
    StepOptions,
    find_case,
    groups_of,
    installed_peers,
    loss_differences,
    loss_errors,
    page_of,
    run_case,
)
from fullshard.errors import ConfigError

CONTRACT = {"name", "strategy", "step_time_s", "tokens_per_s", "memory_peak_bytes"}


@pytest.fixture
def result(monkeypatch):
    """Returns a function that measures the tiny case; ranks return constant figures."""
    speeds = {"fullshard": 0.6, "fsdp2": 1.0, "floor": 0.5}

    def measure(others=0.0, became_idle=True, **losses):
        def run_ranks(_, job, num_ranks, **__):
            if job.mode == "memory":
                return [{"memory_peak_bytes": size * 2**20} for size in (3, 2)]
            same = {"cpu_times_s": {name: [0.4] for name in speeds}, "prefetch": {"fsdp2": 1}}
            same["pilot_s"] = {}
            same["losses"] = {name: losses.get(name, [8.0, 7.5]) for name in speeds}
            times = {name: [s * x for x in (1.0, 1.5, 0.9)] for name, s in speeds.items()}
            return [same | {"times_s": times}] * num_ranks

        monkeypatch.setattr(step, "run_ranks", run_ranks)
        peers, _ = installed_peers(tuple(speeds))
        found = run_case(CASES["tiny"], peers, StepOptions(), lambda _: None)
        found.neighbours.share, found.neighbours.became_idle = others, became_idle
        return found

    return measure


def page(found):
    return page_of([found], ("deepspeed",), "fullshard x")


def test_every_row_has_the_contracts_keys_and_numbers(result):
    rows = page(result()).rows
    assert [row["name"] for row in rows] == ["fullshard", "fsdp2", "floor"]
    for row in rows:
        assert row.keys() >= CONTRACT
    assert rows[0]["step_time_s"] == 0.6
    assert rows[0]["tokens_per_s"] == pytest.approx(2 * 2 * 16 / 0.6)
    assert rows[0]["memory_peak_bytes"] == 3 * 2**20
    assert rows[0]["ratio_to_fsdp2"]["value"] == pytest.approx(0.6)
    assert rows[2]["loss_difference"] is None


def test_the_json_object_is_plain_and_lists_what_is_absent(result):
    found = json.loads(json.dumps(page(result()).to_dict()))
    assert found["absent"] == ["deepspeed"]
    assert {"machine", "versions", "command", "method", "schema_version"} <= found.keys()
    assert found["cases"][0]["removed_share"]["value"] == pytest.approx(0.8)
    assert found["cases"][0]["times_s"]["fsdp2"] == [1.0, 1.5, 0.9]


def test_the_page_shows_every_engine_the_command_and_what_is_absent(result):
    found = page(result())
    text = found.to_markdown()
    for words in (
        "fullshard x",
        "deepspeed",
        "fsdp2 (prefetch 1)",
        "| floor |",
        "| 3 |",
        "0.600",
        "idle",
    ):
        assert words in text
    assert all(len(cells) == len(COLUMNS) for cells in found.cells)


@pytest.mark.parametrize(("others", "became_idle"), [(0.5, True), (0.0, False)])
def test_figures_of_a_busy_machine_are_marked(result, others, became_idle):
    busy = result(others, became_idle)
    assert all(row["loaded"] for row in page(busy).to_dict()["rows"])
    assert "LOADED" in page(busy).to_markdown()
    assert not any(row["loaded"] for row in page(result()).rows)


@pytest.mark.parametrize("wrong", [1e-3, math.nan])
def test_an_engine_with_other_losses_is_named_and_marked(result, wrong):
    found = result(fullshard=[8.0, 7.5 * (1 + wrong)])
    (error,) = loss_errors(found)
    assert error.startswith("tiny: losses of fullshard: expected")
    assert [row["equal_losses"] for row in page(found).rows] == [False, True, True]
    json.dumps(page(found).to_dict(), allow_nan=False)
    assert "Do not compare its speed" in page(found).to_markdown()


def test_rounding_in_the_losses_passes(result):
    assert loss_errors(result(fullshard=[8.0, 7.5 + 1e-6])) == []


def test_losses_are_compared_with_fsdp2_in_any_row():
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
    monkeypatch.setattr("fullshard.bench.step.find_spec", lambda name: name == "torch" or None)
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
def test_a_case_has_the_number_of_parameters_of_its_model(name, numel):
    import torch

    from fullshard.bench.engines import GPT

    assert CASES[name].numel == numel
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(CASES[name]).parameters()) == numel


@pytest.mark.parametrize(("own_s", "others"), [(5.0, 0.1), (7.0, 0.0)])
def test_the_load_of_others_excludes_our_own_time(monkeypatch, own_s, others):
    """Ten seconds of two cores, 60 % of which are used."""
    walls, owns = iter([0.0, 10.0]), iter([0.0, 2 * own_s])
    cores = SimpleNamespace(cpu_percent=lambda: 60.0, cpu_count=lambda: 2)
    monkeypatch.setattr(measurement, "psutil", cores)
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(walls)))
    monkeypatch.setattr(measurement, "os", SimpleNamespace(times=lambda: [next(owns), 0, 0, 0]))
    with measurement.Neighbours() as neighbours:
        pass
    assert neighbours.share == pytest.approx(others)
