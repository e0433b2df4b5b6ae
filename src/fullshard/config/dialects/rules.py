"""The words in which a dialect's table says what a key means: is ours, lost, no effect, not yet.

TABLE = {
    "sharding_strategy": to("sharding.strategy"),
    "use_orig_params": no_effect("parameters are always the model's own objects"),
    "zero_optimization": {"stage": choice("sharding.strategy", {"3": "full_shard"})},
}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Union, cast

from fullshard.config.fields import Rejected, means_same, to_flag
from fullshard.config.problems import ConfigProblems, Problem, show
from fullshard.config.values import did_you_mean, words_of


class Status(StrEnum):
    """What became of a key of another tool."""

    TRANSLATED = "translated"  # a key of ours says the same
    LOST = "lost"  # it asks for something that will not happen
    NO_EFFECT = "no_effect"  # what it asks for happens anyway, or has no meaning here


class FileKind(StrEnum):
    """What a value that names another file of configuration leads to."""

    FSDP = "fsdp"  # the keys of fsdp_config
    DEEPSPEED = "deepspeed"  # a whole file, in its own dialect


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
        kind: what that file holds.
    """

    status: Status
    why: str
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    file: str = ""
    kind: FileKind = FileKind.DEEPSPEED


# A rule reads a value, and the values that stand beside it under their plain names.
Said = Mapping[str, object]
Rule = Callable[[object, Said], Meaning]
Table = Mapping[str, Union[Rule, "Table"]]


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys, whose names stand between blanks."""
    return dict.fromkeys(names.split(), rule)


NOTHING = Meaning(Status.NO_EFFECT, "it says nothing")
HAPPENS = Meaning(Status.NO_EFFECT, "this is what happens anyway")


def is_empty(value: object) -> bool:
    """Null, and mappings, lists and texts without anything in them."""
    return value is None or value in ("", {}, [])


def translated(values: Mapping[str, object], why: str = "") -> Meaning:
    """Keys of ours say it."""
    named = f"is {' and '.join(values)} here"
    return Meaning(Status.TRANSLATED, f"{named}: {why}" if why else named, values)


def to(key: str, why: str = "") -> Rule:
    """The value of a key of ours, which checks it; `auto` leaves it to that key."""

    def rule(value: object, _: Said) -> Meaning:
        if is_empty(value):
            return NOTHING
        if is_auto(value):
            return Meaning(Status.NO_EFFECT, f"auto: {key} decides")
        return translated({key: value}, why)

    return rule


def is_auto(value: object) -> bool:
    """DeepSpeed's word for what TrainingArguments decide."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def choice(key: str, words: Mapping[str, object], why: str = "") -> Rule:
    """One of some words, or of the numbers that a tool's dialogue has for them; None is nothing."""

    def rule(value: object, _: Said) -> Meaning:
        if is_empty(value):
            return NOTHING
        meant = words[word_among(value, words)]
        return HAPPENS if meant is None else translated({key: meant}, why)

    return rule


def word_among(value: object, words: Mapping[str, object]) -> str:
    """The word of a table that a value means.

    Raises:
        Rejected: it is none of them.
    """
    for word in words_of(value):
        if word in words:
            return word
    names = [word for word in words if not word.isdecimal()] or list(words)
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise Rejected(f"one of {', '.join(names)}", hint)


def flag(key: str, on: object, why: str = "", *, off: object = None) -> Rule:
    """A flag that sets a key of ours to one of two values; None leaves the key alone."""

    def rule(value: object, _: Said) -> Meaning:
        if is_empty(value):
            return NOTHING
        if is_auto(value):
            return Meaning(Status.NO_EFFECT, f"auto: {key} decides")
        meant = on if to_flag(value) else off
        return HAPPENS if meant is None else translated({key: meant}, why)

    return rule


def no_effect(why: str, words: Mapping[str, object] | None = None) -> Rule:
    """Any value (or any of some words) changes nothing."""

    def rule(value: object, _: Said) -> Meaning:
        if words is not None and not is_empty(value):
            word_among(value, words)
        return Meaning(Status.NO_EFFECT, why)

    return rule


def lost(why: str, *neutral: object) -> Rule:
    """A wish that is not fulfilled, unless the value is one of the neutral ones."""

    def rule(value: object, _: Said) -> Meaning:
        if is_neutral(value, neutral):
            return neutral_meaning(value)
        return Meaning(Status.LOST, why)

    return rule


def not_yet(instead: str, *neutral: object) -> Rule:
    """An error, unless the value is one of the neutral ones."""

    def rule(value: object, _: Said) -> Meaning:
        if is_neutral(value, neutral):
            return neutral_meaning(value)
        said = f"{show(value)} is not yet supported"
        raise ConfigProblems([Problem("", "", said, instead)])

    return rule


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Nothing at all, a group that is switched off, or one of these values."""
    if is_empty(value) or any(means_same(value, other) for other in neutral):
        return True
    return means_same(mapping_of(value).get("enabled"), other=False)


def mapping_of(value: object) -> Mapping[object, object]:
    """The keys and values of a mapping; of anything else none."""
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}


def neutral_meaning(value: object) -> Meaning:
    """Of a value that asks for nothing that would not happen without it."""
    return NOTHING if is_empty(value) else HAPPENS


def file_rule(value: object, _: Said) -> Meaning:
    """A value that names a DeepSpeed file."""
    if is_empty(value):
        return NOTHING
    return Meaning(Status.TRANSLATED, f"{value} is read", file=str(value))
