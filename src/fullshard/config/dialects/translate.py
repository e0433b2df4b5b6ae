"""Translates a file of any tool to our keys: values keep their places, keys get notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from fullshard.config.dialects.accelerate import ACCELERATE, FSDP
from fullshard.config.dialects.axolotl import AXOLOTL
from fullshard.config.dialects.deepspeed import DEEPSPEED
from fullshard.config.dialects.trainer import FLAT, FLAT_MARKS, TRAINING
from fullshard.config.fields import Rejected
from fullshard.config.files import File, Origin, OriginKind, find, interpolated, read_file
from fullshard.config.keys import canonical
from fullshard.config.rules import (
    NOTHING,
    Meaning,
    Note,
    Rule,
    Said,
    Status,
    Table,
    axes,
    defaults_of,
    is_auto,
    is_empty,
    mapping_of,
    marks_of,
    rows,
)
from fullshard.config.schema import RunConfig
from fullshard.config.values import ConfigProblems, Problem, did_you_mean, join_key, show, words_of


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The file format of another tool.

    Args:
        name: the tool's name.
        marks: top-level keys that no other tool has.
        table: the meaning of every key.
    """

    name: str
    marks: frozenset[str]
    table: Table


# torchtitan's `parallelism`.
TORCHTITAN: Table = {
    **axes(
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    ),
    **rows("TORCHTITAN"),
}

DIALECTS = (
    Dialect("Accelerate", marks_of("Accelerate"), ACCELERATE),
    Dialect("DeepSpeed", marks_of("DeepSpeed"), DEEPSPEED),
    Dialect("axolotl", marks_of("axolotl"), AXOLOTL),
    Dialect("torchtitan", marks_of("torchtitan"), {"parallelism": TORCHTITAN}),
    Dialect("TrainingArguments", FLAT_MARKS, FLAT),
)

_ENGINES = {
    "fsdp": "FSDP",
    "fsdp_config": "FSDP",
    "deepspeed": "DeepSpeed",
    "deepspeed_config": "DeepSpeed",
    "zero_optimization": "DeepSpeed",
}

# Prefixes of names in some tools or versions.
_PREFIXES = ("fsdp_", "parallelism_config_", "stage3_")


def dialect_of(keys: Iterable[str]) -> Dialect | None:
    """Detects the tool of a file by its keys; None for ours."""
    names = {_word(key) for key in keys}
    return next((dialect for dialect in DIALECTS if names & dialect.marks), None)


class Translation:
    """Replaces another tool's keys in a file by ours.

    Attributes:
        file: The file, changed in place. Our keys keep the origins of the translated keys.
        dialect: The tool's name; empty for our own files.
        notes: The result of every key of another tool.
        problems: The problems of these keys.
        engines: FSDP or DeepSpeed, if a key selects it.
    """

    def __init__(self, file: File, table: Table | None = None) -> None:
        """Translates a file.

        Args:
            file: A whole file of any tool, or the keys of one table.
            table: The table for the file's keys; None: the tool is detected.
        """
        dialect = dialect_of(file.values) if table is None else None
        self.file, self.dialect = file, dialect.name if dialect else ""
        self.notes: list[Note] = []
        self.problems: list[Problem] = []
        self.engines: list[tuple[str, Origin]] = []
        self._written = dict(file.origins)
        parts: list[tuple[Table, dict[str, Any], str]] = []
        if dialect is not None:
            parts.append((dialect.table, interpolated(file.values), ""))
            self._defaults(parts[0][1])
        training = file.values.get("training")
        if table is not None:
            parts.append((table, interpolated(file.values), ""))
        elif isinstance(training, dict):
            names = [name for name in cast("dict[str, Any]", training) if _name_in(name, TRAINING)]
            parts.append((TRAINING, interpolated(file.values, "training", names), "training"))
        for rules, values, prefix in parts:
            theirs = [name for name in values if table is not None or not _is_ours(name, rules)]
            file.remove([join_key(prefix, name) for name in theirs])
        for rules, values, prefix in parts:
            self._table(rules, values, prefix, is_whole=table is None)
        self._notes_of_names()

    def _defaults(self, given: Mapping[str, Any]) -> None:
        """Adds notes for absent keys whose default in the tool is not ours."""
        for row in defaults_of(self.dialect):
            beside = row.get("beside", "").split()
            if find(given, row["key"]) is None and (not beside or any(map(given.get, beside))):
                section, _, name = row["to"].partition(".")
                cls = RunConfig.section_of(section)
                assert cls is not None
                ours = show(cls.model_fields[name].default)
                why = f"{self.dialect} takes {row['theirs']}; {row['to']} is {ours} here"
                place, target = self.file.name, row["to"]
                self.notes.append(Note(row["key"], Status.NOT_GIVEN, why, place, (target,)))

    def _table(
        self,
        table: Table,
        values: Mapping[Any, object],
        prefix: str,
        around: Said | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        """Translates the keys of a mapping.

        Args:
            table: The rules of its keys.
            values: The mapping.
            prefix: The dotted key of the mapping.
            around: The keys of the surrounding mappings, which rules may read.
            is_whole: Whether the mapping is the top level of a file, where our keys are kept.
        """
        own = {_name_in(str(key), table) or str(key): value for key, value in values.items()}
        said = {**(around or {}), **own}
        seen = dict[str, tuple[str, object]]()
        for name, value in values.items():
            key = join_key(prefix, str(name))
            plain = _name_in(str(name), table)
            other, before = seen.setdefault(plain or key, (key, value))
            if not _is_same(table.get(plain or ""), value, before, said):
                one, two = (value, self._origin(key)), (before, self._origin(other))
                self.problems.append(contradiction(two[1].written, one, two))
            if plain is None:
                if not is_whole or not _is_ours(str(name), table):
                    self._unknown(key, str(name), table, is_whole=is_whole)
                continue
            if is_whole:
                self._engine(plain, value, key)
            self._entry(table[plain], value, key, said)

    def _entry(self, entry: Rule | Table, value: object, key: str, said: Said) -> None:
        values = mapping_of(value)
        if not isinstance(entry, Mapping):
            self._rule(entry, value, key, said)
        elif values:
            self._table(cast("Table", entry), values, key, said)
        elif "" in entry:
            self._rule(cast("Rule", entry[""]), value, key, said)
        elif is_empty(value) or value is False:
            self._note(key, NOTHING)
        elif isinstance(value, str) and entry is FSDP:
            self._note(key, Meaning(Status.TRANSLATED, f"{value} is read"))
            self._read(value, key, FSDP)
        else:
            self._problem(key, Problem(key, "a mapping of keys", show(value)))

    def _rule(self, rule: Rule, value: object, key: str, said: Said) -> None:
        try:
            meaning = rule(value, said)
        except Rejected as error:
            self._problem(key, Problem(key, error.expected, show(value), error.advice))
            return
        except ConfigProblems as error:
            for problem in error.problems:
                self._problem(key, problem)
            return
        self._note(key, meaning)
        if meaning.status in (Status.LOST, Status.NO_EFFECT):
            for below in _keys_below(value, key):
                self._note(below, meaning)
        for target, meant in meaning.values.items():
            origin = self._origin(key)
            if canonical(key) != target:
                origin = dataclasses.replace(origin, kind=OriginKind.DERIVED)
            self._put(target, meant, origin)
        if meaning.file:
            self._read(meaning.file, key, None)

    def _put(self, target: str, value: object, origin: Origin) -> None:
        """Sets our key, unless another key of the file contradicts it."""
        other, before = find(self.file.values, target), self.file.origins.get(target)
        if other is None or before is None or agree(target, value, other):
            self.file.set(target, value, origin)
            return
        self.problems.append(contradiction(target, (value, origin), (other, before)))

    def _read(self, name: str, key: str, table: Table | None) -> None:
        """Reads another file, whose keys are treated as part of this one."""
        path = Path(name) if Path(name).exists() else self.file.folder / name
        try:
            file = read_file(path)
        except ConfigProblems as error:
            for problem in error.problems:
                got = problem.got if problem.place != str(path) else f"{name!r}, {problem.got}"
                self._problem(key, dataclasses.replace(problem, got=got))
            return
        inner = Translation(file, table)
        self.notes += inner.notes
        self.problems += inner.problems
        self.engines += inner.engines
        values = interpolated(file.values)
        for target, origin in leaves(file.origins).items():
            self._put(target, find(values, target), origin)

    def _notes_of_names(self) -> None:
        """Adds notes for our keys under another tool's name (`training.evaluation_strategy`)."""
        for key in self.file.origins:
            target = canonical(key)
            if target != key:
                meaning = Meaning(Status.TRANSLATED, f"is {target} here", {target: None})
                self._note(key, meaning)

    def _engine(self, plain: str, value: object, key: str) -> None:
        if plain == "distributed_type":
            engine = {"fsdp": "FSDP", "deepspeed": "DeepSpeed"}.get(str(value).lower())
        else:
            is_off = is_empty(value) or words_of(value)[0] in ("false", "no", "none", "null")
            engine = None if is_off else _ENGINES.get(plain)
        if engine is not None:
            self.engines.append((engine, self._origin(key)))

    def _note(self, key: str, meaning: Meaning) -> None:
        origin = self._origin(key)
        note = Note(
            origin.written,
            meaning.status,
            meaning.why,
            origin.place,
            tuple(meaning.values) or tuple(filter(None, [meaning.about])),
        )
        self.notes.append(note)

    def _problem(self, key: str, problem: Problem) -> None:
        origin = self._origin(key)
        placed = dataclasses.replace(problem, key=origin.written, place=origin.place)
        self.problems.append(placed)

    def _unknown(self, key: str, name: str, table: Table, *, is_whole: bool) -> None:
        prefix = next((p for p in _PREFIXES if name.lower().startswith(p)), "")
        names = [prefix + plain for plain in table if plain]
        near = did_you_mean(name, [*names, *(RunConfig.known_names() if is_whole else ())])
        self._problem(key, Problem(key, "", "unknown key", near))

    def _origin(self, key: str) -> Origin:
        """The origin of a key, or of the nearest surrounding key, with the key's own name."""
        around = key
        while around and around not in self._written:
            around = around.rpartition(".")[0]
        if around == key:
            return self._written[key]
        found = self._written.get(around) or Origin(OriginKind.FILE, self.file.name, 1)
        written = key.removeprefix(around).lstrip(".")
        return dataclasses.replace(found, written=join_key(found.written, written))


def _is_same(rule: Rule | Table | None, one: object, other: object, said: Said) -> bool:
    """Whether two values of one key have one meaning, or one of them is none."""
    if one == other or any(is_empty(value) or is_auto(value) for value in (one, other)):
        return True
    if not callable(rule):
        return words_of(one) == words_of(other)
    try:
        mine, theirs = rule(one, said).values, rule(other, said).values
    except (Rejected, ConfigProblems):  # reported with the key
        return True
    return mine.keys() == theirs.keys() and all(agree(key, mine[key], theirs[key]) for key in mine)


def _keys_below(value: object, key: str) -> Iterator[str]:
    """The keys of a group without a table, which share the group's result."""
    for name, inner in mapping_of(value).items():
        yield join_key(key, str(name))
        yield from _keys_below(inner, join_key(key, str(name)))


def leaves(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """The keys whose value is not a mapping."""
    holders = {key.rpartition(".")[0] for key in origins}
    return {key: origin for key, origin in origins.items() if key not in holders}


def _is_ours(name: str, table: Table) -> bool:
    return _name_in(name, table) is None and name in RunConfig.known_names()


def _word(key: object) -> str:
    return str(key).strip().lower().replace("-", "_")


def _name_in(name: str, table: Table) -> str | None:
    """The name of a key in a table, with or without a prefix."""
    word = _word(name)
    for candidate in (word, *(word.removeprefix(prefix) for prefix in _PREFIXES)):
        if candidate and candidate in table:
            return candidate
    return None


def contradiction(target: str, one: tuple[object, Origin], other: tuple[object, Origin]) -> Problem:
    """The problem of two keys that set one key to different values."""
    (value, origin), (said, before) = one, other
    expected = f"the value of {before.written} ({before.place}), {show(said)}"
    got = show(value) if origin.written == target else f"{show(value)} as {target}"
    return Problem(origin.written, expected, got, "Give one of the two", origin.place)


def agree(key: str, one: object, other: object) -> bool:
    """Whether two values of our key are equal."""
    section, _, name = key.partition(".")
    cls = RunConfig.section_of(section)
    if cls is None or name not in cls.field_names():
        return one == other
    try:
        return getattr(cls(**{name: one}), name) == getattr(cls(**{name: other}), name)
    except ConfigProblems:
        return one == other
