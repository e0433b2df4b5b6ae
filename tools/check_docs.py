"""Checks that files and names of the code that the documentation mentions exist.

    `engine/unit.py`                    a file below src/fullshard/ or the repository
    `Unit.gather` in `engine/unit.py`   the file defines the name; `a` and `b` in ... checks both
    `Scheduler`, `judge()`              some file of the package defines the name (architecture.md),
                                        also `kept` in the first column of a table

Paths are checked in all pages and in the docstrings and comments of the package. Pages that report
the past (the log, decisions, the changelog) are not checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/migrate/*.md")
THE_PAST = ("docs/log.md",)
ARCHITECTURE = "docs/architecture.md"
PACKAGE = "src/fullshard"
# Names in architecture.md that other packages define.
FOREIGN = {"DTensor", "NaN", "TrainingArguments"}

_PART = r"(?:\w|\{\w+(?:,\w+)+\})+"
_PATH = re.compile(rf"(?<![\w./-])((?:{_PART}/)+{_PART}\.py)\b")
_NAME = r"`\.?([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`"
_PLACED = re.compile(rf"{_NAME}(?:(?:, | and |, and ){_NAME})* in `([\w./{{}},]+\.py)`")
_NAMED = re.compile(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)*|_?[a-z]\w*\(\))`")
_ROW = re.compile(r"^\| `(_?[a-z]\w*)` \|", re.M)  # a table of attributes in architecture.md
_FENCED = re.compile(r"^```.*?^```", re.S | re.M)
# Files of users and of other tools that pages show as examples.
_NOT_OURS = re.compile(r"^(?:models?|runs?|path|my|your|utils|torch|transformers)/")


@dataclass
class Names:
    """Names that the modules of a package define.

    Args:
        root: Folder of the package.
    """

    root: Path
    _of_file: dict[Path, set[str]] = field(default_factory=dict[Path, set[str]])

    def of(self, file: Path) -> set[str]:
        """Returns the names that a file defines: functions, classes, constants, members."""
        if file not in self._of_file:
            self._of_file[file] = defined_in(file.read_text(encoding="utf-8"))
        return self._of_file[file]

    @cached_property
    def all(self) -> set[str]:
        """Names that all modules define."""
        return set[str]().union(*(self.of(file) for file in self.root.rglob("*.py")))


def defined_in(source: str) -> set[str]:
    """Returns what a module defines: `f`, `Class`, `Class.member` (methods, fields, `self.x`)."""
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found.update(f"{node.name}.{member}" for member in _members(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body:
            found.update(_assigned(node))
    return found


def _members(of: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.update(_assigned(node))
    return found


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Returns the names and attributes on the left side of an assignment."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def expanded(path: str) -> list[str]:
    """Returns the paths that a pattern stands for: `a/{b,c}.py` is `a/b.py` and `a/c.py`."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def file_of(path: str, root: Path, beside: Path) -> Path | None:
    """Returns the file of a path relative to the package, the repository or the page."""
    for folder in (root / PACKAGE, root, beside):
        if (folder / path).is_file():
            return folder / path
    return None


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def check_page(page: Path, root: Path, names: Names) -> list[str]:
    """Returns a line for each file or name that a page or module mentions and that is missing."""
    text = page.read_text(encoding="utf-8")
    found = []
    if page.suffix == ".md":
        text = _FENCED.sub(
            lambda block: "\n" * block[0].count("\n"), text
        )  # lines keep their number
        found += _wrong_places(text, page, root, names)
    found += _wrong_paths(text, page, root)
    if page == root / ARCHITECTURE:
        known = names.all | {name.rpartition(".")[2] for name in names.all} | FOREIGN
        found += [
            (match.start(), f"expected {match[1]} in the package; it is missing")
            for match in (*_NAMED.finditer(text), *_ROW.finditer(text))
            if match[1].removesuffix("()") not in known
        ]
    path = page.relative_to(root)
    return [f"{path}:{_line(text, place)}: {what}" for place, what in sorted(found)]


def _wrong_paths(text: str, page: Path, root: Path) -> Iterator[tuple[int, str]]:
    for match in _PATH.finditer(text):
        for path in expanded(match[1]):
            if not _NOT_OURS.match(path) and file_of(path, root, page.parent) is None:
                yield match.start(), f"expected a file {path}; there is none"


def _wrong_places(text: str, page: Path, root: Path, names: Names) -> Iterator[tuple[int, str]]:
    for match in _PLACED.finditer(text):
        file = file_of(match[match.lastindex or 0], root, page.parent)
        for name in re.findall(_NAME, match[0].rpartition(" in ")[0]):
            if file is not None and name not in names.of(file):
                yield match.start(), f"expected {name} in {file.name}; it is missing"


def main(root: Path) -> int:
    """Checks pages and modules; returns 1 if a file or name is missing."""
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    pages = [page for page in pages if page.relative_to(root).as_posix() not in THE_PAST]
    modules = sorted((root / PACKAGE).rglob("*.py"))
    names = Names(root / PACKAGE)
    found = [line for page in (*pages, *modules) for line in check_page(page, root, names)]
    print(f"  {len(pages)} pages and {len(modules)} modules checked, {len(found)} wrong names")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
