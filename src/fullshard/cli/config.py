"""`fullshard config`: explains and checks configuration files of any tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.arguments import OPEN_WORDS, ConfigFileFlag, ConfigFlag, Words, load
from fullshard.cli.outcome import JSON_HELP, Outcome
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from fullshard.config.load import Resolved

app = typer.Typer(no_args_is_help=True, help="Explain, check and describe configuration files.")


@app.command(context_settings=OPEN_WORDS)
def explain(
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    everything: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
) -> Outcome:
    """Show every value that was set, where it was set, and how each key of another tool is read.

    CONFIG may be a file of Accelerate's, DeepSpeed's, the Trainer's or axolotl's; no model is
    needed.
    """
    from fullshard.config import explain as explaining

    resolved = load(words, config, config_file, explaining=True)
    print(explaining.text_of(resolved, with_defaults=everything))
    return Outcome(explaining.explain(resolved))


@app.command(context_settings=OPEN_WORDS)
def lint(
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
) -> Outcome:
    """Report errors, unsupported values and known-bad settings, each with the reason.

    The exit code is 2 if there are any.
    """
    from fullshard.config.dialects.rules import Status
    from fullshard.config.supported import findings
    from fullshard.launch.exit_codes import ExitCode

    resolved = load(words, config, config_file, explaining=True)
    found = _not_yet(resolved)
    found += [
        {"key": key, "place": resolved.place_of(key), "why": why}
        for key, why in findings(resolved.config)
    ]
    for one in found:
        print(": ".join(part for part in (one["place"], one["key"], one["why"]) if part))
    lost = [note for note in resolved.notes if note.status is Status.LOST]
    for note in lost:
        print(note)
    if not found and not lost:
        print("nothing found")
    result = {"findings": found, "lost": [str(note) for note in lost]}
    return Outcome(result, ExitCode.CONFIG if found else ExitCode.OK)


def _not_yet(resolved: Resolved) -> list[dict[str, str]]:
    """The values that a run would refuse."""
    from fullshard.config.problems import ConfigProblems

    try:
        resolved.check_supported()
    except ConfigProblems as error:
        return [
            {"key": p.key, "place": p.place, "why": f"{p.got}. {p.advice}"} for p in error.problems
        ]
    return []


@app.command()
def schema(
    file: Annotated[Path | None, typer.Argument()] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> Outcome:
    """Print a JSON Schema, which lets an editor complete and check a file.

    Args:
        file: A file, whose dialect's schema is printed.
        out: File to write the schema to.
        as_json: see `JSON_HELP`.
    """
    from fullshard.config import explain as explaining
    from fullshard.config.dialects.translate import dialect_of
    from fullshard.config.files import read_file

    dialect = None if file is None else dialect_of(read_file(file).values)
    made = explaining.schema() if dialect is None else explaining.dialect_schema(dialect)
    text = json.dumps(made, indent=2) + "\n"
    if out is not None:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: expected a file, got '{out}': {error.strerror}.") from None
        print(f"written to {out}")
    elif not as_json:
        print(text, end="")
    return Outcome(made)
