"""The rules of a dialect's table: a key of ours, no effect, lost, not yet supported.

TABLE = {
    "sharding_strategy": to("sharding.strategy"),
    "use_orig_params": no_effect("parameters are always the model's own objects"),
    "zero_optimization": {"stage": choice("sharding.strategy", {"3": "full_shard"})},
}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Union, cast

from fullshard.config.fields import Rejected, means_same, to_flag
from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.config.values import did_you_mean, words_of


class Status(StrEnum):
    """What became of a key of another tool."""

    TRANSLATED = "translated"  # a key of ours says the same
    LOST = "lost"  # it asks for something that will not happen
    NO_EFFECT = "no_effect"  # what it asks for happens anyway, or has no meaning here


@dataclass(frozen=True)
class Note:
    """One key of another tool, and what became of it.

    Args:
        key: as it stands there.
        status: what became of it.
        why: in words.
        place: `fsdp.yaml:7`, `command line`.
        targets: keys of ours that it decides.
    """

    key: str
    status: Status
    why: str
    place: str
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line of `config explain`."""
        return f"{self.place}: {self.key}: {self.status.replace('_', ' ')}: {self.why}"


@dataclass(frozen=True)
class Meaning:
    """What a value of a key means: keys of ours with their values, and why.

    Args:
        status: what became of the key.
        why: in words.
        values: dotted keys of ours.
        file: a file to read in its place.
    """

    status: Status
    why: str
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    file: str = ""


# A rule gets a value, and the other values of its mapping under their plain names.
Said = Mapping[str, object]
Rule = Callable[[object, Said], Meaning]
Table = Mapping[str, Union[Rule, "Table"]]


def each(rule: Rule, *names: str) -> dict[str, Rule]:
    """One rule for several keys, whose names are separated by blanks."""
    return dict.fromkeys(" ".join(names).split(), rule)


NOTHING = Meaning(Status.NO_EFFECT, "no value is given")
HAPPENS = Meaning(Status.NO_EFFECT, "this happens anyway")


def translated(values: Mapping[str, object], why: str = "") -> Meaning:
    """Keys of ours have the meaning."""
    named = f"is {' and '.join(values)} here"
    return Meaning(Status.TRANSLATED, f"{named}: {why}" if why else named, values)


def refused(value: object, advice: str) -> ConfigProblems:
    """The error of a value that has a meaning elsewhere and is not supported here yet."""
    return ConfigProblems([Problem("", "", f"{show(value)} is not yet supported", advice)])


# ---- what a value is -----------------------------------------------------------------------------


def is_empty(value: object) -> bool:
    """Null, and mappings, lists and texts without anything in them."""
    return value is None or value in ("", {}, [])


def is_auto(value: object) -> bool:
    """DeepSpeed's word for "TrainingArguments decide"."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Nothing at all, a group that is switched off, or one of these values."""
    if is_empty(value) or any(means_same(value, other) for other in neutral):
        return True
    return means_same(mapping_of(value).get("enabled"), other=False)


def mapping_of(value: object) -> Mapping[object, object]:
    """The keys and values of a mapping; nothing for any other value."""
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}


def word_among(value: object, words: Collection[str]) -> str:
    """The one of some words that a value means; numbers are not offered in the error.

    Raises:
        Rejected: it is none of them.
    """
    for word in words_of(value):
        if word in words:
            return word
    names = [word for word in words if not word.isdecimal()] or list(words)
    raise Rejected(f"one of {', '.join(names)}", did_you_mean(value, names))


# ---- rules ---------------------------------------------------------------------------------------


def unless(*neutral: object) -> Callable[[Rule], Rule]:
    """Makes a rule that is not asked about an empty value, or about one of the neutral ones."""

    def limited(rule: Rule) -> Rule:
        def checked(value: object, said: Said) -> Meaning:
            if is_neutral(value, neutral):
                return NOTHING if is_empty(value) else HAPPENS
            return rule(value, said)

        return checked

    return limited


def to(
    key: str, why: str = "", *neutral: object, read: Callable[[Any], object] = lambda value: value
) -> Rule:
    """A key of ours with the value, which that key checks; `auto` leaves it to that key.

    Args:
        key: dotted, of ours.
        why: what a reader should know about it.
        neutral: values that ask for what happens anyway.
        read: makes our value of theirs; None leaves the key alone.
    """

    def rule(value: object, _: Said) -> Meaning:
        if is_auto(value):
            return Meaning(Status.NO_EFFECT, f"auto: {key} decides")
        meant = read(value)
        return HAPPENS if meant is None else translated({key: meant}, why)

    return unless(*neutral)(rule)


def choice(key: str, words: Mapping[str, object], why: str = "") -> Rule:
    """A key of ours with what one of some words stands for; None leaves the key alone."""

    def rule(value: object, _: Said) -> Meaning:
        meant = words[word_among(value, words)]
        return HAPPENS if meant is None else translated({key: meant}, why)

    return unless()(rule)


def flag(key: str, on: object, why: str = "", *, off: object = None) -> Rule:
    """A flag that sets a key of ours to one of two values; None leaves the key alone."""
    return to(key, why, read=lambda value: on if to_flag(value) else off)


def no_effect(why: str, check: Callable[[Any], object] | None = None) -> Rule:
    """A value that changes nothing; `check` raises if the other tool would not take it either."""

    def rule(value: object, _: Said) -> Meaning:
        if check is not None and not is_empty(value):
            check(value)
        return Meaning(Status.NO_EFFECT, why)

    return rule


def lost(why: str, *neutral: object) -> Rule:
    """A wish that is not fulfilled, unless the value is one of the neutral ones."""
    return unless(*neutral)(lambda _value, _said: Meaning(Status.LOST, why))


def not_yet(instead: str, *neutral: object) -> Rule:
    """An error, unless the value is one of the neutral ones."""

    def rule(value: object, _: Said) -> Meaning:
        raise refused(value, instead)

    return unless(*neutral)(rule)


@unless()
def file_rule(value: object, _: Said) -> Meaning:
    """A value that names a DeepSpeed file."""
    return Meaning(Status.TRANSLATED, f"{value} is read", file=str(value))
