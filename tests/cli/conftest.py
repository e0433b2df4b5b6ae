"""Running the command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fullshard() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`fullshard("plan", "x.yaml")` runs `python -m fullshard plan x.yaml` in the root folder."""

    def run(*words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "fullshard", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
