"""Runs the command line as a separate process, and `fullshard plan` in this one."""

import json
import os
import sys
from pathlib import Path

import pytest

from fullshard.cli.app import invoke
from support import forked
from support.traces import traced_once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _traces():
    with traced_once():
        yield


@pytest.fixture
def fullshard():
    """`fullshard("plan", "x.yaml", code=0)` runs `python -m fullshard plan x.yaml` at the root."""

    def run(*words, code=None):
        done = forked.run(
            [sys.executable, "-W", "error", "-m", "fullshard", *words],
            env={**os.environ, "COLUMNS": "100"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60.0,
        )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """`plan(*words)` returns the JSON of a plan and the exit code; no calibration is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)

    def plan(*words):
        outcome = invoke(["plan", *map(str, words)])
        return json.loads(json.dumps(outcome.result)), outcome.exit_code

    return plan
