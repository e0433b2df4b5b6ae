"""A new recipe is a folder and a registry line; its command and its checks follow from them."""

import os
import shutil
from pathlib import Path

import fullshard
from support.processes import python

PACKAGE = Path(fullshard.__file__).parent
RECIPE = '''"""Prefer the better of two answers."""
from fullshard.config.values import Problem
from fullshard.recipes.registry import RecipeCommand

def check(config, command):
    if config.training.max_steps == 7:
        yield Problem("training.max_steps", "another number of steps", "7")

EXAMPLE = "model=FOLDER"
COMMAND = RecipeCommand(check=check)
'''


def test_a_folder_and_a_registry_line_make_a_command(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fullshard", ignore=shutil.ignore_patterns("__pycache__"))
    recipes = tmp_path / "fullshard" / "recipes"
    (recipes / "dpo").mkdir()
    (recipes / "dpo" / "__init__.py").write_text(RECIPE)
    registry = (recipes / "registry.py").read_text()
    line = '    SFT = "sft", "sft"\n'
    assert line in registry
    (recipes / "registry.py").write_text(registry.replace(line, line + '    DPO = "dpo", "dpo"\n'))

    def said_by(*words, code):
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = python("-m", "fullshard", *words, cwd=tmp_path, env=env, code=code)
        return done.stdout + done.stderr

    assert "Prefer the better of two answers." in said_by("--help", code=0)
    said = said_by("dpo", "max_steps=7", "teacher=x", "sft.packing=true", code=2)
    assert "command line: max_steps: expected another number of steps, got 7" in said
    assert "teacher: applies to `fullshard distill` only" in said
    assert "sft: applies to `fullshard sft` only" in said
