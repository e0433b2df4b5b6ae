"""The base class of configuration sections: frozen, with checked keys and our error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from fullshard.config.fields import Rejected
from fullshard.config.problems import ConfigProblems, Problem, join_key, show
from fullshard.config.values import did_you_mean


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
        f"the same value as {name}, which is its other name and says {show(other)}",
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
