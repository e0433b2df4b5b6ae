"""`fullshard plan`: the memory and time of a run, forecast without ranks, weights or GPUs."""

from __future__ import annotations

import csv
import gc
import io
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import OPEN_WORDS, ConfigFileFlag, ConfigFlag, Words, load
from fullshard.cli.outcome import Outcome, check_out
from fullshard.config.regular_files import did_you_mean_path, read_regular
from fullshard.errors import ConfigError, untrusted
from fullshard.recipes.registry import check_paths

if TYPE_CHECKING:
    from fullshard.config.schema import RunConfig
    from fullshard.outlook.devices import Device, Gpus
    from fullshard.planner.mesh import Topology

app = typer.Typer()

SHOWN = 5  # maximum number of rows without a prediction that the terminal lists


@contextmanager
def _uncollected() -> Generator[None]:
    """Disable garbage collection, which imports and traces would trigger often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@app.command(context_settings=OPEN_WORDS)
@_uncollected()
def plan(  # noqa: PLR0913  (one parameter an option)
    words: Words = None,
    config: ConfigFlag = None,
    config_file: ConfigFileFlag = None,
    gpus: str | None = None,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    devices: Path | None = None,
    table: Path | None = None,
    calibration: Path | None = None,
    out: Path | None = None,
    exact: Annotated[bool, typer.Option("--exact")] = False,
    topology: str | None = None,
    optimizer_bytes: Annotated[float | None, typer.Option(min=0, max=1e9)] = None,
) -> Outcome:
    """Forecast the memory per rank and the step time of a run, and suggest changes.

    CONFIG may also be a Hugging Face model folder or its config.json.

    Args:
        words: see `Words`.
        config: see `ConfigFlag`.
        config_file: see `ConfigFileFlag`.
        gpus: GPUs per machine, such as 8xH100-80GB, 4xA100-40GB, H200 or 8. Default: this machine.
        nodes: Number of machines. Default: 1.
        devices: YAML file that describes more devices for --gpus.
        table: CSV file of runs, of any framework, whose memory and time are forecast.
        calibration: File that `bench calibrate` wrote, for the step time on this machine. Default:
            the file that it writes without --out, if it exists.
        out: HTML page to write, with figures; with --table the CSV file to write. Default: no page,
            or predictions.csv.
        exact: For backend: jax. Compile the step and show XLA's own figures.
        topology: With --exact, compile for these TPUs (v5p:2x2x2) or GPUs (8xH100-80GB). Default:
            CPUs.
        optimizer_bytes: Bytes of optimizer state per trainable parameter. Default: those of the
            configured optimizer.
    """
    if table is not None:
        devices_of_one = (gpus, nodes, devices, calibration, topology)
        if any((words, config, config_file, *devices_of_one, exact, optimizer_bytes is not None)):
            raise ConfigError(
                "--table: expected no configuration, devices or other options of a single plan, "
                "because every row of the table has its own; got some. Remove them."
            )
        return _predict_table(table, out or Path("predictions.csv"))
    hardware, own = _hardware(gpus, devices)
    check_out(out, is_page=True)

    resolved = load(words, config, config_file, accept_model=True)
    resolved.check_supported(planning=True)
    check_paths(resolved)
    for_torch = {"--out": out, "--optimizer-bytes": optimizer_bytes, "--calibration": calibration}
    for_xla = _is_for_xla(resolved.config, for_torch, exact=exact, topology=topology)
    try:
        world = _topology(resolved.config, hardware, nodes)
        _say_planning(world)
        from fullshard.cli import plan_report as report  # imports torch
        from fullshard.models.build import check_weights, with_fitting_length
        from fullshard.planner.optimizers import of_bytes
        from fullshard.run.outlook import machine_of, model_of, this_machine, view_of

        fitted = with_fitting_length(resolved).config
        check_weights(fitted)
        is_here = hardware is None and nodes is None
        machine = this_machine(world.ranks_per_host) if is_here else machine_of(hardware, own)
        if for_xla:
            return report.plan_on_xla(fitted, world, machine, exact=exact, topology=topology)
        machine = report.calibrated(machine, hardware, world, calibration)
        optimizer = None if optimizer_bytes is None else of_bytes(optimizer_bytes)
        view = view_of(fitted, model_of(fitted), world, machine, optimizer)
    except ConfigError as error:
        raise resolved.located(error) from error
    return report.show(fitted, view, hardware, out)


def _predict_table(table: Path, out: Path) -> Outcome:
    """Write the table's rows with predictions added.

    A row that cannot be read has blank predictions and a note.

    Raises:
        ConfigError: The table is not a CSV file with a header, or `out` cannot be written.
    """
    from fullshard.outlook.published import COLUMNS, predict

    check_out(out)
    columns, rows = _read_table(table)
    predictions = [predict(row) for row in rows]
    kept = [name for name in columns if name not in COLUMNS]
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*kept, *COLUMNS], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, **found} for row, found in zip(rows, predictions, strict=True))
    failed = [
        {"row": place, "note": found["pred_note"]}
        for place, found in enumerate(predictions, start=1)
        if not found["pred_fits"]
    ]
    print(f"{len(rows) - len(failed)} of {len(rows)} rows predicted, written to {out}.")
    for one in failed[:SHOWN]:
        print(f"  row {one['row']}: {one['note']}")
    return Outcome({"out": str(out), "rows": len(rows), "not_predicted": failed})


def _read_table(table: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file; missing cells of short rows are blank."""
    advice = did_you_mean_path(table) or "Correct the file."
    with untrusted(f"--table: '{table}'", "a CSV file with a header", ConfigError, advice):
        text = io.StringIO(read_regular(table).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, restval="", strict=True)
        columns = [name for name in reader.fieldnames or [] if name]
        is_table = {"gpu_model", "params_b", "model_name"} & {*columns}
        if is_table and len({*columns}) != len(columns):
            raise ValueError("two columns with one name")
        read: list[dict[Any, Any]] = list(reader)
        wide = [place for place, row in enumerate(read, start=1) if any(row.get(None) or ())]
        if is_table and wide:
            raise ValueError(f"more cells than columns in row {wide[0]}")
        rows = [{name: row[name] for name in columns} for row in read]
    if not is_table:
        raise ConfigError(
            "--table: expected a header with columns such as model_name, params_b, gpu_model, "
            f"gpus, strategy; got {', '.join(columns[:6]) or 'none'}. See docs/planner.md."
        )
    return columns, rows


def _say_planning(topology: Topology) -> None:
    """Say on a terminal what takes time."""
    if sys.stderr.isatty():
        ranks = f"{topology.world_size} rank{'s' * (topology.world_size != 1)}"
        print(f"Planning {ranks}: tracing one step on meta ...", file=sys.stderr, flush=True)


def _is_for_xla(
    config: RunConfig, for_torch: Mapping[str, object], *, exact: bool, topology: str | None
) -> bool:
    """Whether the backend is jax; options of the other backend raise an error."""
    from fullshard.config.values import Backend

    if topology is not None and not exact:
        raise ConfigError("--topology: expected --exact, got none. Add --exact.")
    if exact and config.backend is not Backend.JAX:
        raise ConfigError(
            "--exact: expected backend: jax, whose compiler gives the figures; got torch, whose "
            "plan is exact except for activations. Remove --exact, or set backend=jax."
        )
    for option, given in for_torch.items():
        if given is not None and config.backend is Backend.JAX:
            raise ConfigError(f"{option}: expected backend: torch, got jax. Remove {option}.")
    return config.backend is Backend.JAX


def _hardware(gpus: str | None, devices: Path | None) -> tuple[Gpus | None, dict[str, Device]]:
    """GPUs per machine, and the devices that the user described."""
    from fullshard.outlook.devices import parse_gpus, read_devices
    from fullshard.outlook.memory import GIB

    if devices is not None and gpus is None:
        raise ConfigError("--devices: expected --gpus, which names one of these devices; got none.")
    own = read_devices(devices) if devices is not None else {}
    sizes = {name: round(device.memory_gib * GIB) for name, device in own.items()}
    return parse_gpus(gpus, own=sizes) if gpus is not None else None, own


def _topology(config: RunConfig, hardware: Gpus | None, nodes: int | None) -> Topology:
    """The planned ranks, from --gpus and --nodes, or else from the configuration."""
    from fullshard.launch.machine import configured_topology
    from fullshard.planner.mesh import Topology

    if hardware is None and nodes is None:
        return configured_topology(config.launch)
    if hardware is not None:
        local = hardware.count
    else:
        local = configured_topology(config.launch).local_world_size or 1
    return Topology(local * (nodes or 1), local)
