"""Questions and answers that ship with every Python: its library's own docstrings.

The sources are parsed and never imported, since importing some modules does things.
"""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST, LONGEST = 20, 160  # characters of an answer: one sentence
SEED = 0


def question_answers() -> list[tuple[str, str]]:
    """("What does textwrap.dedent do?", its docstring's first sentence), shuffled; a few
    thousand."""
    found = sorted(set(_all()))
    random.Random(SEED).shuffle(found)
    return found


def _all() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py")):
        if file.name.startswith("_"):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from _of_body(tree.body, file.stem)


def _of_body(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        answer = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
        if SHORTEST <= len(answer) <= LONGEST:
            what = "is" if isinstance(node, ast.ClassDef) else "does"
            yield f"What {what} {name}{'' if what == 'is' else ' do'}?", answer
        if isinstance(node, ast.ClassDef):
            yield from _of_body(node.body, name)
