"""A bench command says how long it takes, as measured when it last ran on this machine."""

from __future__ import annotations

import json

import pytest

from fullshard.cli import bench


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "SHORTEST_S", 0.0)
    return tmp_path / "fullshard" / "bench_times.json"


def test_the_second_run_says_what_the_first_has_measured(cache, capsys):
    with bench.timed("bench io", 200.0, None):
        pass
    assert capsys.readouterr().err.startswith("bench io: about 3 min 20 s (an estimate")
    assert json.loads(cache.read_text())["bench io"] < 0.01
    cache.write_text(json.dumps({"bench io": 0.25, "bench comm": 3.0}))
    with bench.timed("bench io", 400.0, None):  # twice the work
        pass
    assert capsys.readouterr().err == "bench io: about 1 min 40 s (as measured here before).\n"
    assert json.loads(cache.read_text())["bench comm"] == 3.0


def test_a_run_that_failed_or_was_dry_measures_nothing(cache, capsys, monkeypatch):
    with pytest.raises(ZeroDivisionError), bench.timed("bench io", 1.0, None):
        raise ZeroDivisionError
    monkeypatch.setattr(bench, "SHORTEST_S", 60.0)
    with bench.timed("bench io", 1.0, None):
        pass
    assert not cache.exists() or not cache.read_text()
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("[torn")
    with bench.timed("bench io", 1.0, None):
        pass
    assert "an estimate" in capsys.readouterr().err
