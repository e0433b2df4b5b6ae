"""`fullshard report RUN_DIR`: writes a run's page again, with measured and planned values."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome
from fullshard.errors import ConfigError

app = typer.Typer()


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")],
) -> Outcome:
    """Write report.html for a run, finished or not, from the files in its folder."""
    from fullshard.launch.run_lock import RunLock
    from fullshard.observe.report import write_report
    from fullshard.run.folder import RunFolder

    page = write_report(run_dir)
    with contextlib.suppress(ConfigError, OSError), RunLock(run_dir):  # no live run has it
        if RunFolder(run_dir).end_killed():
            write_report(run_dir)
    print(page)
    return Outcome({"report": str(page)})
