"""What every file of the repository keeps to, whatever is in it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_BYTES = 1_000_000
# A character class around a letter keeps these patterns from finding themselves.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:ho[m]e|ro[o]t|wo[r]k|fa[r]m|Use[r]s)/\w")
REGISTRY_HOSTS = re.compile(r"pyp[i]\.org|pythonhoste[d]|download\.pytorc[h]|index-ur[l]", re.I)


def _tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: run `make test` in one")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _lines_with(pattern):
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in _tracked()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_every_file_is_text():
    binary = [str(file.relative_to(ROOT)) for file in _tracked() if b"\0" in file.read_bytes()]
    assert binary == []


def test_no_file_is_above_one_megabyte():
    assert [file for file in _tracked() if file.stat().st_size > MAX_BYTES] == []


def test_no_file_names_a_path_of_somebodys_machine():
    assert _lines_with(MACHINE_PATHS) == []


def test_no_file_names_the_host_of_a_package_registry():
    assert _lines_with(REGISTRY_HOSTS) == []


def test_python_files_are_ascii():
    found = []
    for file in _tracked():
        if file.suffix == ".py":
            text = file.read_text(encoding="utf-8")
            found += [
                f"{file.relative_to(ROOT)}: {line}"
                for line in text.splitlines()
                if not line.isascii()
            ]
    assert found == []


def test_every_package_of_tests_and_source_has_sentences_for_names():
    """A test's name says what holds, so it has at least four words."""
    names = [
        name
        for file in _tracked()
        if file.name.startswith("test_") and file.suffix == ".py"
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", file.read_text(), re.M)
    ]
    assert names
    assert [name for name in names if name.count("_") < 3] == []
