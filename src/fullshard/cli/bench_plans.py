"""`fullshard bench calibrate`, `time`, `exact`: what the plan says of a step, beside what is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.bench_words import OutFlag, WaitFlag, command_line, say, show
from fullshard.cli.outcome import Outcome
from fullshard.cli.words import JsonFlag

app = typer.Typer()


@app.command()
def calibrate(
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Local ranks at work at once; may be given again. Default: 1 2 4."
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Few small sizes: shows only that it runs.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 3600.0,
    wait: WaitFlag = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: where fullshard plan looks for it."),
    ] = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Measure what this machine reaches, so that `fullshard plan` can say the time of a step."""
    from fullshard.bench import calibrate as bench
    from fullshard.config.environment import cache_folder
    from fullshard.planner.calibration import FILE_NAME

    options = bench.Options(tuple(ranks or bench.DEFAULT_RANKS), tiny, wait, timeout)
    found = bench.run(options, say)
    path = out or cache_folder() / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found.to_json(command_line("calibrate")), encoding="utf-8")
    print(bench.told(found))
    print(f"Calibration: {path}")
    return Outcome({**bench.to_dict(found), "path": str(path)})


@app.command("time")
def timed(
    case: Annotated[
        list[str] | None,
        typer.Option(help="A run by its name; may be given again. Default: all ten."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A file of bench calibrate. Default: where it writes by itself."),
    ] = None,
    steps: Annotated[int, typer.Option(min=5, help="Updates of every run.")] = 20,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Compare the step time that the plan says with the time that runs take."""
    from fullshard.bench import times as bench
    from fullshard.config.environment import cache_folder
    from fullshard.planner.calibration import FILE_NAME, read_calibration

    cases = bench.find_cases(case or ())
    known = read_calibration(calibration or cache_folder() / FILE_NAME)
    options, command = bench.Options(steps, wait), command_line("time")
    return show(bench.run(cases, known, options, command=command, say=say), out)


@app.command()
def exact(
    topology: Annotated[
        str | None, typer.Option(help="TPUs (v5p:2x2x2) or GPUs (8xH100-80GB). Default: CPUs.")
    ] = None,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Compare the memory that the plan says of XLA's engine with XLA's own figure."""
    from fullshard.bench import exact as bench

    command = command_line("exact")
    return show(bench.run(bench.CASES, topology, command=command, say=say), out)
