"""A YAML or JSON file as keys with their lines, and values."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fullshard.config.origins import Entry, read_entries, syntax_problem
from fullshard.config.problems import ConfigProblems, Problem
from fullshard.config.regular import did_you_mean_path, read_regular
from fullshard.errors import FullshardError

MAIN_JOB = "main_job.yaml"
# That we ship.
JOBS = (
    *(MAIN_JOB, "sft_job.yaml", "teacher_job.yaml"),
    *("distill_job.yaml", "distill_jax_job.yaml"),
)


@dataclass(frozen=True)
class File:
    """What stands in a file.

    Args:
        name: as messages name it.
        folder: in which relative names of other files are looked for, after the working directory.
        config: its values.
        entries: its keys with their lines.
    """

    name: str
    folder: Path
    config: DictConfig
    entries: list[Entry]

    def without(self, keys: Collection[str]) -> File:
        """The file as if some of its keys did not stand there."""
        for key in keys:
            drop(self.config, key)
        return replace(self, entries=[e for e in self.entries if not is_below(e.key, keys)])


def is_below(key: str, prefixes: Collection[str]) -> bool:
    """Whether a key is one of these, or lies in one."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def drop(config: DictConfig, key: str) -> None:
    """Remove a key, under the name that the file has for it."""
    holder, _, name = key.rpartition(".")
    section = OmegaConf.select(config, holder) if holder else config
    if isinstance(section, DictConfig):  # YAML may have made a number or a flag of the name
        section.pop(next((key for key in section if str(key) == name), name), None)


def read_file(path: Path | None, default: str = MAIN_JOB) -> File:
    """A file of configuration; None: a job that ships with fullshard, the main one unless said.

    Raises:
        ConfigError: it cannot be read, or a key stands twice in one mapping.
    """
    text, name = _text_of(path, default)
    if name.endswith(".json"):
        text = text.expandtabs()  # which JSON may be indented with, and YAML may not
    return parse_text(text, name, path.parent if path else Path())


def parse_text(text: str, name: str, folder: Path = Path()) -> File:
    """The same, of a text that messages call `name`."""
    with readable(name):
        entries = read_entries(text, name)
        try:
            config = OmegaConf.create(text)
        except yaml.MarkedYAMLError as error:  # its meaning is nothing to us: a Python object
            raise ConfigProblems([syntax_problem(error, name)]) from None
    assert isinstance(config, DictConfig), "read_entries has seen a mapping"
    return File(name, folder, config, entries)


@contextmanager
def readable(name: str) -> Generator[None]:
    """Inside, whatever a stranger's file makes the libraries raise becomes a ConfigError.

    YAML's constructors raise ValueError, KeyError or AttributeError for `!!int word`, and deeply
    nested mappings end Python's stack.
    """
    try:
        yield
    except (FullshardError, OmegaConfBaseException, MemoryError):
        raise
    except RecursionError:
        problem = Problem("", "a mapping of keys", "one that is nested too deeply", place=name)
        raise ConfigProblems([problem]) from None
    except Exception as error:
        lines = str(error).splitlines() or [""]
        got = f"a value that cannot be read ({type(error).__name__}: {lines[0][:120]})"
        problem = Problem("", "a configuration", got, "Look for tags (!!) and long numbers", name)
        raise ConfigProblems([problem]) from error


def _text_of(path: Path | None, default: str) -> tuple[str, str]:
    """The text, and the name that messages have for it."""
    if path is None:
        resource = files("fullshard.config").joinpath("defaults").joinpath(default)
        return resource.read_text(encoding="utf-8"), default
    name = str(path)
    try:
        return read_regular(path).decode("utf-8-sig"), name
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
        got, near = f"no folder '{folder}'", did_you_mean_path(path)
        return Problem("", "a configuration file", got, near, place=str(path))
    configs = sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".json"))[:5]
    advice = did_you_mean_path(path)
    if configs and not advice:
        advice = f"'{folder}' has {', '.join(configs)}"
    return Problem("", "a configuration file", "no such file", advice, place=str(path))
