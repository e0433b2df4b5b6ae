"""What is declared and what is imported are the same; the make targets are those of the docs."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from support.processes import finished, python

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Import name -> the requirement that brings it, where they differ.
DISTRIBUTIONS = {
    "huggingface_hub": "transformers",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
# Rivals: imported where they are installed, never required.
OPTIONAL = {"deepspeed", "megatron_fsdp"}
EXTRAS = ("hf", "data", "jax", "lightning", "lora", "stores", "trainer")


def _name(requirement):
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _declared(*groups):
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[group] for group in groups)]
    return {_name(requirement) for one in lists for requirement in one} - {"fullshard"}


@cache
def _imported():
    found: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"fullshard"}


def test_every_imported_library_is_a_declared_dependency():
    declared = _declared(*EXTRAS)
    missing = {
        name
        for name in _imported() - OPTIONAL
        if DISTRIBUTIONS.get(name, name).replace("_", "-") not in declared
    }
    assert missing == set()


def test_every_declared_dependency_is_imported():
    used = {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in _imported()}
    assert _declared(*EXTRAS) - used == set()


def test_every_requirement_of_the_project_has_an_exact_pin():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+]+", pin)] == []
    assert _declared(*PROJECT["optional-dependencies"]) - {_name(pin) for pin in pins} == set()


def test_every_make_target_that_the_help_lists_exists():
    targets = re.findall(r"^make ([a-z-]+)", finished("make", "help", cwd=ROOT).stdout, re.M)
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    assert sorted(targets) == sorted(set(phony.group(1).split()) - {"help"})


def test_importing_the_package_imports_no_array_library():
    code = (
        "import sys, fullshard, fullshard.config.load, fullshard.planner\n"
        "print(*sorted({'torch', 'jax', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.split() == []
