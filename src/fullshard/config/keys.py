"""Dotted keys: their names in other tools, and the resolution of bare names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fullshard.config.fields import Section
from fullshard.config.schema import RunConfig, TrainingConfig
from fullshard.config.training import MOVED, MOVES, RIVALS, names
from fullshard.config.values import ConfigProblems, Problem, did_you_mean

# Mappings with free keys of any type.
FREE = ("model.config", "teacher.config")

# The key that plain text in place of a section sets.
PLAIN_KEYS = {
    "model": "name_or_path",
    "teacher": "name_or_path",
    "student": "name_or_path",
    "data": "path",
}

# A prefix of keys on Hydra's command lines, which is ignored.
_DROPPED_GROUP = "distillation."


def canonical(key: str) -> str:
    """Our name for a dotted key: `training.evaluation_strategy` is `training.eval_strategy`."""
    section: type[Section] | None = RunConfig
    names: list[str] = []
    for part in key.split("."):
        name = section.ALIASES.get(part, part) if section else part
        names.append(name)
        section = section.section_of(name) if section else None
    dotted = ".".join(names)
    return next((m.target for m in MOVES if m.source == dotted and not m.stays), dotted)


def derived_from(key: str) -> Iterator[str]:
    """The keys whose value may determine this key's."""
    return (move.source for move in MOVES if move.target == key and move.stays)


def rivals_of(key: str) -> list[str]:
    """Other keys with the same meaning."""
    pairs = [*RIVALS, *((b, a) for a, b in RIVALS)]
    return [b for a, b in pairs if key == a or key.startswith(a + ".")]


def is_free(key: str) -> bool:
    """Whether a key is in a mapping of free keys."""
    return any(key.startswith(free + ".") for free in FREE)


def resolve(name: str, present: Iterable[str] = ()) -> str:
    """The dotted key for a name on the command line.

    Args:
        name: dotted, or bare where only one key has that name.
        present: the dotted keys of the file, whose free mappings (`model.config`) may be meant.

    Raises:
        ConfigError: No key, or more than one key, has the bare name.
    """
    key = name.strip().replace("-", "_").removeprefix(_DROPPED_GROUP)
    if "." in key or key in RunConfig.known_names():
        return key
    for candidates in (_fields(key, present), _other_names(key)):
        if len(candidates) > 1:
            listed = " and ".join(candidates)
            got = f"'{name}', which is the end of {listed}"
            raise _refused(name, "an unambiguous key", got, "Write the full key")
        if candidates:
            return candidates[0]
    near = did_you_mean(key, _every_name())
    raise _refused(name, "", "unknown key", near or "Write it as section.key=value")


def at_home(problem: Problem) -> Problem:
    """The problem of an unknown key; names another section that has such a key."""
    section, _, name = problem.key.rpartition(".")
    homes = {name} if name in RunConfig.known_names() else {*_fields(name, ()), *_other_names(name)}
    if not section or problem.got != "unknown key" or len(homes) != 1:
        return problem
    if problem.key in homes:  # a dotted name in a file, where sections are mappings
        return replace(problem, advice=f"Write it as `{name}:` in the section `{section}:`")
    return replace(problem, advice=f"Did you mean '{homes.pop()}'?")


def training_or_bare(name: str) -> str:
    """The key of a Hugging Face flag `--name`: that of `training` if it exists."""
    key = name.replace("-", "_")
    if "." in key:
        return key
    if key in TrainingConfig.known_names() or key in MOVED:
        return f"training.{key}"
    elsewhere = key in RunConfig.known_names() or _fields(key, ()) or _other_names(key)
    return key if elsewhere else f"training.{key}"


def _refused(key: str, expected: str, got: str, advice: str) -> ConfigProblems:
    return ConfigProblems([Problem(key, expected, got, advice, place="command line")])


def _fields(name: str, present: Iterable[str]) -> list[str]:
    """The keys of sections and of the file's free mappings that end with this name."""
    own = [f"{section}.{name}" for section, cls in _sections() if name in cls.field_names()]
    free = [key for key in present if is_free(key) and key.rpartition(".")[2] == name]
    return own + free


def _other_names(name: str) -> list[str]:
    """Other tools' names for a key, and Hugging Face names that are not supported yet."""
    aliases = [f"{section}.{name}" for section, cls in _sections() if name in cls.ALIASES]
    moved = [f"training.{name}"] if name in MOVED else []
    found = list(dict.fromkeys(canonical(key) for key in aliases + moved))
    return found or ([f"training.{name}"] if name in names() else [])


def _every_name() -> list[str]:
    names = [name for _, cls in _sections() for name in cls.known_names()]
    return [*RunConfig.known_names(), *names]


def _sections() -> list[tuple[str, type[Section]]]:
    """The sections in which bare names are searched, in order."""
    found = ((name, RunConfig.section_of(name)) for name in RunConfig.field_names())
    return [(n, cls) for n, cls in found if cls is not None and n != "teacher"]
