"""Configuration sections, and the types of their fields: numbers, flags, words, lists of names.

Each type is `Annotated` metadata. It parses the usual spellings (`5e-5` and "1e8" are numbers, `no`
is a word) and raises `Rejected` with the expected form for any other value.
"""

from __future__ import annotations

import dataclasses
import operator
import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from fullshard.config.values import ConfigProblems, Problem, did_you_mean, join_key, show, words_of


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
        zero: the word that 0 means, such as `auto`.
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
            too_large = number is None and _DIGITS.fullmatch(str(value).strip())
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


_DIGITS = re.compile(r"[-+]?\d+(\.\d*)?(e\+?\d+)?")
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
        raise Rejected("text", "Write it in quotes if it is text" if is_scalar else "")
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


# ---- sections ------------------------------------------------------------------------------------


class Section(BaseModel):
    """A section of a configuration.

    Invalid input raises one ConfigError that lists all problems, never pydantic's error. `ALIASES`
    contains other tools' names of keys. A key and its alias may both be given if they agree.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # infinity in a model's configuration must not become null
    )

    ALIASES: ClassVar[Mapping[str, str]] = {}

    def __init__(self, /, **values: Any) -> None:
        """Reads and checks the values; raises a ConfigError with all problems."""
        prepared, problems = self.prepare(values)
        others = [key for key in prepared if key not in type(self).model_fields]
        known = {key: value for key, value in prepared.items() if key not in others}
        try:
            super().__init__(**known)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                problems += _translate(type(self), details)
        problems += map(self.unknown, others)
        if problems:
            raise ConfigProblems(problems)

    @classmethod
    def prepare(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Replaces other tools' names by ours.

        Returns:
            The values under our names, and the problems found.
        """
        prepared: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in values.items():
            name = cls.ALIASES.get(key, key)
            if name != key and name in values and values[name] != value:
                problems.append(_disagreement(key, value, name, values[name]))
            prepared.setdefault(name, value)
        return prepared, problems

    @classmethod
    def of(cls, base: Self | Mapping[str, Any] | None = None, **overrides: Any) -> Self:
        """Returns the base with some fields replaced; fields not in the base keep their defaults.

        Args:
            base: a section, a mapping of keys, or None for all defaults.
            overrides: fields by name, in any accepted spelling.
        """
        if base is None:
            return cls(**overrides)
        if isinstance(base, Mapping):
            return cls(**{**base, **overrides})
        if not isinstance(base, cls):
            got = f"{type(base).__name__} {show(base)}"
            raise ConfigProblems([Problem("", f"a {cls.__name__}, a mapping or None", got)])
        given = {name: getattr(base, name) for name in base.model_fields_set}
        return cls(**{**given, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as JSON values, which read back as an equal section."""
        return self.model_dump(mode="json")

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of the fields, in order."""
        return list(cls.model_fields)

    @classmethod
    def section_of(cls, name: str) -> type[Section] | None:
        """The class of a field that is a section, or None."""
        field = cls.model_fields.get(name)
        annotation: Any = field.annotation if field else None
        kinds = (annotation, *get_args(annotation))
        return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)

    @classmethod
    def known_names(cls) -> list[str]:
        """Every accepted name, for suggestions."""
        return [*cls.field_names(), *cls.ALIASES]

    @classmethod
    def unknown(cls, key: str) -> Problem:
        """The problem of an unknown key; names the nearest valid key."""
        advice = did_you_mean(key, cls.known_names())
        if not advice and len(cls.field_names()) <= _SHORT_LIST:
            advice = f"Known keys: {', '.join(cls.field_names())}"
        return Problem(key or "''", "", "unknown key", advice)


def _disagreement(alias: str, value: object, name: str, other: object) -> Problem:
    return Problem(
        alias,
        f"the value of its alias {name}, which is {show(other)}",
        show(value),
        "Give one of the two",
    )


def _translate(section: type[Section], details: ErrorDetails) -> list[Problem]:
    """Translates an error of pydantic into problems."""
    key = join_key(*(str(part) for part in details["loc"]))
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigProblems):
        return [problem.below(key) for problem in cause.problems]
    got = show(details["input"])
    if isinstance(cause, Rejected):
        return [Problem(key, cause.expected, got, cause.advice)]
    if details["type"] == "missing":
        advice = section.model_fields[key].description or "This key has no default"
        return [Problem(key, "", "missing", advice)]
    expected = _EXPECTED.get(details["type"])
    if expected is not None:
        return [Problem(key, expected, got)]
    return [Problem(key, details["msg"][:1].lower() + details["msg"][1:], got)]


_SHORT_LIST = 12  # more keys do not help in a message

_EXPECTED: Mapping[str, str] = {
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "invalid_key": "a word as key",
    "tuple_type": "a list",
    "string_type": "text",
}
