"""The command line: `key=value`, `a.b.key=value`, `--name value`, as keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from fullshard.config.files import parse_value
from fullshard.config.keys import canonical, resolve, training_or_bare
from fullshard.config.problems import ConfigProblems, Problem


@dataclasses.dataclass(frozen=True)
class Override:
    """One value of the command line.

    Args:
        written: the key as it was typed.
        key: the dotted key that it means, under our name.
        value: what the text means as YAML; plain text where a field of ours reads it.
    """

    written: str
    key: str
    value: object


def overrides_from_args(args: Sequence[str]) -> list[str]:
    """Left-over command line arguments as `key=value` texts.

    `--max_steps 5`, `--max_steps=5` and `--max-steps 5` are `training.max_steps=5`; a flag with
    nothing behind it (`--bf16`) is true; `key=value` stays.
    """
    overrides: list[str] = []
    waiting: str | None = None
    for arg in args:
        is_flag = arg.startswith("--") and len(arg) > len("--")
        if waiting is not None:
            overrides.append(f"{waiting}={'true' if is_flag else arg}")
            waiting = None
            if not is_flag:
                continue
        if not is_flag:
            overrides.append(arg)
            continue
        name, has_value, value = arg.removeprefix("--").partition("=")
        key = training_or_bare(name)
        if has_value:
            overrides.append(f"{key}={value}")
        else:
            waiting = key
    return [*overrides, f"{waiting}=true"] if waiting is not None else overrides


def parse_overrides(
    texts: Sequence[str], present: Iterable[str]
) -> tuple[list[Override], list[Problem]]:
    """Each text as a key and a value.

    Args:
        texts: `key=value`, as typed.
        present: the dotted keys of the file.

    Returns:
        The overrides, and a problem for every text that is no `key=value`, or whose key is unknown
        or ambiguous.
    """
    keys = list(present)
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            overrides.append(_parse(text, keys))
        except ConfigProblems as error:
            problems += error.problems
    return overrides, problems


def _parse(text: str, present: list[str]) -> Override:
    written, has_value, value = text.partition("=")
    if not has_value or not all(written.strip().split(".")):
        advice = "One configuration file comes first, then its overrides"
        got = repr(text)
        raise ConfigProblems([Problem("", "key=value", got, advice, place="command line")])
    key = canonical(resolve(written, present))
    # To YAML, nothing is null.
    return Override(written.strip(), key, parse_value(value, key) if value.strip() else value)
