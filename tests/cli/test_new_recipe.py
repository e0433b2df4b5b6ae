"""A recipe is a folder and a line of the registry: its command and what it refuses come with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fullshard

PACKAGE = Path(fullshard.__file__).parent
COMMAND = """
from fullshard.config.problems import Problem
from fullshard.recipes.registry import RecipeCommand

def check(config, command):
    if config.training.max_steps == 7:
        yield Problem("training.max_steps", "another number of steps", "7")

COMMAND = RecipeCommand(check=check)
"""
HELP = '"""Prefer the better of two answers."""\nEXAMPLE = "model=FOLDER"\n'


def test_a_folder_and_a_line_make_a_command(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fullshard", ignore=shutil.ignore_patterns("__pycache__"))
    recipes = tmp_path / "fullshard" / "recipes"
    (recipes / "dpo").mkdir()
    (recipes / "dpo" / "__init__.py").write_text(HELP)
    (recipes / "dpo" / "command.py").write_text(COMMAND)
    registry = (recipes / "registry.py").read_text()
    line = '    SFT = "sft", "sft"\n'
    assert line in registry
    (recipes / "registry.py").write_text(registry.replace(line, line + '    DPO = "dpo", "dpo"\n'))

    def fullshard_(*words):
        done = subprocess.run(
            [sys.executable, "-m", "fullshard", *words],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    assert "Prefer the better of two answers." in fullshard_("--help")[1]
    code, said = fullshard_("dpo", "max_steps=7", "teacher=x", "sft.packing=true")
    assert code == 2, said
    assert "command line: max_steps: expected another number of steps, got 7" in said
    assert "teacher: applies to `fullshard distill` only" in said
    assert "sft: applies to `fullshard sft` only" in said
