"""A file and a command line become one checked configuration whose every value has an origin.

train.yaml --+
             +--> OmegaConf merges --> mapping --> RunConfig (frozen) --> Resolved
key=value ---+
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.keys import FREE, PLAIN_KEYS, canonical, rivals_of
from fullshard.config.origins import Entry, Index, Origin, OriginKind, read_entries, syntax_problem
from fullshard.config.overrides import Override, parse_overrides
from fullshard.config.problems import ConfigProblems, Problem, join_key
from fullshard.config.schema import RunConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import nearest
from fullshard.config.write import flatten, write_yaml
from fullshard.errors import FullshardError

MAIN_JOB = "main_job.yaml"

_NO_MODEL = {"name_or_path": None, "config": None}

ErrorT = TypeVar("ErrorT", bound=FullshardError)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration, and where each of its values came from.

    Args:
        config: the whole configuration, checked.
        origins: by dotted key, for every value of it.
        index: finds the place of any key that somebody wrote.
    """

    config: RunConfig
    origins: Mapping[str, Origin]
    index: Index = dataclasses.field(repr=False)

    def to_yaml(self) -> str:
        """The configuration as YAML with every origin as a comment; loads to an equal one."""
        return write_yaml(self.config, self.origins)

    def check_supported(
        self, *, planning: bool = False, launch: LaunchEnvironment | None = None
    ) -> None:
        """As `supported.check_supported`, with the place of every value that it refuses."""
        try:
            check_supported(self.config, planning=planning, launch=launch)
        except ConfigProblems as error:
            raise error.map(self.index.locate) from None

    def located(self, error: ErrorT) -> ErrorT | ConfigProblems:
        """The same error with its place in front, where its text begins with a key of a file.

        For checks that come later than this one (is the data there, is the mesh possible), so
        that their errors name the line too.
        """
        if isinstance(error, ConfigProblems):
            return error.map(self.index.locate)
        key, colon, said = str(error).partition(": ")
        for full in (key, f"sharding.{key}"):  # the planner knows ShardConfig's names alone
            if colon and full in self.origins and self.origins[full].place:
                return type(error)(f"{self.origins[full].place}: {full}: {said}")
        return error


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Resolved:
    """Read a file and merge the command line into it.

    Args:
        path: a YAML file; None: the main job, which ships with fullshard.
        overrides: `a.b.key=value`, or `key=value` where only one key has that name.

    Raises:
        ConfigError: with everything that is wrong with the input, and its places.
    """
    text, name = _read(path)
    entries = read_entries(text, name)
    given, problems = parse_overrides(overrides, [canonical(entry.key) for entry in entries])
    replaced = {key for o in given for key in (o.key, *rivals_of(o.key))}
    gone = [entry for entry in entries if _is_below(canonical(entry.key), replaced)]
    kept = [entry for entry in entries if entry not in gone]
    index = Index([*kept, *(_entry(override) for override in given)], name)
    try:
        config = RunConfig(**_merge(text, gone, given, name))
    except ConfigProblems as error:
        problems += map(index.locate, error.problems)
        raise ConfigProblems(problems) from None
    if problems:
        raise ConfigProblems(problems)
    return Resolved(config, _origins(config, index), index)


def _read(path: Path | None) -> tuple[str, str]:
    """The text, and the name that messages have for it."""
    if path is None:
        resource = files("fullshard.config").joinpath("defaults").joinpath(MAIN_JOB)
        return resource.read_text(encoding="utf-8"), MAIN_JOB
    name = str(path)
    try:
        return path.read_text(encoding="utf-8-sig"), name
    except FileNotFoundError:
        raise ConfigProblems([_missing(path)]) from None
    except IsADirectoryError:
        raise ConfigProblems(
            [Problem("", "a configuration file", "a folder", place=name)]
        ) from None
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise ConfigProblems([Problem("", "UTF-8 text", got, place=name)]) from None
    except OSError as error:
        got = error.strerror or str(error)
        raise ConfigProblems([Problem("", "a readable file", got, place=name)]) from None


def _missing(path: Path) -> Problem:
    folder = path.parent
    if not folder.is_dir():
        return Problem("", "a configuration file", f"no folder '{folder}'", place=str(path))
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    near = nearest(path.name, names)
    configs = [name for name in names if name.endswith((".yaml", ".yml", ".json"))][:5]
    if near:
        advice = f"Did you mean '{folder / near}'?"
    elif configs:
        advice = f"'{folder}' has {', '.join(configs)}"
    else:
        advice = ""
    return Problem("", "a configuration file", "no such file", advice, place=str(path))


def _entry(override: Override) -> Entry:
    origin = Origin(OriginKind.COMMAND_LINE, written=override.written)
    return Entry(override.key, origin)


def _merge(
    text: str, gone: Sequence[Entry], overrides: Sequence[Override], name: str
) -> dict[str, Any]:
    """The mapping of the file, with the command line's values in place of its own."""
    try:
        config = OmegaConf.create(text)
        assert isinstance(config, DictConfig), "read_entries has seen a mapping"
        updated = [override.key for override in overrides]
        for entry in gone:
            if entry.key not in updated:  # an update keeps the key's place
                _drop(config, entry.key)
        for override in overrides:
            _make_room(config, override.key)
            OmegaConf.update(config, override.key, override.value, force_add=True)
        merged = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except yaml.MarkedYAMLError as error:  # YAML whose meaning is nothing to us: a Python object
        raise ConfigProblems([syntax_problem(error, name)]) from None
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        said = str(error).splitlines()[0]
        raise ConfigProblems([Problem(key, "", said, place="" if key else name)]) from None
    return _with_text_keys(cast("dict[object, object]", merged))


def _is_below(key: str, prefixes: set[str]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _drop(config: DictConfig, key: str) -> None:
    """Remove a key, under the name that the file has for it."""
    holder, _, name = key.rpartition(".")
    section = OmegaConf.select(config, holder) if holder else config
    if isinstance(section, DictConfig):
        section.pop(name, None)


def _make_room(config: DictConfig, key: str) -> None:
    """What stands in a key's way becomes a mapping: `model: FOLDER` before `model.config.x=1`."""
    section, dot, _ = key.partition(".")
    if dot and (plain := OmegaConf.select(config, section)) is not None:
        name = PLAIN_KEYS.get(section)
        if name is not None and not isinstance(plain, DictConfig):
            config[section] = {name: plain}
    parts = key.split(".")
    for end in range(1, len(parts)):
        prefix = ".".join(parts[:end])
        if not isinstance(OmegaConf.select(config, prefix), DictConfig):
            OmegaConf.update(config, prefix, {}, force_add=True)


def _with_text_keys(values: Mapping[object, object], prefix: str = "") -> dict[Any, Any]:
    """Keys of ours are words, whatever YAML made of them (`no:` is False, `1:` is 1)."""
    if prefix in FREE:
        return dict(values)
    return {
        str(key): _with_text_keys(cast("dict[object, object]", value), join_key(prefix, str(key)))
        if isinstance(value, dict)
        else value
        for key, value in values.items()
    }


def _origins(config: RunConfig, index: Index) -> dict[str, Origin]:
    """The origin of every value, by dotted key."""
    # model has no default: whichever of its keys is there was written.
    defaults = flatten({**RunConfig(model=config.model).to_dict(), "model": dict(_NO_MODEL)})
    values = flatten(config.to_dict())
    return {
        key: index.origin_of(key, is_default=values[key] == defaults.get(key)) for key in values
    }
