"""Where every value came from: the file and line of every key, the command line, a default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, cast

import yaml

from fullshard.config.keys import canonical, derived_from
from fullshard.config.problems import ConfigProblems, Problem, join_key


class OriginKind(StrEnum):
    """What kind of place a value came from."""

    FILE = "file"
    COMMAND_LINE = "command line"
    DEFAULT = "default"
    DERIVED = "derived"  # from another key, which `written` names


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where one value came from.

    Args:
        kind: the kind of place.
        file: the file as the user named it, or None.
        line: line of the key in that file, from 1, or None.
        written: the key as it stands there, which may be another tool's name for it.
    """

    kind: OriginKind
    file: str | None = None
    line: int | None = None
    written: str = ""

    @property
    def place(self) -> str:
        """`train.yaml:12`, `command line`, or nothing for a default."""
        if self.file:
            return f"{self.file}:{self.line}"
        return "" if self.kind is OriginKind.DEFAULT else str(OriginKind.COMMAND_LINE)

    def __str__(self) -> str:
        """`train.yaml:12`, `command line`, `default`, `from training.bf16 (train.yaml:12)`."""
        if self.kind is OriginKind.DERIVED:
            return f"from {self.written} ({self.place})"
        return self.place or str(self.kind)


MOST_BY_ALIASES = 10_000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NOT_DECIMAL = re.compile(r"[-+]?0[0-7_]+|.*:.*")

DEFAULT = Origin(OriginKind.DEFAULT)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key that somebody wrote, as it stands there, and where."""

    key: str
    origin: Origin


class Index:
    """Finds the origin of a key under any of its names."""

    def __init__(self, entries: Iterable[Entry], source: str) -> None:
        """Later entries of the same key replace earlier ones.

        Args:
            entries: the file's, then the command line's.
            source: name of the file, for what is wrong with it as a whole.
        """
        self._written = {entry.key: entry for entry in entries}
        self._canonical = {canonical(key): entry for key, entry in self._written.items()}
        self._source = source

    def origin_of(self, key: str, *, is_default: bool, sources: Iterable[str] = ()) -> Origin:
        """Of a value of the resolved configuration.

        Args:
            key: dotted, under our name.
            is_default: the value equals its default, so that nothing has to explain it.
            sources: keys that decide it where it was not written itself.
        """
        found = self._canonical.get(key)
        if found is not None:
            return found.origin
        if is_default:
            return DEFAULT
        for source in sources:
            if source in self._canonical:
                origin = self._canonical[source].origin
                return dataclasses.replace(origin, kind=OriginKind.DERIVED)
        for parent in _parents(key):
            if parent in self._canonical:  # `model: FOLDER` is model.name_or_path
                return self._canonical[parent].origin
        return DEFAULT

    def locate(self, problem: Problem) -> Problem:
        """The problem with its place, under the key that stands there."""
        if problem.place:
            return problem
        key = problem.key
        for entry in (self._written.get(key), *map(self._canonical.get, (key, *derived_from(key)))):
            if entry is not None:
                origin = entry.origin
                return dataclasses.replace(problem, key=origin.written, place=origin.place)
        around = [name for name in self._written if name.startswith(f"{key}.")]
        for name in (*_parents(key), *around):
            entry = self._written.get(name) or self._canonical.get(name)
            if entry is not None:
                return dataclasses.replace(problem, place=entry.origin.place)
        return dataclasses.replace(problem, place=self._source)


def read_entries(text: str, file: str) -> list[Entry]:
    """Every key of a YAML text with its line.

    Raises:
        ConfigError: no YAML, no mapping, empty, or a key that stands twice in one mapping.
    """
    try:
        root = _compose(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigProblems([syntax_problem(error, file)]) from None
    except yaml.YAMLError as error:
        raise ConfigProblems([Problem("", "YAML text", str(error), place=file)]) from None
    if root is None:
        got, advice = "an empty file", "Write at least `model:`"
        raise ConfigProblems([Problem("", "a mapping of keys", got, advice, place=file)])
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "text"
        raise ConfigProblems(
            [Problem("", "a mapping of keys", kind, place=f"{file}:{_line(root)}")]
        )
    if _added_by_aliases(root) > MOST_BY_ALIASES:
        got = f"aliases that write more than {MOST_BY_ALIASES:,} values"
        raise ConfigProblems([Problem("", "a mapping of keys", got, place=file)])
    try:
        misread = list(_misread(root, "", file))
        entries = list(_entries(root, "", file))
    except RecursionError:
        got = "one that contains itself through an alias"
        raise ConfigProblems([Problem("", "a mapping of keys", got, place=file)]) from None
    if misread:
        raise ConfigProblems(misread)
    return entries


def _compose(text: str) -> yaml.Node | None:
    """PyYAML's tree, which knows lines; OmegaConf, which reads the values, does not keep them."""
    untyped = cast("Any", yaml)
    return untyped.compose(text, Loader=yaml.SafeLoader)


def _added_by_aliases(root: yaml.Node) -> int:
    """Nodes that a reader would see beyond those that are written; a few lines can mean 10^9."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # of one that contains itself
            inner: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
            for item in inner:
                pair: Any = item if isinstance(node, yaml.MappingNode) else (item,)
                sizes[id(node)] += sum(map(size, pair))
        return sizes[id(node)]

    return size(root) - len(sizes)


def _entries(mapping: yaml.MappingNode, prefix: str, file: str) -> Iterator[Entry]:
    for name, node, value in _items(mapping):
        key = join_key(prefix, name)
        origin = Origin(OriginKind.FILE, file, _line(node), key)
        yield Entry(key, origin)
        if isinstance(value, yaml.MappingNode):
            yield from _entries(value, key, file)


def _items(mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Name, key node and value; what `<<` merges in comes first, so that own keys replace it."""
    for key, value in mapping.value:
        if key.tag == "tag:yaml.org,2002:merge":
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for other in reversed(merged):
                if isinstance(other, yaml.MappingNode):
                    yield from _items(other)
    for key, value in mapping.value:
        if key.tag != "tag:yaml.org,2002:merge":
            yield str(key.value), key, value


def _misread(node: yaml.Node, prefix: str, file: str) -> Iterator[Problem]:
    """Keys that stand twice in one mapping, and numbers that are not what they look like."""
    place = f"{file}:{_line(node)}"
    if node.tag in _NUMBERS and _NOT_DECIMAL.fullmatch(str(node.value)):
        got = f"{node.value}, which YAML reads in base {60 if ':' in node.value else 8}"
        yield Problem(prefix, "a decimal number", got, "Put it in quotes if it is text", place)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _misread(item, f"{prefix}[{index}]", file)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        name = join_key(prefix, str(key.value))
        if name in first and key.tag != "tag:yaml.org,2002:merge":
            got = f"it in line {first[name]} and again in line {_line(key)}"
            place = f"{file}:{_line(key)}"
            yield Problem(name, "a key once", got, "Remove one of the two", place)
        first.setdefault(name, _line(key))
        yield from _misread(value, name, file)


def syntax_problem(error: yaml.MarkedYAMLError, file: str) -> Problem:
    """What YAML's reader says, with the line."""
    mark = error.problem_mark or error.context_mark
    place = f"{file}:{mark.line + 1}" if mark else file
    said = " ".join(part for part in (error.context, error.problem) if part)
    advice = "YAML is indented by spaces" if "'\\t'" in said else ""
    return Problem("", "YAML", f"something else ({said})", advice, place)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _parents(key: str) -> Iterator[str]:
    """`a.b`, `a` of `a.b.c`."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
