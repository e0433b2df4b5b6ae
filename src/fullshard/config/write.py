"""A configuration as YAML text, every value with its origin as a comment."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from fullshard.config.files import Origin, OriginKind
from fullshard.config.problems import join_key
from fullshard.config.schema import RunConfig

_COMMENT_COLUMN = 48
_INDENT = 2

# Text that stands for itself in every YAML: no quotes, no second meaning (checked below).
_PLAIN = re.compile(r"(?:[A-Za-z_]|\.{0,2}/)[\w./-]*", re.ASCII)


def write_yaml(
    config: RunConfig, origins: Mapping[str, Origin], *, with_defaults: bool = True
) -> str:
    """The text of a run's config.yaml.

    Sections that nobody asked for and that have no defaults (teacher, sft ...) are left out.
    """
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    title = "# Every value of this run, and where it came from."
    if not with_defaults:
        num_values = len(flatten(values))
        values = chosen(values, origins)
        num_left_out = num_values - len(flatten(values))
        title = f"# Values that were set, and where. --all adds {num_left_out} defaults."
    return "\n".join([title, *_lines(values, "", origins)]) + "\n"


def chosen(
    values: Mapping[str, Any], origins: Mapping[str, Origin], prefix: str = ""
) -> dict[str, Any]:
    """The same values without those that are defaults, and without sections of nothing else."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            value = chosen(cast("dict[str, Any]", value), origins, key)
            if value:
                found[str(name)] = value
        elif key in origins and origins[key].kind is not OriginKind.DEFAULT:
            found[str(name)] = value
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, for every value that is no mapping (an empty mapping is a value)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[str, Any]", value), key)
        else:
            flat[key] = value
    return flat


def _lines(values: Mapping[Any, Any], prefix: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    indent = " " * (_INDENT * (prefix.count(".") + 1 if prefix else 0))
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            yield f"{indent}{_flow(name)}:"
            yield from _lines(cast("dict[Any, Any]", value), key, origins)
            continue
        text = f"{indent}{_flow(name)}: {_flow(cast('object', value))}"
        yield f"{text:<{_COMMENT_COLUMN}}  # {origins[key]}"


def _flow(value: object) -> str:
    """A value on one line, in the spelling that reads back as itself."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return {"inf": ".inf", "-inf": "-.inf"}.get(repr(value), ".nan")
        case int() | float():
            return repr(value)
        case list():
            members = cast("list[object]", value)
            return "[" + ", ".join(_flow(member) for member in members) + "]"
        case dict():
            items = cast("dict[object, object]", value).items()
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in items) + "}"
        case _:
            return _text(str(value))


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted = yaml.safe_dump(text.replace("${", "\\${"), default_style='"', width=float("inf"))
    return quoted.rstrip("\n")
