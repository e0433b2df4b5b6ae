"""`fullshard verify`: compares sharded training with training in one process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import OPEN_WORDS, ConfigFileFlag, ConfigFlag, DryRunFlag, Words, load
from fullshard.cli.outcome import Outcome, launch_outcome, print_table
from fullshard.config.values import Backend, parse
from fullshard.errors import ConfigError
from fullshard.recipes.registry import check_paths

if TYPE_CHECKING:
    from fullshard.verify.check import PreparedCheck, Verdict

app = typer.Typer()


@app.command(context_settings=OPEN_WORDS)
def verify(
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Inject a fault that verify must find: skipped_reduction, wrong_divisor, "
            "stale_slot, missed_gather, lost_tie or repeated_data. Default: none.",
        ),
    ] = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Check that sharded training computes the same numbers as training in one process.

    The model is shrunk (the same class with fewer and narrower layers), sharded over local ranks as
    CONFIG says, and trained for a few steps in float64. A separate process without fullshard trains
    the same model unsharded. The exit code is 0 if the results are equal, and 8 if they differ.
    """
    resolved = load(words, config, config_file)
    check_paths(resolved)
    from fullshard.verify import check
    from fullshard.verify.faults import Fault

    prepare = check.prepare
    if resolved.config.backend is Backend.JAX:
        from fullshard.verify.xla import prepare
    fault = None if inject is None else parse(Fault, inject, "--inject")
    try:
        prepared = prepare(resolved.config, fault)
    except ConfigError as error:
        raise resolved.located(error) from error
    _print_prepared(prepared)
    if dry_run:
        return Outcome(prepared.facts())
    with tempfile.TemporaryDirectory(prefix="fullshard-verify-") as name:
        began = time.perf_counter()
        check.write(prepared, Path(name))
        launch, result = check.run_sides(prepared, Path(name))
        if result.exit_code != 0:
            return launch_outcome(launch, result)
        verdict = check.judge(prepared.job, Path(name), began)
    return _outcome(prepared, verdict)


def _outcome(prepared: PreparedCheck, verdict: Verdict) -> Outcome:
    """Print the table and the verdict; exit code 8 if anything differs, 1 if a fault was missed."""
    from fullshard.launch.exit_codes import ExitCode

    _print_rows(verdict)
    fault, diagnosis = prepared.job.fault, verdict.diagnosis
    result: dict[str, Any] = {
        **prepared.facts(),
        "equal": diagnosis is None,
        "verdict": "equal" if diagnosis is None else diagnosis.kind,
        "says": _sentence(prepared, verdict),
        "rows": [row.to_dict() for row in verdict.rows],
        "time_s": verdict.time_s,
    }
    print(f"\n{result['says']}")
    if diagnosis is not None:
        return Outcome(result, ExitCode.VERIFY)
    return Outcome(result, ExitCode.OK if fault is None else ExitCode.UNEXPECTED)


def _sentence(prepared: PreparedCheck, verdict: Verdict) -> str:
    plan, job = prepared.plan, prepared.job
    what = f"{plan.model_kind} under {plan.strategy} on {job.world_size} ranks"
    if verdict.diagnosis is not None:
        return f"NOT EQUAL  {what}. {verdict.diagnosis.says}"
    if job.fault is not None:
        return f"NOT FOUND  {what} matches one process in spite of the fault {job.fault}."
    return f"EQUAL  {what}, with random weights, matches one process ({verdict.time_s:.0f} s)."


def _print_prepared(prepared: PreparedCheck) -> None:
    facts = prepared.facts()
    print(
        f"{facts['model']}, {facts['num_parameters']:,} parameters, {facts['strategy']}, "
        f"{facts['world_size']} ranks ({facts['axes']}), "
        f"{facts['num_units']} units, {facts['num_steps']} steps and one after loading"
    )
    if prepared.changes:
        changes = (f"{c.key} {c.was} -> {c.now}" for c in prepared.changes)
        print(f"shrunk: {', '.join(changes)}")
    for note in prepared.notes:
        print(f"note: {note}")
    if prepared.job.fault is not None:
        print(f"fault: {prepared.job.fault}")


def _print_rows(verdict: Verdict) -> None:
    rows = [
        (
            row.name,
            row.dtype,
            f"{row.worst_error:.1e}",
            f"{row.tolerance:.0e}",
            "equal" if row.is_equal else "DIFFERS",
            row.where,
        )
        for row in verdict.rows
    ]
    columns = ("", "dtype", "worst error", "tolerance", "result", "where")
    print_table(columns, rows, numbers=("worst error", "tolerance"))
