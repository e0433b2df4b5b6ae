"""`fullshard config`: explains and checks configuration files of any tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import OPEN_WORDS, ConfigFileFlag, ConfigFlag, Words, load
from fullshard.cli.outcome import JSON_HELP, Outcome, check_out
from fullshard.errors import FullshardError

if TYPE_CHECKING:
    from fullshard.config.load import Resolved

app = typer.Typer(no_args_is_help=True, help="Explain and check configuration files.")


@app.command(context_settings=OPEN_WORDS)
def explain(
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show defaults.")] = False,
) -> Outcome:
    """Show every value that was set, where it was set, and how other tools' keys are translated.

    CONFIG may be a file for Accelerate, DeepSpeed, the Trainer or axolotl. No model is needed. Then
    follow the errors that a run would raise; `train --dry-run` also checks plan, memory and data.
    """
    from fullshard.config import load as loading

    resolved = load(words, config, config_file, explaining=True)
    print(loading.text_of(resolved, with_defaults=everything))
    return Outcome({**loading.explain(resolved), "refused": _print_refused(resolved)})


@app.command(context_settings=OPEN_WORDS)
def lint(
    words: Words = None, config: ConfigFlag = None, config_file: ConfigFileFlag = None
) -> Outcome:
    """Report the errors that a run would raise, known-bad settings, and keys without effect.

    The exit code is 2 if there are errors or known-bad settings.
    """
    from fullshard.config.supported import findings
    from fullshard.launch.exit_codes import ExitCode

    resolved = load(words, config, config_file, explaining=True)
    refused = _print_refused(resolved)
    found = [
        {"key": key, "place": resolved.index.origin_of(key, is_default=True).place, "why": why}
        for key, why in findings(resolved.config)
    ]
    for one in found:
        print(": ".join(part for part in (one["place"], one["key"], one["why"]) if part))
    listed = {one["key"] for one in found}
    notes = (note for note in resolved.notes if note.key not in listed)
    lost = [str(note) for note in notes if note.is_told and not note.is_overruled]
    for one in lost or ([] if found or refused else ["nothing found"]):
        print(one)
    result = {"refused": refused, "findings": found, "lost": lost}
    return Outcome(result, ExitCode.CONFIG if found or refused else ExitCode.OK)


def _print_refused(resolved: Resolved) -> list[str]:
    """Print the errors that a run would raise before it makes a plan and reads the data."""
    from fullshard.recipes.registry import Command, check_command, check_paths

    def refusals(check: Callable[..., object], *arguments: Any, **named: Any) -> list[str]:
        try:
            check(*arguments, **named)
        except FullshardError as error:
            located = resolved.located(error)
            return [str(one) for one in getattr(located, "problems", [located])]
        return []

    missing = Path("MODEL") if resolved.is_without_model else None
    found = refusals(resolved.check_supported)
    # the file is for a command that refuses least of it
    of_each = [refusals(check_command, resolved.config, one) for one in reversed(Command)]
    found += min(of_each, key=len)
    wrong = refusals(check_paths, resolved, missing, reads_data=True)
    if not wrong and not missing:
        from fullshard.models.build import with_fitting_length  # imports torch

        wrong = refusals(with_fitting_length, resolved)
    for one in (found := found + wrong):
        print(f"refused: {one}")
    return found


@app.command()
def schema(
    file: Annotated[Path | None, typer.Argument()] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> Outcome:
    """Print a JSON Schema, with which editors complete and check configuration files.

    Args:
        file: A configuration file; the schema is that of its tool. Default: fullshard's schema.
        out: File to write the schema to. Default: standard output.
        as_json: see `JSON_HELP`.
    """
    from fullshard.config import load as loading
    from fullshard.config.dialects.translate import dialect_of
    from fullshard.config.files import read_file

    dialect = None if file is None else dialect_of(read_file(file).values)
    made = loading.schema() if dialect is None else loading.dialect_schema(dialect)
    text = json.dumps(made, indent=2) + "\n"
    if out is not None:
        check_out(out)
        out.write_text(text, encoding="utf-8")
        print(f"written to {out}")
    elif not as_json:
        print(text, end="")
    return Outcome(made)
