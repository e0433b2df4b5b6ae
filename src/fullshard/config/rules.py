"""Rules of a table of keys: our key, no effect, lost, not supported yet.

TABLE = {
    **rows("TABLE"),  # of keys.yaml
    "auto_wrap_policy": _auto_wrap_policy,
    "zero_optimization": {"stage": choice("sharding.strategy", {"3": "full_shard"})},
}

[Note: axes of a mesh under the names of other tools]

    tool             replicate             shard            tensor           expert
    transformers     dp_replicate_size     fsdp_size        tp_size          ep_size
    Accelerate       dp_replicate_size     dp_shard_size    tp_size          ep_size
    torchtitan       data_parallel_...     data_parallel_.. tensor_par...    expert_parallel_degree
    DeepSpeed                                               autotp_size      autoep_size

Accelerate's cp_size and sp_size, and torchtitan's context_parallel_degree, are our `context`.

Other tools count the ranks that divide the experts among those of the shard and tensor axes. Here
they are an axis of their own: of shard 4 x tensor 2 with ep_size 4, it is shard 2 x expert 2 x
tensor 2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from typing import Any, Union, cast

from fullshard.config.fields import Rejected, means_same, to_flag, to_number
from fullshard.config.regular_files import packaged_table
from fullshard.config.values import ConfigProblems, Problem, did_you_mean, show, words_of


class Status(StrEnum):
    """The result of translating a key."""

    TRANSLATED = "translated"  # one of our keys has the same meaning
    LOST = "lost"  # it requests something that will not happen
    NO_EFFECT = "no_effect"  # it requests existing behaviour, or has no meaning here
    NOT_GIVEN = "not_given"  # it is absent, and the other tool's default is not ours


@dataclass(frozen=True)
class Note:
    """The translation of one key of another tool.

    Args:
        key: the key as written.
        status: the result.
        why: in words.
        place: `fsdp.yaml:7`, `command line`.
        targets: our keys that it sets.
        is_overruled: whether another file decides these keys.
    """

    key: str
    status: Status
    why: str
    place: str
    targets: tuple[str, ...] = ()
    is_overruled: bool = False

    @property
    def is_told(self) -> bool:
        """Whether a run prints it, because the other tool would do something else."""
        return self.is_overruled or self.status in (Status.LOST, Status.NOT_GIVEN)

    def __str__(self) -> str:
        """The note as a line of `config explain`."""
        return f"{self.place}: {self.key}: {self.status.replace('_', ' ')}: {self.why}"


@dataclass(frozen=True)
class Meaning:
    """The meaning of a key's value: our keys with values, and the reason.

    Args:
        status: the result.
        why: in words.
        values: our dotted keys.
        file: a file to read in place of the value.
        about: our key that the value would not change.
    """

    status: Status
    why: str
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    file: str = ""
    about: str = ""


# A rule receives a value, and the other values of its mapping under names without a prefix.
Said = Mapping[str, object]
Rule = Callable[[object, Said], Meaning]
Table = Mapping[str, Union[Rule, "Table"]]


def each(rule: Rule, *names: str) -> dict[str, Rule]:
    """Assigns one rule to several keys, whose names are separated by blanks."""
    return dict.fromkeys(" ".join(names).split(), rule)


NOTHING = Meaning(Status.NO_EFFECT, "no value is given")


def happens(key: str = "") -> Meaning:
    """The meaning of a value that asks for the default of our key, which another key may change."""
    return Meaning(Status.NO_EFFECT, "this happens anyway", about=key)


def translated(values: Mapping[str, object], why: str = "") -> Meaning:
    """A meaning that our keys express."""
    named = f"is {' and '.join(values)} here"
    return Meaning(Status.TRANSLATED, f"{named}: {why}" if why else named, values)


def refused(value: object, advice: str) -> ConfigProblems:
    """The error of a value that is not supported yet."""
    return ConfigProblems([Problem("", "", f"{show(value)} is not yet supported", advice)])


# ---- properties of values ------------------------------------------------------------------------


def is_empty(value: object) -> bool:
    """Whether a value is null, or an empty mapping, list or text."""
    return value is None or value in ("", {}, [])


def is_auto(value: object) -> bool:
    """Whether a value is DeepSpeed's `auto`, which leaves it to TrainingArguments."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value is empty, a disabled group, or one of the given values."""
    if is_empty(value) or any(means_same(value, other) for other in neutral):
        return True
    return means_same(mapping_of(value).get("enabled"), other=False)


def mapping_of(value: object) -> Mapping[object, object]:
    """The keys and values of a mapping; empty for any other value."""
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}


def word_among(value: object, words: Collection[str], instead: str = "") -> str:
    """Returns the word for a value; the error does not list numbers.

    Args:
        value: the value.
        words: the accepted words.
        instead: advice for a value that resembles none of them.

    Raises:
        Rejected: The value is none of the words.
    """
    for word in words_of(value):
        if word in words:
            return word
    names = [word for word in words if not word.isdecimal()] or list(words)
    raise Rejected(f"one of {', '.join(names)}", did_you_mean(value, names) or instead)


# ---- rules ---------------------------------------------------------------------------------------


def unless(*neutral: object, key: str = "") -> Callable[[Rule], Rule]:
    """Makes a rule, about our `key`, that skips empty and neutral values."""

    def limited(rule: Rule) -> Rule:
        def checked(value: object, said: Said) -> Meaning:
            if is_neutral(value, neutral):
                return NOTHING if is_empty(value) else happens(key)
            return rule(value, said)

        return checked

    return limited


def to(
    key: str, why: str = "", *neutral: object, read: Callable[[Any], object] = lambda value: value
) -> Rule:
    """Sets our key to the value, which that key checks; `auto` leaves the key unset.

    Args:
        key: our dotted key.
        why: explanation for the user.
        neutral: values that request the existing behaviour.
        read: converts the value; None leaves the key unset.
    """

    def rule(value: object, _: Said) -> Meaning:
        if is_auto(value):
            return Meaning(Status.NO_EFFECT, f"auto: {key} decides")
        meant = read(value)
        return happens(key) if meant is None else translated({key: meant}, why)

    return unless(*neutral, key=key)(rule)


def choice(key: str, words: Mapping[str, object], why: str = "", instead: str = "") -> Rule:
    """Sets our key to the value of a word; None leaves the key unset. See `word_among`."""

    def rule(value: object, _: Said) -> Meaning:
        meant = words[word_among(value, words, instead)]
        return happens(key) if meant is None else translated({key: meant}, why)

    return unless()(rule)


def no_effect(why: str, check: Callable[[Any], object] | None = None) -> Rule:
    """A value without effect; `check` raises if the other tool would reject it too."""

    def rule(value: object, _: Said) -> Meaning:
        if check is not None and not is_empty(value):
            check(value)
        return Meaning(Status.NO_EFFECT, why)

    return rule


def not_yet(instead: str, *neutral: object) -> Rule:
    """An error, unless the value is neutral."""

    def rule(value: object, _: Said) -> Meaning:
        raise refused(value, instead)

    return unless(*neutral)(rule)


def rows(table: str, other: Table | None = None) -> dict[str, Rule]:
    """The keys of a table whose meaning needs no code, as keys.yaml lists them.

    Args:
        table: Its name in keys.yaml.
        other: Another tool's table, whose meaning keys may have.
    """
    found: dict[str, Any] = {}
    for row in _tables()[table]:
        if "same_as" in row:
            found |= {key: (other or {})[key] for key in row["keys"].split()}
        else:
            found |= each(_rule_of(row), row["keys"])
    return found


def marks_of(tool: str) -> frozenset[str]:
    """The top-level keys by which a tool's file is recognized."""
    marks = {row["tool"]: row["keys"] for row in _tables()["MARKS"]}
    return frozenset(marks[tool].split())


def defaults_of(tool: str) -> list[dict[str, Any]]:
    """The rows of a tool's defaults that are not ours."""
    return [row for row in _tables()["DEFAULTS"] if row["tool"] == tool]


@cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    return packaged_table("fullshard.config.dialects", "keys.yaml")


def _rule_of(row: Mapping[str, Any]) -> Rule:
    why, neutral, check = row.get("why", ""), row.get("unless", ()), row.get("check", "")
    match row:
        case {"to": key, "words": words}:
            return choice(key, words, why, row.get("instead", ""))
        case {"to": key, "if_true": on}:
            off = row.get("if_false")
            return to(key, why, read=lambda value: on if to_flag(value) else off)
        case {"to": key}:
            return to(key, why, *neutral)
        case {"lost": why}:
            return unless(*neutral)(lambda _value, _said: Meaning(Status.LOST, why))
        case {"not_yet": instead}:
            return not_yet(instead, *neutral)
        case _:
            among = partial(word_among, words=check)
            known = among if isinstance(check, list) else _CHECKS[check]
            return no_effect(row["no_effect"], known)


def _check_size(value: object) -> None:
    if not is_auto(value) and to_number(value) is None and not isinstance(value, bool):
        raise Rejected("a number or auto")


_CHECKS = {"": None, "flag": to_flag, "size": _check_size}


@unless()
def file_rule(value: object, _: Said) -> Meaning:
    """A value that is the name of a DeepSpeed file."""
    return Meaning(Status.TRANSLATED, f"{value} is read", file=str(value))


# ---- axes of a mesh ------------------------------------------------------------------------------

_TENSOR_PLAN = "the tensor plan cuts the experts over the same ranks"


def _size(value: object) -> int:
    """A size, or 1 for a value that is none; the key's own rule reports it."""
    found = to_number(value)
    return int(found) if found is not None and found >= 1 and found == int(found) else 1


def _expert(said: Said, tensor: str, expert: str) -> int:
    """Our expert axis."""
    return max(1, _size(said.get(expert)) // _size(said.get(tensor)))


def axes(replicate: str, shard: str, tensor: str, expert: str) -> dict[str, Rule]:
    """Rules for the sizes of four axes under a tool's names."""

    @unless(1)
    def of_expert(value: object, said: Said) -> Meaning:
        size, beside = _size(value), _size(said.get(tensor))
        if beside == 1:
            return translated({"sharding.expert": value})
        if size % beside:
            raise Rejected(f"a multiple of {tensor}, {beside}")
        if size == beside:
            return Meaning(Status.NO_EFFECT, _TENSOR_PLAN)
        return translated({"sharding.expert": size // beside}, f"{expert} / {tensor}")

    @unless(-1, 0)
    def of_shard(value: object, said: Said) -> Meaning:
        size, groups = _size(value), _expert(said, tensor, expert)
        if groups == 1:
            return translated({"sharding.shard": value})
        if size % groups:
            raise Rejected(f"a multiple of {groups}, over whose groups of ranks experts are spread")
        return translated({"sharding.shard": size // groups}, f"sharding.expert is {groups} of it")

    sizes = {shard: of_shard, tensor: to("sharding.tensor", "", 1), expert: of_expert}
    return {replicate: to("sharding.replicate", "", -1, 0), **sizes}
