"""The types of configuration fields: numbers, flags, words, lists of names.

Each type is `Annotated` metadata. It parses the usual spellings (`5e-5` and "1e8" are numbers, `no`
is a word) and raises `Rejected` with the expected form for any other value.
"""

from __future__ import annotations

import dataclasses
import operator
import os.path
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, cast

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.values import words_of


class Rejected(ValueError):
    """A value is invalid for a field; the caller adds the key."""

    def __init__(self, expected: str, advice: str = "") -> None:
        """Keep the words for the Problem."""
        super().__init__(expected)
        self.expected = expected
        self.advice = advice


def as_json(value: object, key: str = "") -> object:
    """Converts a value to JSON types; integer keys become text.

    Raises:
        ConfigProblems: The value contains another type, such as bytes.
    """
    expected = "text, a number, true, false, null, a list or a mapping"
    match value:
        case dict():
            items = cast("dict[object, object]", value).items()
            return {_json_key(k, key): as_json(v, join_key(key, str(k))) for k, v in items}
        case list() | tuple():
            return [as_json(member, key) for member in cast("list[object]", value)]
        case None | bool() | int() | float() | str():
            return value
        case _:
            got = f"{type(value).__name__} {show(value)}"
            raise ConfigProblems([Problem(key, expected, got)])


def _json_key(name: object, key: str) -> str:
    if isinstance(name, str):
        return name
    if type(name) is int:
        return str(name)
    raise ConfigProblems([Problem(key, "words as keys", show(name), "Put it in quotes")])


@dataclasses.dataclass(frozen=True)
class Number:
    """A number with bounds, from a number or its text (`"1e8"`, `1_000`).

    Args:
        at_least: smallest allowed value, or None.
        above: values must exceed this, or None.
        below: values must stay under this, or None.
        zero: the word that 0 stands for here, such as `auto`.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Reads integers for int fields and floats for float fields."""
        read = partial(self._read, whole=source is int)
        shown = core_schema.plain_serializer_function_ser_schema(
            lambda value: value or self.zero, when_used="json"
        )
        return core_schema.no_info_before_validator_function(
            read, handler(source), serialization=shown if self.zero else None
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The bounds, for editors."""
        number = handler(schema) | {word: bound for bound, _, _, word in self._bounds()}
        return {"anyOf": [number, {"const": self.zero}]} if self.zero else number

    def expected(self, *, whole: bool) -> str:
        """`an integer >= 1`, `a number > 0 and < 1`."""
        bounds = [f"{sign} {bound:,.12g}" for bound, sign, _, _ in self._bounds()]
        kind = " ".join(["an integer" if whole else "a number", " and ".join(bounds)]).strip()
        return f"{kind}, or {self.zero}" if self.zero else kind

    def _bounds(self) -> list[tuple[float, str, Callable[[float, float], bool], str]]:
        """Each bound: its sign, whether a number keeps it, and its word in a JSON Schema."""
        rows = (
            (self.at_least, ">=", operator.ge, "minimum"),
            (self.above, ">", operator.gt, "exclusiveMinimum"),
            (self.below, "<", operator.lt, "exclusiveMaximum"),
        )
        return [(b, sign, holds, word) for b, sign, holds, word in rows if b is not None]

    def _read(self, value: object, *, whole: bool) -> float:
        if self.zero and isinstance(value, str) and value.strip().lower() == self.zero:
            return 0
        number = to_number(value)
        if number is None or (whole and number != int(number)):
            too_large = str(value).strip().lstrip("-+").isdecimal()
            raise Rejected(self.expected(whole=whole), "The limit is 2^63 - 1" if too_large else "")
        if not all(holds(number, bound) for bound, _, holds, _ in self._bounds()):
            raise Rejected(self.expected(whole=whole))
        return int(number) if whole else float(number)


def to_number(value: object) -> int | float | None:
    """The finite number that a value is or spells, or None. Flags are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        for read in (int, float):
            with suppress(ValueError):
                value = read(value)
                break
    if not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        return None
    return value


_TOO_LARGE = 2**63  # above any count, size or rate; also excludes infinity and NaN


def to_flag(value: object) -> bool:
    """true and false, as YAML or a command line writes them."""
    word = words_of(value)[0] if isinstance(value, bool | str | int) else ""
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise Rejected("true or false")


def means_same(value: object, other: object) -> bool:
    """Whether two values are equal in any spelling; 0 and false differ."""
    if isinstance(other, bool):
        try:
            return to_flag(value) is other
        except Rejected:
            return False
    if other is None:
        return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    number = to_number(other)
    if number is not None:
        return to_number(value) == number
    if isinstance(other, str) and other and isinstance(value, str | bool):
        return other.lower() in words_of(value)
    return value == other


def to_text(value: object) -> object:
    """Returns text; the error for a number shows how to quote it."""
    if not isinstance(value, str):
        is_scalar = isinstance(value, bool | int | float)
        raise Rejected("text", "Write it in quotes if it is meant as text" if is_scalar else "")
    if not value.strip():
        raise Rejected("text that is not empty")
    if "\0" in value:
        raise Rejected("text without NUL characters")
    return os.path.expanduser(value)  # noqa: PTH111  `~` and `~user`; unchanged if there is no home


def to_names(value: object) -> tuple[str, ...]:
    """A list of names, from a list, a single name, or names separated by commas."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        names = list(cast("Iterable[object]", value))
        if all(isinstance(name, str) for name in names):
            return tuple(cast("list[str]", names))
    raise Rejected("a name or a list of names")


Flag = Annotated[bool, BeforeValidator(to_flag)]
Text = Annotated[str, BeforeValidator(to_text)]
Names = Annotated[tuple[str, ...], BeforeValidator(to_names)]
Count = Annotated[int, Number(at_least=1)]
CountOrAuto = Annotated[int, Number(at_least=1, zero="auto")]
Depth = Annotated[int, Number(at_least=0)]
Rate = Annotated[float, Number(at_least=0)]
Positive = Annotated[float, Number(above=0)]
Share = Annotated[float, Number(at_least=0, below=1)]
