"""Writes a resolved configuration as YAML or data with origins; schemas for editors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import yaml

from fullshard.config.dialects.translate import Dialect
from fullshard.config.files import DEFAULT, EXPONENT, Origin, OriginKind, flatten
from fullshard.config.schema import RunConfig
from fullshard.config.training import MOVED, names
from fullshard.errors import join_key

if TYPE_CHECKING:
    from fullshard.config.load import Resolved

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_COMMENT_COLUMN = 48
_INDENT = 2


class _Dumper(yaml.SafeDumper):
    """Puts text into quotes that `files` would read as a number (`1e-4`) or a reference (`${`)."""


cast("Any", _Dumper).add_implicit_resolver(
    "tag:yaml.org,2002:float", EXPONENT, list("-+0123456789")
)


def _represented(dumper: Any, text: str) -> yaml.ScalarNode:
    style = None if text.splitlines() == [text] else '"'  # escapes line ends
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("${", "\\${"), style=style)


_Dumper.add_representer(str, _represented)


def write_yaml(
    config: RunConfig, origins: Mapping[str, Origin], *, with_defaults: bool = True
) -> str:
    """Writes the configuration as YAML with origins as comments: a run's config.yaml.

    Unset sections without defaults (teacher, sft ...) are omitted.
    """
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    title = "# Every value of this run, and where it came from."
    shown = set(flatten(values))
    if not with_defaults:
        left_out = {key for key in shown if origins[key].kind is OriginKind.DEFAULT}
        shown -= left_out
        title = f"# Values that were set, and where. --all adds {len(left_out)} defaults."
    return "\n".join([title, *_lines(values, "", origins, shown)]) + "\n"


def _lines(
    values: Mapping[Any, Any], prefix: str, origins: Mapping[str, Origin], shown: Collection[str]
) -> Iterator[str]:
    indent = " " * (_INDENT * (prefix.count(".") + 1 if prefix else 0))
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            inner = list(_lines(cast("dict[Any, Any]", value), key, origins, shown))
            yield from [f"{indent}{_flow(name)}:", *inner] if inner else ()
        elif key in shown:
            text = f"{indent}{_flow(name)}: {_flow(cast('object', value))}"
            yield f"{text:<{_COMMENT_COLUMN}}  # {origins[key]}"


def _flow(value: object) -> str:
    """A value on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")


def explain(resolved: Resolved) -> dict[str, Any]:
    """Sections by name, each value as `{value, origin}`, and `notes`."""
    return {
        "dialects": list(resolved.dialects),
        **_with_origins(resolved.config.to_dict(), "", resolved.origins),
        "notes": [
            {"key": note.key, "status": note.status, "why": note.why, "place": note.place}
            for note in resolved.notes
        ],
    }


def text_of(resolved: Resolved, *, with_defaults: bool) -> str:
    """The explanation as text: YAML with origins as comments, then one line per note."""
    lines = resolved.to_yaml(with_defaults=with_defaults).splitlines()
    return "\n".join([*lines, *([""] if resolved.notes else []), *map(str, resolved.notes)])


def schema() -> dict[str, Any]:
    """The JSON Schema of a file: every key, also under its other names."""
    made = RunConfig.model_json_schema()
    for name in RunConfig.field_names():
        section = RunConfig.section_of(name)
        if section is None or section.__name__ not in made["$defs"]:
            continue
        properties = made["$defs"][section.__name__]["properties"]
        for alias, key in section.ALIASES.items():
            properties[alias] = copy.deepcopy(properties[key])
    training = made["$defs"]["TrainingConfig"]["properties"]
    for name in (*names(), *MOVED):
        training.setdefault(name, {"description": "See `fullshard config explain`."})
    made["properties"]["strategy"] = {"description": "sharding.strategy"}
    # plain text is a model folder or a data path
    for name in ("model", "data", "teacher"):
        made["properties"][name] = {"anyOf": [{"type": "string"}, made["properties"][name]]}
    return {"$schema": _DRAFT, **made, "title": "A configuration of fullshard"}


def dialect_schema(dialect: Dialect) -> dict[str, Any]:
    """The JSON Schema of another tool's file: its keys and ours."""
    own = schema()
    properties = {**own["properties"], **_keys_of(dialect.table)}
    return {**own, "title": f"A file of {dialect.name}", "properties": properties, "required": []}


def _keys_of(table: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, entry in table.items():
        if isinstance(entry, Mapping):
            inner = _keys_of(cast("Mapping[str, object]", entry))
            found[key] = {"properties": inner}
            # names with a prefix are the same keys: fsdp_offload_params, stage3_max_live_parameters
            prefixed = "|".join(inner)
            found[key]["patternProperties"] = {
                f"^(fsdp_|parallelism_config_|stage3_)({prefixed})$": {}
            }
        elif key:
            found[key] = {}
    return found


def _with_origins(
    values: Mapping[str, Any], prefix: str, origins: Mapping[str, Origin]
) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            shown[str(name)] = _with_origins(cast("dict[str, Any]", value), key, origins)
        else:
            shown[str(name)] = {"value": value, "origin": str(origins.get(key, DEFAULT))}
    return shown
