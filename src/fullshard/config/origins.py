"""Where every value came from: the file and line of every key, the command line, a default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import StrEnum

from fullshard.config.keys import canonical, derived_from
from fullshard.config.problems import Problem


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


def _parents(key: str) -> Iterator[str]:
    """`a.b`, `a` of `a.b.c`."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
