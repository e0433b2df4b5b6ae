"""`fullshard doctor`: checks this machine and prints a summary for a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome

app = typer.Typer()

MARKS = {"ok": "ok    ", "warn": "warn  ", "broken": "BROKEN"}


@app.command()
def doctor(
    out: Path = Path("runs"), nproc_per_node: Annotated[int | None, typer.Option(min=1)] = None
) -> Outcome:
    """Test communication between local ranks and report known-bad settings.

    The exit code is 1 if something is broken. The command also prints a summary for a bug report.

    Args:
        out: Folder for runs; its disk is checked.
        nproc_per_node: Number of local ranks to test. Default: one per GPU, or 2 without GPUs.
    """
    from fullshard.launch.doctor import examine

    found = examine(out, nproc_per_node)
    for finding in found.findings:
        print(f"{MARKS[finding.health]}  {finding.what}: {finding.says}")
        if finding.do:
            print(f"          {finding.do}.")
    print(f"\nFor a bug report:\n\n{found.report()}")
    return Outcome(found.to_dict(), exit_code=1 if found.broken else 0)
