"""Checks the limits of size and prints the lines of code of each package.

    a file       <= 700 lines, blank lines and comments included
    a function   <=  60 lines, without its docstring and decorators
    a class      <=  25 methods, and a name that no other top-level class has

The compat interfaces are exempt from the limits, because torch defines their shape; their lines
count. Totals count lines of code: no blank lines, comments or docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_METHODS = 25
CHECKED = ("src", "tests", "tools", "benchmarks", "examples", "docs")
EXEMPT = ("src/fullshard/compat/",)
TORCHS_NAMES = ("src/fullshard/compat/fsdp1/", "src/fullshard/compat/fsdp2/")
# Most lines of code of a package, and of all together. The goal is 30,000: lower a number when code
# is removed; if you raise one, add to docs/log.md what the lines bought. " + " joins packages that
# share a budget.
BUDGETS = {
    "bench": 1_652,
    "config": 3_443,
    "cli": 2_082,
    "engine + transport": 9_145,
    "planner + outlook": 4_278,
    "data + models + recipes + run + verify": 9_719,
    "observe + launch": 3_515,
    "compat + integrations": 3_037,
    "xla + jax + xla_state": 3_099,
    "checkpoint + formats": 3_010,
    "in all": 44_067,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Finding:
    """A broken limit, and its place."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def docstring_of(node: ast.AST) -> ast.Expr | None:
    """Returns the docstring of a module, class or function, as a statement."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body:
        return None
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def num_lines(node: ast.stmt) -> int:
    """Counts the lines of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def code_lines(source: str) -> int:
    """Counts lines of code: a string of five lines counts five, a docstring none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        text = docstring_of(node)
        if text is not None:
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def check_source(source: str, path: str) -> list[Finding]:
    """Returns what exceeds the limits in one file."""
    found = []
    total = len(source.splitlines())
    if total > MAX_FILE_LINES:
        found.append(Finding(path, 1, f"expected a file of <= {MAX_FILE_LINES} lines, got {total}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            text = docstring_of(node)
            length = num_lines(node) - (num_lines(text) if text else 0)
            if length > MAX_FUNCTION_LINES:
                what = f"{node.name}: expected <= {MAX_FUNCTION_LINES} lines, got {length}"
                found.append(Finding(path, node.lineno, what))
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(child, Function) for child in node.body)
            if methods > MAX_METHODS:
                what = f"{node.name}: expected <= {MAX_METHODS} methods, got {methods}"
                found.append(Finding(path, node.lineno, what))
    return found


def package_of(path: str) -> str:
    """Returns where a file's code is counted: a package of fullshard, or a top-level folder."""
    parts = path.split("/")
    if parts[:2] == ["src", "fullshard"]:
        name = parts[2].removesuffix(".py")
        budgeted = " + ".join(BUDGETS).split(" + ")
        return name if len(parts) > 3 or name in budgeted else "(top level)"
    return parts[0]


def print_totals(totals: dict[str, int]) -> None:
    """Prints the lines of code and the budget of each package, those of fullshard first."""
    outside = [name for name in CHECKED if name in totals]
    inside = sorted((name for name in totals if name not in outside), key=lambda n: -totals[n])
    rows = [(name, totals[name]) for name in inside]
    rows.extend((name, lines) for name, lines in sums(totals).items() if name not in totals)
    rows.extend((f"{name}/", totals[name]) for name in outside)
    for name, lines in rows:
        budget = f"   of {BUDGETS[name]:>6,}" if name in BUDGETS else ""
        print(f"  {name:<18}{lines:>7,} lines of code{budget}")


def sums(totals: dict[str, int]) -> dict[str, int]:
    """Returns the lines of code of each entry of BUDGETS."""
    inside = {name: lines for name, lines in totals.items() if name not in CHECKED}
    return {
        name: sum(inside.values())
        if name == "in all"
        else sum(inside.get(part, 0) for part in name.split(" + "))
        for name in BUDGETS
    }


def check_budgets(totals: dict[str, int]) -> list[Finding]:
    """Returns the packages that exceed their budget."""
    return [
        Finding(
            "src/fullshard",
            1,
            f"{name}: expected <= {BUDGETS[name]:,} lines of code, got {lines:,}",
        )
        for name, lines in sums(totals).items()
        if lines > BUDGETS[name]
    ]


def check_names(sources: dict[str, str]) -> list[Finding]:
    """Classes of fullshard whose name another one has; the facades have torch's names."""
    first: dict[str, str] = {}
    found = []
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                where = f"{path}:{node.lineno}"
                if (other := first.setdefault(node.name, where)) != where:
                    what = f"{node.name}: expected one class of this name, got another in {other}"
                    found.append(Finding(path, node.lineno, what))
    return found


def main(root: Path) -> int:
    """Checks the Python files in the folders CHECKED; returns 1 if a limit is broken."""
    totals: dict[str, int] = defaultdict(int)
    found: list[Finding] = []
    inside: dict[str, str] = {}
    for folder in CHECKED:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            source = file.read_text(encoding="utf-8")
            totals[package_of(path)] += code_lines(source)
            if not path.startswith(EXEMPT):
                found.extend(check_source(source, path))
            if folder == "src" and not path.startswith(TORCHS_NAMES):
                inside[path] = source
    print_totals(totals)
    for finding in (found := found + check_names(inside) + check_budgets(totals)):
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
