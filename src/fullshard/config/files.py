"""Reads YAML and JSON files as trees of values with the line of each key.

A tree consists of plain mappings with text keys. `find`, `put` and `drop` access it by dotted keys;
`interpolated` resolves `${...}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from fullshard.config.keys import FREE, PLAIN_KEYS, is_free
from fullshard.config.regular_files import did_you_mean_path, read_regular
from fullshard.config.values import ConfigProblems, Problem, join_key
from fullshard.errors import FullshardError

MOST_BY_ALIASES = 10_000
_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NOT_DECIMAL = re.compile(r"[-+]?0[0-7_]+|.*:.*")
EXPONENT = re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `1e-4` as a number, dates as text, and JSON's surrogate pairs."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            pairs = node.value.encode("utf-16", "surrogatepass")
            node.value = pairs.decode("utf-16", "surrogatepass")
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in rows if not tag.endswith(":timestamp")]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
cast("Any", _Loader).add_implicit_resolver(
    "tag:yaml.org,2002:float", EXPONENT, list("-+0123456789")
)


class OriginKind(StrEnum):
    """The kind of place a value came from."""

    FILE = "file"
    COMMAND_LINE = "command line"
    DEFAULT = "default"
    DERIVED = "derived"  # from another key, named in `written`
    MISSING = "missing: give model=FOLDER"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Args:
        kind: the kind of place.
        file: the file as the user named it, or None.
        line: line of the key in that file, from 1, or None.
        written: the key as written, which may be another tool's name.
    """

    kind: OriginKind
    file: str | None = None
    line: int | None = None
    written: str = ""

    @property
    def place(self) -> str:
        """`train.yaml:12`, `command line`, or nothing for a default or a missing value."""
        if self.file:
            return f"{self.file}:{self.line}"
        is_typed = self.kind in (OriginKind.COMMAND_LINE, OriginKind.DERIVED)
        return str(OriginKind.COMMAND_LINE) if is_typed else ""

    def __str__(self) -> str:
        """`train.yaml:12`, `command line`, `default`, `from training.bf16 (train.yaml:12)`."""
        if self.kind is OriginKind.DERIVED:
            return f"from {self.written} ({self.place})"
        return self.place or str(self.kind)


DEFAULT = Origin(OriginKind.DEFAULT)


@dataclasses.dataclass(frozen=True)
class File:
    """The contents of a file, or of the command line.

    Args:
        name: The file's name in messages.
        folder: Folder for relative names of other files, searched after the working directory.
        values: The tree of values.
        origins: The place of each dotted key, in the order of the file.
        is_ours: Whether the file is a job that ships with fullshard.
    """

    name: str
    folder: Path
    values: dict[str, Any]
    origins: dict[str, Origin]
    is_ours: bool = False

    def set(self, key: str, value: object, origin: Origin) -> None:
        """Sets a key and its origin."""
        put(self.values, key, value)
        self.origins[key] = origin

    def remove(self, keys: Collection[str]) -> None:
        """Removes keys and everything below them."""
        for key in keys:
            drop(self.values, key)
        for key in [key for key in self.origins if is_below(key, keys)]:
            del self.origins[key]


# ---- values by dotted keys -----------------------------------------------------------------------


def is_below(key: str, prefixes: Collection[str]) -> bool:
    """Whether a key is one of these, or below one."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def find(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key, with `${...}` unresolved; None if it is missing."""
    found: Any = values
    for part in key.split("."):
        found = cast("Any", found).get(part) if isinstance(found, dict) else None
    return found


def put(values: dict[str, Any], key: str, value: object) -> None:
    """Sets a key; merges mappings, and replaces text by one if needed (`model: FOLDER`)."""
    *path, name = key.split(".")
    for depth, part in enumerate(path):
        inner = values.get(part)
        if not isinstance(inner, dict):
            plain = PLAIN_KEYS.get(part) if depth == 0 and inner is not None else None
            inner = values[part] = {plain: inner} if plain else {}
        values = cast("dict[str, Any]", inner)
    before = values.get(name)
    both = isinstance(before, dict) and isinstance(value, dict)
    values[name] = {**cast("Any", before), **cast("Any", value)} if both else value


def drop(values: dict[str, Any], key: str) -> None:
    """Removes a key."""
    holder, _, name = key.rpartition(".")
    section = find(values, holder) if holder else values
    if isinstance(section, dict):
        cast("dict[str, Any]", section).pop(name, None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, for every value other than a non-empty mapping."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = join_key(prefix, str(name))
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[str, Any]", value), key)
        else:
            flat[key] = value
    return flat


def interpolated(
    values: dict[str, Any], section: str = "", names: Iterable[str] | None = None
) -> dict[str, Any]:
    """The values of a tree, or of a section of it, with `${...}` resolved.

    Raises:
        ConfigError: A reference cannot be resolved, or `???` has no value.
    """
    held = cast("dict[str, Any]", find(values, section) if section else values)
    wanted = list(held if names is None else names)
    if not any(mark in repr(values) for mark in ("${", "???")):
        return {name: held[name] for name in wanted}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def container(value: object) -> Any:
        if not OmegaConf.is_config(value):
            return value
        return OmegaConf.to_container(cast("Any", value), resolve=True, throw_on_missing=True)

    try:
        whole = OmegaConf.create(values)
        return {name: container((whole[section] if section else whole)[name]) for name in wanted}
    except OmegaConfBaseException as error:
        said = str(error).splitlines()[0]
        raise ConfigProblems([Problem(error.full_key or "", "", said)]) from None


# ---- files ---------------------------------------------------------------------------------------


def read_job(name: str = "main_job.yaml", package: str | None = None) -> File:
    """Read a configuration that ships with fullshard: a built-in job."""
    resource = files(package or "fullshard.config.defaults").joinpath(name)
    return dataclasses.replace(parse_text(resource.read_text("utf-8"), name), is_ours=True)


def read_file(path: Path) -> File:
    """Reads a configuration file.

    Raises:
        ConfigError: The file cannot be read, or a mapping has a duplicate key.
    """
    text = _text_of(path)
    if path.suffix == ".json":
        text = text.expandtabs()  # JSON may be indented with tabs, YAML may not
    return parse_text(text, str(path), path.parent)


def parse_text(text: str, name: str, folder: Path = Path()) -> File:
    """Parses the text of a configuration file that error messages call `name`."""
    with readable(name):
        root, loader = _compose(text, name)
        try:
            if misread := list(_misread(root, "", name)):
                raise ConfigProblems(misread)
            origins = dict(_origins(root, "", name))
        except RecursionError:
            raise _no_mapping("one that contains itself through an alias", name) from None
        try:
            values: Any = cast("Any", loader).construct_document(root)
        except yaml.MarkedYAMLError as error:  # a tag with another meaning: a Python object
            raise ConfigProblems([_syntax_problem(error, name)]) from None
    return File(name, folder, text_keys(values), origins)


def text_keys(values: Mapping[object, object], prefix: str = "") -> dict[str, Any]:
    """A copy with text keys, where YAML made others (`no:` is False, `1:` is 1).

    Mappings of free keys are not changed.
    """
    return {
        name: text_keys(cast("Any", value), join_key(prefix, str(key)))
        if isinstance(value, dict)
        else value
        for key, value in values.items()
        for name in [cast("str", key) if is_below(prefix, FREE) else str(key)]
    }


def parse_value(text: str, key: str) -> object:
    """Parses a command line's value for a key: lists, mappings and null as in YAML.

    Scalars stay text, which our fields parse; YAML would read `no` as a flag and `1:30` as 90. Free
    keys (`model.config`) have no such field, so YAML parses their scalars.

    Raises:
        ConfigError: A mapping has a duplicate key, or a number is misleading.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value: Any = None if node is None else cast("Any", loader).construct_document(node)
    except yaml.YAMLError:
        return text  # `freeze=*embed*` is an alias to YAML
    # YAML reads "a #1" as "a" and a comment, and a line break as a space.
    cut = isinstance(node, yaml.ScalarNode) and not node.style and node.value != text.strip()
    is_text = isinstance(value, bool | int | float) or text.strip() == "~"  # null only in a file
    if node is None or cut or (is_text and not is_free(key)):
        return text
    if misread := [dataclasses.replace(p, place="command line") for p in _misread(node, key, "")]:
        raise ConfigProblems(misread)
    return text_keys(cast("Any", value), key) if isinstance(value, dict) else value


@contextmanager
def readable(name: str) -> Generator[None]:
    """Converts any error of the libraries while they read a file into a ConfigError.

    YAML's constructors raise ValueError, KeyError or AttributeError for `!!int word`. Deeply nested
    mappings exceed Python's recursion limit.
    """
    try:
        yield
    except (FullshardError, MemoryError):
        raise
    except RecursionError:
        raise _no_mapping("one that is nested too deeply", name) from None
    except Exception as error:
        lines = str(error).splitlines() or [""]
        got = f"a value that cannot be read ({type(error).__name__}: {lines[0][:120]})"
        problem = Problem("", "a configuration", got, "Look for tags (!!) and long numbers", name)
        raise ConfigProblems([problem]) from error


def _text_of(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except FileNotFoundError:
        problem = _missing(path)
    except IsADirectoryError:
        problem = Problem("", "a configuration file", "a folder")
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        problem = Problem("", "UTF-8 text", got)
    except OSError as error:
        problem = Problem("", "a readable file", error.strerror or str(error))
    raise ConfigProblems([dataclasses.replace(problem, place=str(path))])


def _missing(path: Path) -> Problem:
    folder = path.parent
    advice = did_you_mean_path(path)
    if not folder.is_dir():
        return Problem("", "a configuration file", f"no folder '{folder}'", advice)
    configs = sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".json"))[:5]
    if configs and not advice:
        advice = f"'{folder}' has {', '.join(configs)}"
    return Problem("", "a configuration file", "no such file", advice)


# ---- YAML's nodes, which have lines --------------------------------------------------------------


def _compose(text: str, file: str) -> tuple[yaml.MappingNode, _Loader]:
    """Returns the nodes of a text, and the loader that constructs their values.

    Raises:
        ConfigError: The text is not YAML, not a mapping, or empty.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise ConfigProblems([_syntax_problem(error, file)]) from None
    except yaml.YAMLError as error:
        raise ConfigProblems([Problem("", "YAML text", str(error), place=file)]) from None
    if root is None:
        raise _no_mapping("an empty file", file, "Write at least `model:`")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "text"
        raise _no_mapping(kind, f"{file}:{_line(root)}")
    if _added_by_aliases(root) > MOST_BY_ALIASES:
        raise _no_mapping(f"aliases that write more than {MOST_BY_ALIASES:,} values", file)
    return root, loader


def _no_mapping(got: str, place: str, advice: str = "") -> ConfigProblems:
    return ConfigProblems([Problem("", "a mapping of keys", got, advice, place)])


def _added_by_aliases(root: yaml.Node) -> int:
    """The number of nodes that aliases add; a few lines can add 10^9."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # an alias that contains itself
            inner: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
            for item in inner:
                pair: Any = item if isinstance(node, yaml.MappingNode) else (item,)
                sizes[id(node)] += sum(map(size, pair))
        return sizes[id(node)]

    return size(root) - len(sizes)


def _origins(mapping: yaml.MappingNode, prefix: str, file: str) -> Iterator[tuple[str, Origin]]:
    for name, node, value in _items(mapping):
        key = join_key(prefix, name)
        yield key, Origin(OriginKind.FILE, file, _line(node), key)
        if isinstance(value, yaml.MappingNode):
            yield from _origins(value, key, file)


def _items(mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Name, key node and value of each key; merged keys (`<<`) come first, so that own keys win."""
    for key, value in mapping.value:
        if key.tag == _MERGE:
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for other in reversed(merged):
                if isinstance(other, yaml.MappingNode):
                    yield from _items(other)
    for key, value in mapping.value:
        if key.tag != _MERGE:
            yield str(key.value), key, value


def _misread(node: yaml.Node, prefix: str, file: str) -> Iterator[Problem]:
    """Finds duplicate keys and misleading numbers."""
    place = f"{file}:{_line(node)}"
    if node.tag in _NUMBERS and _NOT_DECIMAL.fullmatch(str(node.value)):
        got = f"{node.value}, which YAML reads in base {60 if ':' in node.value else 8}"
        yield Problem(prefix, "a decimal number", got, "Put it in quotes if it is text", place)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _misread(item, f"{prefix}[{index}]", file)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        name = join_key(prefix, str(key.value))
        if name in first:
            got = f"it in lines {first[name]} and {_line(key)}"
            place = f"{file}:{_line(key)}"
            yield Problem(name, "a key once", got, "Remove one of the two", place)
        first.setdefault(name, _line(key))
        yield from _misread(value, name, file)


def _syntax_problem(error: yaml.MarkedYAMLError, file: str) -> Problem:
    """The YAML error as a Problem, with its line."""
    mark = error.problem_mark or error.context_mark
    place = f"{file}:{mark.line + 1}" if mark else file
    said = " ".join(part for part in (error.context, error.problem) if part)
    advice = "YAML is indented by spaces" if "'\\t'" in said else ""
    kind = "JSON" if file.endswith(".json") else "YAML"
    return Problem("", kind, f"something else ({said})", advice, place)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
