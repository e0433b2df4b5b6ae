"""The steps of `make gpu` run on a CPU, also without packages that a GPU machine may lack."""

import json
import os
import sys
from pathlib import Path

import pytest

from support.processes import finished, python

HERE = Path(__file__).parent
WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("omegaconf", "typer", "rich", "yaml", "jinja2", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
del sys.argv[:1]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.timeout(600)  # takes a minute on an idle machine
def test_all_steps_of_make_gpu_run_on_a_cpu_with_few_packages(tmp_path):
    out = tmp_path / "gpu.json"
    words = ("-c", WITHOUT, HERE / "run.py", "--device", "cpu", "--out", out)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    python(*words, env=environment, timeout=590)
    rows = json.loads(out.read_text())["steps"]
    skipped = [row for row in rows if row["status"] != "ok"]
    assert len(rows) - len(skipped) == 28
    assert {(row["status"], row["why"]) for row in skipped} == {
        ("skipped", "needs CUDA"),
        ("skipped", "needs typer, which make gpu-wheels downloads"),
        ("skipped", "needs yaml and rich, which make gpu-wheels downloads"),
    }


@pytest.mark.long
def test_a_run_of_make_gpu_trains_on_a_cpu(tmp_path):
    words = ("--device", "cpu", "--only", "updates of a run", "--out", tmp_path / "gpu.json")
    python(HERE / "run.py", *words, timeout=120)
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert row["status"] == "ok", row["why"]


@pytest.mark.long
def test_without_a_gpu_make_gpu_fails_with_an_error():
    command = ("make", "-C", HERE.parents[1], "gpu", f"GPU_PYTHON={sys.executable}")
    done = finished(*command, code=2)
    assert "sees no GPU" in done.stderr
