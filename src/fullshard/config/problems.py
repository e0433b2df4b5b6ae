"""All problems of an input, in one grammar, as one error.

train.yaml:12: sharding.strategy: expected one of full_shard, no_shard; got 'ful'. Did you ...?
^ place        ^ key              ^ expected                            ^ got      ^ advice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from fullshard.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Problem:
    """A single problem of an input.

    Args:
        key: dotted key, `sharding.strategy`; empty for the input as a whole.
        expected: description of valid values: `an integer >= 0`. Empty if `got` is enough.
        got: the given value, in words: `'ful'`, `a list`.
        advice: what to do, in one or two sentences; may be empty.
        place: `train.yaml:12` or `command line`; set by the loader.
    """

    key: str
    expected: str
    got: str
    advice: str = ""
    place: str = ""

    def __str__(self) -> str:
        """The problem as one line in the grammar above."""
        separator = "; " if "," in self.expected else ", "
        said = f"expected {self.expected}{separator}got {self.got}" if self.expected else self.got
        head = ": ".join(part for part in (self.place, self.key, said) if part)
        return f"{head}. {self.advice}".rstrip() if self.advice else head

    def below(self, prefix: str) -> Problem:
        """The problem with its key below another key."""
        return dataclasses.replace(self, key=join_key(prefix, self.key))


class ConfigProblems(ConfigError):
    """A ConfigError with a list of problems, so that a caller can add places."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Formats the problems: a single one as a line, several as a list."""
        self.problems = tuple(problems)
        assert self.problems, "an error needs at least one problem"
        super().__init__(_text(self.problems))

    def __reduce__(self) -> tuple[type[ConfigProblems], tuple[tuple[Problem, ...]]]:
        """Pickle by problems: errors travel between processes."""
        return (type(self), (self.problems,))

    def map(self, change: Callable[[Problem], Problem]) -> ConfigProblems:
        """A new error with a function applied to every problem."""
        return ConfigProblems(change(problem) for problem in self.problems)


def join_key(*parts: str) -> str:
    """Joins `sharding` and `strategy` to `sharding.strategy`; skips empty parts."""
    return ".".join(part for part in parts if part)


def show(value: object) -> str:
    """A value in the form of messages: text quoted, flags and null as in YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            text = repr(str(value))  # an enum member by its word
        case int() | float():
            text = repr(value)
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case _:
            text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} problems:{lines}"
