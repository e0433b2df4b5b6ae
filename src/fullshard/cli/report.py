"""`fullshard report RUN_DIR...`: the page of a run, or a comparison of several runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome, check_out
from fullshard.errors import ConfigError

app = typer.Typer()


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...")],
    out: Annotated[Path | None, typer.Option(dir_okay=False)] = None,
    watch: Annotated[bool, typer.Option("--watch")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
) -> Outcome:
    """Write the page of a run from the files in its folder, or compare several runs.

    The runs need not be finished.

    Args:
        run_dirs: Folders of runs.
        out: File to write. Default: RUN_DIR/report.html; comparison.html for several runs.
        watch: Serve the page on 127.0.0.1 until Ctrl-C, and write no page.
        port: Port of --watch; 0: any free port.
    """
    from fullshard.observe.report import read_record, write_report

    if watch and out is not None:
        raise ConfigError("--out: expected no --watch, which writes no page; got both. Remove one.")
    if port and not watch:
        raise ConfigError("--port: expected --watch, which serves the page; got none. Add --watch.")
    if watch:
        return _serve(run_dirs, port)
    check_out(out, is_page=True)
    for run_dir in run_dirs:
        read_record(run_dir)  # raises errors before anything is written
    for run_dir in run_dirs:
        _end_killed(run_dir)
    several = Path("comparison.html") if len(run_dirs) > 1 else None
    page = write_report(*run_dirs, target=out or several)
    print(page)
    return Outcome({"report": str(page)})


def _serve(run_dirs: list[Path], port: int) -> Outcome:
    """Serve the page until Ctrl-C."""
    from fullshard.observe.report import LOOPBACK, page_of, page_server

    def render() -> str:
        for run_dir in run_dirs:
            _end_killed(run_dir)
        return page_of(run_dirs, live=True)

    render()  # raises the error of a folder without a run before the server starts
    with page_server(render, port) as server:
        url = f"http://{LOOPBACK}:{server.server_port}/"
        print(f"{url}  (stop with Ctrl-C)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        return Outcome({"url": url})


def _end_killed(run_dir: Path) -> None:
    """Record the end of a killed run: `run.json` says running, but no process holds its lock."""
    from fullshard.launch.run_lock import RunLock, is_held
    from fullshard.run.folder import RunFolder

    folder = RunFolder(run_dir)
    with contextlib.suppress(ConfigError, OSError):
        if folder.is_going_on() and not is_held(run_dir):
            with RunLock(run_dir):
                folder.end_killed()
