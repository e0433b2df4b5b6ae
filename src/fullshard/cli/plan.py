"""`fullshard plan`: what a run will hold, before any rank, weight or GPU is there."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.words import (
    OPEN_WORDS,
    ConfigFileFlag,
    ConfigFlag,
    Words,
    load,
    placed,
)
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from fullshard.config.load import Resolved
    from fullshard.config.schema import RunConfig
    from fullshard.outlook.devices import Device, Gpus
    from fullshard.outlook.predict import Machine
    from fullshard.planner.mesh import Topology
    from fullshard.run.outlook import View

app = typer.Typer()


OptimizerBytes = Annotated[
    float | None,
    typer.Option(min=0, help="Bytes of optimizer state per trainable parameter."),
]


@contextmanager
def _uncollected() -> Generator[None]:
    """Nobody looks for garbage meanwhile: imports and traces make much else, and look often."""
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
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of one machine: 8xH100-80GB, 4xA100-40GB, H200, 8."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines. Default: 1.")] = None,
    devices: Annotated[
        Path | None, typer.Option(help="A YAML file that describes further devices for --gpus.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Forecast the runs in a CSV file, of any framework.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A file of bench calibrate, for the time on this machine. Default: the one that "
            "it writes by itself, where there is one."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A page with figures to write; with --table: where predictions go."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="backend: jax: compile the step, and say XLA's figures.")
    ] = False,
    topology: Annotated[
        str | None,
        typer.Option(help="With --exact: for these TPUs (v5p:2x2x2) or GPUs (8xH100-80GB)."),
    ] = None,
    optimizer_bytes: OptimizerBytes = None,
) -> Outcome:
    """Forecast the memory of every rank and the time of a step, and advise what to change.

    CONFIG may also be a Hugging Face model folder or its config.json.
    """
    if table is not None:
        return _table(
            table, out, words or config or config_file or gpus or nodes or devices or calibration
        )
    hardware, own = _hardware(gpus, devices)
    if out is not None:
        _check_out(out)
    resolved = _resolved(words, config, config_file)
    for_torch = {"--out": out, "--optimizer-bytes": optimizer_bytes}
    for_xla = _is_for_xla(resolved.config, for_torch, exact=exact, topology=topology)
    try:
        world = _topology(resolved.config, hardware, nodes)
        _say_planning(world)
        fitted, machine = _fitted(resolved), _machine(world, hardware, own, nodes)
        if for_xla:
            from fullshard.cli.plan_xla import plan_on_xla

            return plan_on_xla(fitted, world, machine, exact=exact, topology=topology)
        machine = _calibrated(machine, hardware, world, calibration)
        view = _view(fitted, world, machine, optimizer_bytes)
    except ConfigError as error:
        raise placed(resolved, error) from error
    return _told(fitted, view, hardware, out)


def _resolved(words: Words, config: ConfigFlag, config_file: ConfigFileFlag) -> Resolved:
    """The configuration, whose model is there."""
    from fullshard.run.paths import check_paths

    resolved = load(words, config, config_file, accept_model=True)
    resolved.check_supported(planning=True)
    check_paths(resolved, data=False)
    return resolved


def _fitted(resolved: Resolved) -> RunConfig:
    """The configuration with the length that a run of it has, whose weights are whole."""
    from fullshard.models.build import check_weights, with_fitting_length

    config = with_fitting_length(resolved).config
    check_weights(config)
    return config


def _table(table: Path, out: Path | None, more: object) -> Outcome:
    """Predict rows of anybody's; nothing more may be said."""
    from fullshard.cli.plan_table import predict_table

    if more:
        raise ConfigError(
            "--table: expected no configuration beside it, because every row is one; got more. "
            "Plan them one after the other."
        )
    return predict_table(table, out or Path("predictions.csv"))


def _told(config: RunConfig, view: View, hardware: Gpus | None, out: Path | None) -> Outcome:
    """Show it, and write a page where that is asked for."""
    from fullshard.cli.plan_told import print_choice, print_plan, to_dict
    from fullshard.launch.exit_codes import ExitCode
    from fullshard.outlook.search import compare
    from fullshard.run.outlook import leaves_something

    study, lack = view.study(), view.lack()
    print_plan(study, hardware, lack)
    if leaves_something(config):
        print_choice(study.outlook)
    if out is not None:
        from fullshard.observe.plan_page import write_plan_page

        strategies = compare(study.outlook, view.plan_of, hosts=view.topology.num_hosts)
        print(f"Figures: {write_plan_page(study, strategies, out)}")
    code = ExitCode.OK if lack is None else ExitCode.WILL_NOT_FIT
    return Outcome(to_dict(study), code)


def _check_out(out: Path) -> None:
    """Refuses, before anything is planned, a page that could not be written."""
    written = out if out.exists() else out.parent
    if out.is_dir() or not out.parent.is_dir() or not os.access(written, os.W_OK):
        raise ConfigError(
            f"--out: expected a file in a folder that can be written, got '{out}'. Make the "
            "folder, or name another file."
        )


def _say_planning(topology: Topology) -> None:
    """What goes on meanwhile, to people who wait."""
    if sys.stderr.isatty():
        ranks = f"{topology.world_size} rank{'s' * (topology.world_size != 1)}"
        print(f"Planning {ranks}: one step is traced on meta ...", file=sys.stderr, flush=True)


def _is_for_xla(
    config: RunConfig, for_torch: Mapping[str, object], *, exact: bool, topology: str | None
) -> bool:
    """Whether the backend is jax, to which alone two of the options belong, and others do not."""
    from fullshard.config.values import Backend

    if topology is not None and not exact:
        raise ConfigError(
            "--topology: expected --exact beside it, which compiles for it; got none."
        )
    if exact and config.backend is not Backend.JAX:
        raise ConfigError(
            "--exact: expected backend: jax, whose compiler is asked; got torch, whose plan is "
            "exact but for activations. Leave --exact out, or say backend=jax."
        )
    for option, given in for_torch.items():
        if given is not None and config.backend is Backend.JAX:
            raise ConfigError(f"{option}: expected backend: torch, whose plan knows it; got jax.")
    return config.backend is Backend.JAX


def _hardware(gpus: str | None, devices: Path | None) -> tuple[Gpus | None, dict[str, Device]]:
    """A machine's GPUs, and those that the user has described."""
    from fullshard.outlook.devices import parse_gpus, read_devices
    from fullshard.outlook.memory import GIB

    if devices is not None and gpus is None:
        raise ConfigError(
            "--devices: expected --gpus beside it, which names one of them; got none."
        )
    own = read_devices(devices) if devices is not None else {}
    sizes = {name: round(device.memory_gib * GIB) for name, device in own.items()}
    return parse_gpus(gpus, own=sizes) if gpus is not None else None, own


def _calibrated(
    machine: Machine, hardware: Gpus | None, world: Topology, given: Path | None
) -> Machine:
    """With what was measured on this machine, where that is what is planned for."""
    from fullshard.config.environment import cache_folder
    from fullshard.launch.machine import describe_machine
    from fullshard.outlook.calibration import FILE_NAME, read_calibration

    if hardware is not None or world.num_hosts > 1:
        if given is not None:
            raise ConfigError(
                "--calibration: expected ranks of this machine alone, which it was measured on; "
                "got --gpus or several machines. Leave one of the two out."
            )
        return machine
    path = given or cache_folder() / FILE_NAME
    if given is None and not path.is_file():
        return machine
    found = read_calibration(path)
    if given is None and found.machine != describe_machine():
        print(f"{path}: measured on another machine, and not used. Run fullshard bench calibrate.")
        return machine
    if found.of(world.world_size) is None:
        known = ", ".join(map(str, found.hosts))
        print(
            f"{path}: has no measurement of {world.world_size} ranks (but of {known}), so no time "
            f"is said. Run fullshard bench calibrate --ranks {world.world_size}."
        )
    return replace(machine, calibration=found)


def _topology(config: RunConfig, hardware: Gpus | None, nodes: int | None) -> Topology:
    """The planned world: that of --gpus and --nodes, else the configuration's."""
    from fullshard.launch.machine import configured_topology
    from fullshard.planner.mesh import Topology

    if hardware is None and nodes is None:
        return configured_topology(config.launch)
    if hardware is not None:
        local = hardware.count
    else:
        local = configured_topology(config.launch).local_world_size or 1
    return Topology(local * (nodes or 1), local)


def _machine(
    world: Topology, hardware: Gpus | None, own: Mapping[str, Device], nodes: int | None
) -> Machine:
    """What a rank runs on: what --gpus describes; this machine without --gpus and --nodes."""
    from fullshard.run.outlook import machine_of, this_machine

    if hardware is None and nodes is None:
        return this_machine(world.ranks_per_host)
    return machine_of(hardware, own)


def _view(
    config: RunConfig, world: Topology, machine: Machine, optimizer_bytes: float | None
) -> View:
    """The run as the planner sees it.

    Args:
        config: Configuration of the run.
        world: Its ranks.
        machine: What a rank runs on.
        optimizer_bytes: An own optimizer's, an element.
    """
    from fullshard.planner.optimizers import of_bytes
    from fullshard.run.outlook import model_of, view_of

    optimizer = None if optimizer_bytes is None else of_bytes(optimizer_bytes)
    return view_of(config, model_of(config), world, machine, optimizer)
