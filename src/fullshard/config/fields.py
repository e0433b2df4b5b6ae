"""The kinds of fields that a configuration has: numbers, flags, words, lists of names.

Each is a piece of `Annotated` metadata that reads what people and YAML write (`5e-5` and "1e8" are
numbers, `no` is a word) and refuses the rest as a `Rejected`, which says what was expected.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Iterable, Mapping
from typing import Annotated, cast

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.values import words_of


class Rejected(ValueError):
    """A value that a field cannot take; the caller knows the key."""

    def __init__(self, expected: str, advice: str = "") -> None:
        """Keep the words for the Problem."""
        super().__init__(expected)
        self.expected = expected
        self.advice = advice


def as_json(value: object, key: str = "") -> object:
    """A value as JSON has it: keys that are whole numbers become text.

    Raises:
        ConfigProblems: It contains something else, such as bytes.
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
    """A number with bounds; written as a number, or as text that is one (`"1e8"`, `1_000`).

    Args:
        at_least: smallest allowed value, or None.
        above: values must exceed this, or None.
        below: values must stay under this, or None.
        zero: a word for 0, which is no number here: somebody else finds the value.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Integers where the field is an int, floats where it is a float."""
        whole = source is int

        def read(value: object) -> float:
            return self._read(value, whole=whole)

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
        bounds = {
            "minimum": self.at_least,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
        }
        number = handler(schema) | {name: b for name, b in bounds.items() if b is not None}
        return {"anyOf": [number, {"const": self.zero}]} if self.zero else number

    def expected(self, *, whole: bool) -> str:
        """`an integer >= 1`, `a number > 0 and < 1`."""
        bounds = [
            f"{sign} {bound:,.12g}"
            for sign, bound in ((">=", self.at_least), (">", self.above), ("<", self.below))
            if bound is not None
        ]
        kind = " ".join(["an integer" if whole else "a number", " and ".join(bounds)]).strip()
        return f"{kind}, or {self.zero}" if self.zero else kind

    def _read(self, value: object, *, whole: bool) -> float:
        if self.zero and isinstance(value, str) and value.strip().lower() == self.zero:
            return 0
        number = to_number(value)
        if number is None or (whole and number != int(number)):
            too_large = str(value).strip().lstrip("-+").isdecimal()
            raise Rejected(self.expected(whole=whole), "The limit is 2^63 - 1" if too_large else "")
        if (
            (self.at_least is not None and number < self.at_least)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        ):
            raise Rejected(self.expected(whole=whole))
        return int(number) if whole else float(number)


def to_number(value: object) -> int | float | None:
    """The finite number that a value is or spells; None where it is none. Flags are no numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        for read in (int, float):
            try:
                value = read(value)
                break
            except ValueError:
                continue
    if not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        return None
    return value


_TOO_LARGE = 2**63  # no count, size or rate; infinity and NaN are not below it either


def to_flag(value: object) -> bool:
    """true and false, as YAML or a command line writes them."""
    word = words_of(value)[0] if isinstance(value, bool | str | int) else ""
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise Rejected("true or false")


def means_same(value: object, other: object) -> bool:
    """Whether a value is another one, in any spelling; 0 and false differ."""
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
    """Text stays; a number in place of text was most likely meant as text, so say how."""
    if isinstance(value, bool | int | float):
        raise Rejected("text", "Write it in quotes if it is meant as text")
    if not isinstance(value, str):
        raise Rejected("text")
    if not value.strip():
        raise Rejected("text that is not empty")
    if "\0" in value:
        raise Rejected("text without NUL characters")
    if value.startswith("~/"):  # as in a shell; unchanged where nobody knows a home
        return os.path.expanduser(value)  # noqa: PTH111
    return value


def to_names(value: object) -> tuple[str, ...]:
    """A list of names; one name alone, or several with commas, is a list too."""
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
