"""Counts the files that a reader of one step opens."""

import re
from pathlib import Path

import pytest

from support.processes import python

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_step_passes_through_as_many_files_as_the_docs_say():
    done = python(ROOT / "tools" / "count_path.py")
    found = {name: int(files) for name, files in re.findall(r"(\w+) +(\d+) files", done.stdout)}
    page = (ROOT / "docs" / "architecture.md").read_text()
    said = re.search(r"run through (\d+) files.*?FSDP2's pass through (\d+)", page, re.DOTALL)
    ours, torchs = map(int, said.groups())
    assert found == {"c10d": ours, "shared": ours, "FSDP2": torchs}
    assert ours <= 12
