"""Removes one statement at a time; a statement is needless or untested if no test fails then."""

import ast
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A removed call: a whole statement, or an event, which is replaced by one that marks nothing.

    Attributes:
        module: Name of its module.
        function: Qualified name of the outermost function that contains it.
        line: Its line.
        text: Its code.
    """

    module: str
    function: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.text}"

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Context in which the function lacks the statement."""
        module = sys.modules[self.module]
        tree = ast.parse(_source(module))
        _LeaveOut(self.line, self.text).visit(tree)
        code = _code_of(compile(tree, str(module.__file__), "exec"), self.function)
        function = _function(module, self.function)
        before, function.__code__ = function.__code__, code
        try:
            yield
        finally:
            function.__code__ = before


def calls_of(module: ModuleType, names: Collection[str]) -> list[Mutant]:
    """Returns all statements that call a method of these names, and all untimed events."""
    found: list[Mutant] = []

    def visit(node: ast.AST, owners: tuple[str, ...], function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner, outermost = owners, function
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = (*owners, child.name)
                if isinstance(child, ast.FunctionDef):
                    outermost = function or ".".join(inner)
            is_named = isinstance(child, ast.Expr) and _called(child.value) in names
            if function and (is_named or _is_event(child)):
                assert isinstance(child, ast.Expr | ast.Call)
                text = ast.unparse(child)
                found.append(Mutant(module.__name__, function, child.lineno, text))
            visit(child, inner, outermost)

    visit(ast.parse(_source(module)), (), "")
    return found


def _called(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_event(node: ast.AST) -> bool:
    """Whether the call records an untimed event."""
    return isinstance(node, ast.Call) and _called(node) == "event" and not node.keywords


class _LeaveOut(ast.NodeTransformer):
    """Keeps the object of a removed call: `fetch(x).wait()` becomes `fetch(x)`.

    An event is replaced by an empty clock, which marks no operation of a simulated stream.
    """

    def __init__(self, line: int, text: str) -> None:
        self._line, self._text = line, text

    def _is_here(self, node: ast.Expr | ast.Call) -> bool:
        return node.lineno == self._line and ast.unparse(node) == self._text

    def visit_Expr(self, node: ast.Expr) -> Any:
        if self._is_here(node):
            node.value = node.value.func.value  # type: ignore[attr-defined]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if _is_event(node) and self._is_here(node):
            return ast.copy_location(ast.Dict([], []), node)
        return self.generic_visit(node)


def _source(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _code_of(code: CodeType, name: str) -> CodeType:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == name:
                return inner
            if name.startswith(f"{inner.co_qualname}."):
                return _code_of(inner, name)
    raise AssertionError(f"expected {name} in {code.co_name}")


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    return found
