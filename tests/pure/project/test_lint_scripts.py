"""The scripts of `make lint` find what they are for."""

import textwrap

import pytest

import check_collectives
import check_docs
import check_sizes


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
    """What the script finds in a page of a repository whose package has one module."""
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
