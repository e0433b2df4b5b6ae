"""Plans as JSON values and back: frozen dataclasses by field, enums by value."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar

SCHEMA_VERSION = 1
WIDTH = 100  # of a line of JSON, where its values permit

T = TypeVar("T")


def encode_plan(plan: Any) -> dict[str, Any]:
    """The plan as JSON values, with the schema's version."""
    return {"schema_version": SCHEMA_VERSION, **_encode(plan)}


def decode_plan(cls: type[T], data: dict[str, Any]) -> T:
    """Build a plan from what `encode_plan` made.

    Raises:
        ValueError: Another schema version. A missing or strange field raises KeyError or TypeError.
    """
    fields = dict(data)
    version = fields.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version} instead of {SCHEMA_VERSION}")
    return _decode(cls, fields)


def format_json(value: Any, depth: int = 0) -> str:
    """JSON in which what fits into a line stands on one, so that a plan reads as a table."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or len(line) + depth <= WIDTH:
        return line
    margin = "\n" + " " * depth
    if isinstance(value, dict):
        members = typing.cast("dict[str, Any]", value).items()
        inside = [f"{json.dumps(key)}: {format_json(item, depth + 1)}" for key, item in members]
        return "{" + ",".join(f"{margin} {item}" for item in inside) + margin + "}"
    inside = [format_json(item, depth + 1) for item in typing.cast("list[Any]", value)]
    return "[" + ",".join(f"{margin} {item}" for item in inside) + margin + "]"


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            f.name: _encode(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.metadata.get("omitted", dataclasses.MISSING)
        }
    if isinstance(value, tuple | list):
        return [_encode(item) for item in typing.cast("list[Any]", value)]
    if isinstance(value, Enum):
        return value.value
    return value


@cache
def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _decode(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_decode(item, entry) for entry in value)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return _decode(inner, value)
    if dataclasses.is_dataclass(hint):
        fields = _fields(hint)
        decoded = {name: _decode(fields[name], entry) for name, entry in value.items()}
        return typing.cast("type[Any]", hint)(**decoded)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return value
