"""Tests of the checks of `make lint`, which runs them."""

import json
import textwrap

import pytest

import check_collectives
import check_docs
import check_repository
import check_sizes
import readme_table


def _function(num_lines, docstring_lines=0):
    text = ['    """', *["    drawn"] * (docstring_lines - 2), '    """'] if docstring_lines else []
    return "\n".join(["def long():", *text, *["    a = 1"] * (num_lines - 1)]) + "\n"


def _class(num_methods):
    return "class Big:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(num_methods))


def test_a_function_a_file_and_a_class_above_its_limit_is_found():
    limits = {_function: 60, "a = 1\n".__mul__: 700, _class: 25}
    for make, most in limits.items():
        assert check_sizes.check_source(make(most), "a.py") == []
        assert len(check_sizes.check_source(make(most + 1), "a.py")) == 1
    drawn = _function(60, docstring_lines=30)
    assert check_sizes.check_source(drawn, "a.py") == []


def test_code_lines_leave_out_blank_lines_comments_and_docstrings_but_not_strings():
    source = '"""Doc.\n\nMore."""\n\n# why\ndef f():\n    """Doc."""\n    return """a\nb"""  # c\n'
    assert check_sizes.code_lines(source) == 3


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed as d\nd.all_gather_into_tensor(o, x)",
        "from torch.distributed import reduce_scatter_tensor as rs\nrs(o, x)",
        "from torch.distributed import _functional_collectives as f\nf.all_reduce(x, 'sum', g)",
        "def f(group, x):\n    return group.allreduce(x)",
        "from fullshard.transport._torch_compat import all_gather_single as g\ng(o, x)",
        "import torch.distributed as dist\nops = {'sum': dist.all_reduce}",
    ],
)
def test_a_collective_is_found_under_every_spelling(source):
    assert len(check_collectives.check_source(textwrap.dedent(source), "a.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.get_rank(); dist.is_initialized()",
        "import functools\nfunctools.reduce(f, xs)",
        "sock.send(b''); x.gather(0, index); x.scatter(0, index, y)",
        "from fullshard.transport import all_reduce\nall_reduce(x)",
    ],
)
def test_what_is_no_collective_of_torch_is_left_alone(source):
    assert check_collectives.check_source(source, "a.py") == []


def test_code_above_a_budget_is_found_and_tests_do_not_count():
    most = check_sizes.BUDGETS["in all"]
    assert check_sizes.check_budgets({"errors": most, "tests": most}) == []
    assert len(check_sizes.check_budgets({"errors": most, "launch": 1})) == 1


def test_two_classes_of_one_name_are_found():
    sources = {"a.py": "class Place: ...\n", "b.py": "\nclass Place: ...\nclass Slot: ...\n"}
    (found,) = check_sizes.check_names(sources)
    assert str(found) == "b.py:2: Place: expected one class of this name, got another in a.py:1"


CODE = "LIMIT = 3\n\nclass Unit:\n    plan: int\n\n    def gather(self):\n        self.fetch = 1\n"


def _wrong_names(root, page, text):
    """Returns what check_docs finds in a page of a repository with one module."""
    module = root / check_docs.PACKAGE / "engine" / "unit.py"
    module.parent.mkdir(parents=True)
    module.write_text(CODE)
    (root / page).parent.mkdir(parents=True, exist_ok=True)
    (root / page).write_text(text)
    names = check_docs.Names(root / check_docs.PACKAGE)
    return check_docs.check_page(root / page, root, names)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`Unit.gather`, `Unit.fetch`, `Unit.plan` and `LIMIT` in `engine/unit.py`", ""),
        ("`Unit.gathr` in `engine/unit.py`", "Unit.gathr in unit.py"),
        ("`Unit` and `LIMITS` in `engine/unit.py`", "LIMITS in unit.py"),
        ("`Unit` in\n`engine/unit.py`, the `Group`", "Group in the package"),
        ("`engine/units.py`", "file engine/units.py"),
        ("`engine/{unit,step}.py`", "file engine/step.py"),
        ("`src/fullshard/engine/unit.py`, `gather()`, `models/mine.py`", ""),
        ("```python\nimport engine/nothing.py\n```", ""),
    ],
)
def test_what_a_page_names_must_be_in_the_code(tmp_path, text, wrong):
    found = _wrong_names(tmp_path, check_docs.ARCHITECTURE, text)
    assert bool(found) == bool(wrong), found
    assert not wrong or any(wrong in line for line in found)


def test_a_docstring_that_names_a_file_that_has_gone_is_found(tmp_path):
    page = f"{check_docs.PACKAGE}/engine/step.py"
    text = '"""See engine/slots.py."""\n\n# as in engine/unit.py\n'
    (line,) = _wrong_names(tmp_path, page, text)
    assert line == f"{page}:1: expected a file engine/slots.py; there is none"


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("a.py", "a = 1\n# \u2026\n", "a.py:2: expected ASCII"),
        ("a.md", "\u2026\n", None),
        ("a.md", "a\nsee /ho" + "me/x", "a.md:2: expected no path of a machine"),
        ("a.md", "pyp" + "i.org", "a.md:1: expected no host of a package registry"),
        ("a.md", "a\0", "a.md:1: expected text, got a binary file"),
        ("a.svg", "a" * 1_000_001, "a.svg:1: expected at most 1,000,000 bytes, got 1,000,001"),
        ("test_a.py", "def test_it_works(): ...", "a name of at least four words"),
        ("test_a.py", "def test_that_it_works(): ...", None),
    ],
)
def test_what_no_file_may_hold_is_found(path, text, said):
    found = list(check_repository.check_file(path, text.encode()))
    assert found == [] if said is None else said in found[0], found


def test_a_link_or_image_of_a_page_to_nothing_is_found(tmp_path):
    (tmp_path / "b.md").touch()
    text = "[b](b.md) [c](https://c) [d](#d)\n![e](e.svg)"
    found = list(check_repository.check_links("a.md", text, tmp_path))
    assert found == ["a.md:2: expected a file e.svg; there is none"]


def test_dependencies_that_are_not_imported_declared_or_pinned_are_found():
    used = check_repository.imported(
        iter(["import yaml, sys, fullshard", "from numpy.linalg import x"])
    )
    assert used == {"pyyaml", "numpy"}
    extras = dict.fromkeys(check_repository.EXTRAS, ()) | {"test": ["pytest>=8"]}
    project = {"dependencies": ["torch>=2", "numpy"], "optional-dependencies": extras}
    pins = "torch==2\nnumpy>=1\n"
    assert len(list(check_repository.check_dependencies(project, used, pins))) == 4


def test_a_target_of_make_that_the_help_lacks_is_found():
    makefile = '.PHONY: help a b\nhelp:\n\t@echo "make a  does it"\n'
    assert len(list(check_repository.check_targets(makefile))) == 1


OURS = {
    "case": "29M",
    "num_ranks": 2,
    "name": "fullshard",
    "step_time_s": 0.3154,
    "ratio_to_fsdp2": {"value": 0.701, "low": 0.69, "high": 0.7149},
    "memory_peak_bytes": 300 * 2**20,
    "loaded": False,
}
PEER = OURS | {"name": "fsdp2", "memory_peak_bytes": 400 * 2**20}
FLOOR = OURS | {"name": "floor", "ratio_to_fsdp2": None, "memory_peak_bytes": None}
RESULTS = {
    "rows": [OURS, PEER, FLOOR],
    "machine": {"cores": 2, "vector_flags": ["avx2", "avx512f"]},
    "versions": {"torch": "2.13.0"},
    "command": "fullshard bench step",
}
README = "Before.\n\n<!-- results: r.json -->\nold\n<!-- end of results -->\n\nAfter.\n"


def _filled(folder, results):
    if results is not None:
        (folder / "r.json").write_text(json.dumps(results))
    return readme_table.filled(README, folder)


def test_a_row_shows_time_ratio_with_interval_and_memory(tmp_path):
    lines = _filled(tmp_path, RESULTS).splitlines()
    assert "| 29M, 2 ranks | 315 ms | 0.70 [0.69, 0.71] | 300 MiB | 0.75 |" in lines
    assert sum(line.startswith("| 29M") for line in lines) == 1


def test_what_stood_in_the_table_is_replaced_and_the_rest_is_kept(tmp_path):
    text = _filled(tmp_path, RESULTS)
    assert "old" not in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert readme_table.filled(text, tmp_path) == text


def test_command_machine_and_versions_stand_under_the_table(tmp_path):
    text = _filled(tmp_path, RESULTS)
    assert "`fullshard bench step`; machine: cores 2, vector flags avx2 avx512f" in text
    assert "versions: torch 2.13.0." in text


def test_figures_of_a_machine_that_others_used_are_marked(tmp_path):
    assert "loaded" not in _filled(tmp_path, RESULTS).lower()
    loaded = RESULTS | {"rows": [OURS | {"loaded": True}, PEER]}
    assert "| 315 ms (loaded) |" in _filled(tmp_path, loaded)


def test_missing_results_are_said_to_be_missing(tmp_path):
    assert readme_table.NO_RESULTS in _filled(tmp_path, None)
