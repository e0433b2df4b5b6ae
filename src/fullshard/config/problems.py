"""What is wrong with an input: every problem of it, in one grammar, as one error.

train.yaml:12: sharding.strategy: expected one of full_shard, no_shard; got 'ful'. Did you ...?
^ place        ^ key              ^ expected                            ^ got      ^ advice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from fullshard.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong, before it is worded.

    Args:
        key: dotted key, `sharding.strategy`; empty where the input as a whole is wrong.
        expected: what may stand there, as words: `an integer >= 0`. Empty where `got` says all.
        got: what stands there, as words: `'ful'`, `a list`.
        advice: what to do about it, one or two whole sentences; may be empty.
        place: where it stands, `train.yaml:12` or `command line`; filled in by the loader.
    """

    key: str
    expected: str
    got: str
    advice: str = ""
    place: str = ""

    def __str__(self) -> str:
        """The problem as one line of the grammar above."""
        separator = "; " if "," in self.expected else ", "
        said = f"expected {self.expected}{separator}got {self.got}" if self.expected else self.got
        head = ": ".join(part for part in (self.place, self.key, said) if part)
        return f"{head}. {self.advice}".rstrip() if self.advice else head

    def below(self, prefix: str) -> Problem:
        """The same problem, its key as seen from a level further up."""
        return dataclasses.replace(self, key=join_key(prefix, self.key))


class ConfigProblems(ConfigError):
    """A ConfigError that keeps its problems apart, so that a caller can add their places."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Word all problems: one alone on its line, several as a list."""
        self.problems = tuple(problems)
        assert self.problems, "an error needs at least one problem"
        super().__init__(_text(self.problems))

    def __reduce__(self) -> tuple[type[ConfigProblems], tuple[tuple[Problem, ...]]]:
        """Pickle by problems: errors travel between processes."""
        return (type(self), (self.problems,))

    def map(self, change: Callable[[Problem], Problem]) -> ConfigProblems:
        """A new error with every problem changed."""
        return ConfigProblems(change(problem) for problem in self.problems)


def join_key(*parts: str) -> str:
    """`sharding` and `strategy` as `sharding.strategy`; empty parts vanish."""
    return ".".join(part for part in parts if part)


def show(value: object) -> str:
    """A value as a message names it: words quoted, flags and null as YAML writes them."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            text = repr(str(value))  # a member of an enum as its word
        case int() | float():
            text = repr(value)
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} problems:{lines}"
