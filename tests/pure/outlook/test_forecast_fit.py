"""The forecast's constants come from the fit; scores see no answer and split no group."""

import importlib

import numpy as np
import pytest

from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.published import DROPPED, read_workload


@pytest.fixture
def fitting():
    return importlib.import_module("benchmarks.forecast_fit")


@pytest.fixture
def baselines(fitting):
    return importlib.import_module("benchmarks.forecast_baselines")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["speed", "memory"])
def test_a_fit_from_the_middle_of_the_bounds_finds_the_committed_constants(fitting, what):
    middle = {
        name: (low * high) ** 0.5 if low else (low + high) / 2
        for name, (low, high) in fitting.BOUNDS.items()
    }
    found = fitting.samples(what, fitting.read_rows())
    fitted = fitting.fit(what, found, Constants(**middle))
    moved = fitting.errors(what, found, fitted) - fitting.errors(what, found, FITTED)
    assert np.median(np.abs(moved)) < 0.002


@pytest.mark.parametrize("what", ["speed", "memory"])
def test_a_group_is_left_out_whole(fitting, what):
    found = fitting.samples(what, fitting.read_rows())
    folds = fitting.folds(found)
    assert set(folds) == set(range(fitting.FOLDS))
    parts = {(one.group, fold) for one, fold in zip(found, folds, strict=True)}
    assert len(parts) == len({one.group for one in found})


def test_features_of_boosted_trees_contain_no_answer(fitting, baselines):
    for row in fitting.read_rows()[::40]:
        blank = {key: "" if key in DROPPED else value for key, value in row.items()}
        whole, stripped = (
            baselines.features(fitting.Sample(one, read_workload(one), measured))
            for one, measured in ((row, 1.0), (blank, 2.0))
        )
        assert whole == stripped


def test_without_scikit_learn_there_are_no_boosted_trees(fitting, baselines, monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda _: None)
    found = fitting.samples("memory", fitting.read_rows())
    assert baselines.boosted_trees("memory", found) is None


def test_boosted_trees_are_the_same_each_time_and_better_than_one_number(fitting, baselines):
    pytest.importorskip("sklearn")
    found = fitting.samples("memory", fitting.read_rows())
    first, second = (baselines.boosted_trees("memory", found) for _ in range(2))
    assert np.array_equal(first, second)
    measured = np.log([one.measured for one in found])
    assert np.median(np.abs(first)) < np.median(np.abs(measured - np.median(measured)))
