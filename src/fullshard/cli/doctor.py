"""`fullshard doctor`: is this machine fit to train, and what to tell whoever is asked for help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome

app = typer.Typer()

MARKS = {"ok": "ok    ", "warn": "warn  ", "broken": "BROKEN"}


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="Folder for runs, whose disk is checked.")] = Path(
        "runs"
    ),
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            help="Local ranks to test. Default: one per GPU, or 2.",
        ),
    ] = None,
) -> Outcome:
    """Test communication between local ranks and report known-bad settings.

    Ends with 1 where something is broken, and prints a block to paste into a bug report.
    """
    from fullshard.launch.doctor import examine

    found = examine(out, nproc_per_node)
    for finding in found.findings:
        print(f"{MARKS[finding.health]}  {finding.what}: {finding.says}")
        if finding.do:
            print(f"          {finding.do}.")
    print(f"\nFor a bug report:\n\n{found.report()}")
    return Outcome(found.to_dict(), exit_code=1 if found.broken else 0)
