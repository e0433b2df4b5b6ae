"""What fullshard's configuration asks of pydantic, for machines that have a GPU and no pydantic.

It reads and checks the values of one section. Errors are plain; nothing is written as a schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

Read = Callable[[Any], Any]
ConfigDict = dict
GetCoreSchemaHandler = GetJsonSchemaHandler = object


class ValidationError(Exception):
    """Never raised: what is wrong is raised as it is."""


class TypeAdapter:
    """Reads dataclasses from JSON, unchecked."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def validate_json(self, text: str | bytes, *, strict: bool) -> Any:
        return self._kind(**json.loads(text))


class BeforeValidator:
    """`read` runs before the check of the type."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Read:
        after = handler(source)
        return lambda value: after(self._read(value))


class PlainValidator(BeforeValidator):
    """`read` replaces the check of the type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Read:
        return self._read


def PlainSerializer(*_: Any, **__: Any) -> None:
    """Nothing is written."""


WithJsonSchema = PlainSerializer


def _decorated(*_: Any, mode: str = "after") -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        plain: Any = function.__func__ if isinstance(function, classmethod) else function
        plain.validates = mode
        return function

    return mark


model_validator = field_validator = _decorated


def _reader(kind: Any) -> Read:
    """What reads a value for a field of that type."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *marks = get_args(kind)
        read = _reader(inner)
        for mark in marks:
            make = getattr(mark, "__get_pydantic_core_schema__", None)
            if make is not None:
                read = make(inner, lambda _, before=read: before)
        return read
    if origin in (Union, UnionType):
        kinds = get_args(kind)
        reads = [_reader(one) for one in kinds if one is not type(None)]
        return lambda value: None if value is None else reads[0](value)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return lambda value: value if isinstance(value, kind) else kind(**value)
    if make := getattr(kind, "__get_pydantic_core_schema__", None):
        return make(kind, lambda _: lambda value: value)
    return lambda value: value


class BaseModel:
    """Fields with their values, frozen."""

    model_config: ClassVar[Any] = {}
    model_fields: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls.model_fields = {
            **cls.model_fields,
            **{
                name: SimpleNamespace(default=vars(cls).get(name))
                for name in vars(cls).get("__annotations__", {})
            },
        }

    def __init__(self, **values: Any) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        fields = {name: kind for name, kind in hints.items() if get_origin(kind) is not ClassVar}
        unknown = values.keys() - fields.keys()
        if unknown:
            raise TypeError(f"expected fields of {type(self).__name__}; got {sorted(unknown)}")
        held = vars(self)
        for name, kind in fields.items():
            default = getattr(type(self), name, None)
            held[name] = _reader(kind)(values[name]) if name in values else default
        held["model_fields_set"] = set(values)
        for base in type(self).__mro__:
            for function in vars(base).values():
                if getattr(function, "validates", "") == "after":
                    function(self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; got {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """The same with some values replaced, unchecked."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | update)
        return copy
