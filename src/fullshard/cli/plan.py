"""`fullshard plan`: what a run will hold, before any rank, weight or GPU is there."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.words import (
    OPEN_WORDS,
    ConfigFileFlag,
    ConfigFlag,
    JsonFlag,
    Words,
    load,
    placed,
)
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fullshard.config.schema import RunConfig, ShardConfig
    from fullshard.planner.forecast.devices import Device
    from fullshard.planner.hardware import Gpus
    from fullshard.planner.mesh import Topology
    from fullshard.planner.outlook import Machine, Outlook
    from fullshard.planner.plan import Plan
    from fullshard.planner.study import Study

app = typer.Typer()

FLAGS = (
    *("--config", "--config_file", "--gpus", "--nodes", "--devices", "--table", "--out"),
    *("--calibration", "--exact", "--topology", "--json", "--help"),
)


@app.command(context_settings=OPEN_WORDS)
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
        Path | None, typer.Option(help="A YAML file of devices that --gpus may name too.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Predict the runs of a CSV file, anybody's, instead.")
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
        typer.Option(help="With --exact: for these TPUs, by libtpu's names (v5p:2x2x2)."),
    ] = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Say what every rank will hold, how long a step takes, and what to change.

    CONFIG may also be a Hugging Face model folder or its config.json.
    """
    if table is not None:
        return _table(
            table, out, words or config or config_file or gpus or nodes or devices or calibration
        )
    hardware, own = _hardware(gpus, devices)
    resolved = load(words, config, config_file, flags=FLAGS, accept_model=True)
    resolved.check_supported(planning=True)
    for_xla = _is_for_xla(resolved.config, exact=exact, topology=topology, out=out)
    try:
        world = _topology(resolved.config, hardware, nodes)
        if for_xla:
            from fullshard.cli.plan_xla import plan_on_xla

            size = world.world_size
            return plan_on_xla(resolved.config, size, hardware, exact=exact, topology=topology)
        # With torch: what is mistyped is said before.
        from fullshard.train.outlook import machine_of

        machine = _calibrated(machine_of(hardware, own), hardware, world, calibration)
        study, strategies = _study(resolved.config, world, machine, compares=out is not None)
    except ConfigError as error:
        raise placed(resolved, error) from error
    return _told(resolved.config, study, strategies, hardware, out)


def _table(table: Path, out: Path | None, more: object) -> Outcome:
    """Predict rows of anybody's; nothing more may be said."""
    from fullshard.cli.plan_table import predict_table

    if more:
        raise ConfigError(
            "--table: expected no configuration beside it, because every row is one; got more. "
            "Plan them one after the other."
        )
    return predict_table(table, out or Path("predictions.csv"))


def _told(
    config: RunConfig,
    study: Study,
    strategies: list[Outlook],
    hardware: Gpus | None,
    out: Path | None,
) -> Outcome:
    """Show it, and write a page where that is asked for."""
    from fullshard.launch.exit_codes import ExitCode
    from fullshard.planner.hardware import Fit
    from fullshard.train.outlook import leaves_something

    _print_plan(study, hardware)
    if leaves_something(config):
        _print_choice(study.outlook)
    if out is not None:
        from fullshard.observe.plan_page import write_plan_page

        print(f"Figures: {write_plan_page(study, strategies, out)}")
    code = ExitCode.WILL_NOT_FIT if study.outlook.fit is Fit.NO else ExitCode.OK
    return Outcome(_to_dict(study), code)


def _is_for_xla(config: RunConfig, *, exact: bool, topology: str | None, out: Path | None) -> bool:
    """Whether the backend is jax, to which alone two of the options belong, and one does not."""
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
    if out is not None and config.backend is Backend.JAX:
        raise ConfigError("--out: expected backend: torch, whose plan has a page; got jax.")
    return config.backend is Backend.JAX


def _print_choice(outlook: Outlook) -> None:
    batch = outlook.job.batch
    print(
        f"auto is strategy={outlook.config.strategy} "
        f"per_device_train_batch_size={batch.micro_batch:g} "
        f"gradient_accumulation_steps={batch.accumulation:g} here."
    )


def _hardware(gpus: str | None, devices: Path | None) -> tuple[Gpus | None, dict[str, Device]]:
    """A machine's GPUs, and those that the user has described."""
    from fullshard.planner.device_file import read_devices
    from fullshard.planner.forecast.memory import GIB
    from fullshard.planner.hardware import parse_gpus

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
    from fullshard.planner.calibration import FILE_NAME, read_calibration

    if hardware is not None or world.world_size != (world.local_world_size or world.world_size):
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
    from fullshard.launch.topology import configured_topology
    from fullshard.planner.mesh import Topology

    if hardware is None and nodes is None:
        return configured_topology(config.launch)
    if hardware is not None:
        local = hardware.count
    else:
        local = configured_topology(config.launch).local_world_size or 1
    return Topology(local * (nodes or 1), local)


def _study(
    config: RunConfig, topology: Topology, machine: Machine, *, compares: bool
) -> tuple[Study, list[Outlook]]:
    """The plan, what it takes, what else one could do; other strategies for a page."""
    import fullshard as fs
    from fullshard.planner.search import compare
    from fullshard.planner.study import study
    from fullshard.train.outlook import job_of, on_one_host

    model = _model(config)

    def plan_of(sharding: ShardConfig) -> Plan:
        world, local = topology.world_size, topology.local_world_size
        if machine.calibration is not None:  # its time depends on the transport
            sharding = on_one_host(sharding, world)
        return fs.plan(model, sharding, world_size=world, local_world_size=local)

    training, leaves = config.training, config.training.leaves_micro_batch
    if leaves:
        training = training.undivided(topology.world_size)
    job = job_of(model, training, topology.world_size)
    found = study(config.sharding, plan_of, job, machine, topology, leaves_micro_batch=leaves)
    if not compares:
        return found, []
    return found, compare(found.outlook, plan_of, machine, hosts=found.hosts)


def _model(config: RunConfig) -> nn.Module:
    """The run's model on meta, with what it freezes."""
    from fullshard.engine.model_spec import meta_model
    from fullshard.train.model import (
        config_from_folder,
        config_from_settings,
        freeze,
        require_transformers,
    )
    from fullshard.train.prepare import quiet_libraries

    require_transformers()
    quiet_libraries()
    if config.model.name_or_path is not None:
        model_config = config_from_folder(Path(config.model.name_or_path))
    else:
        model_config = config_from_settings(config.model.config or {})
    model = meta_model(model_config)
    freeze(model, config.freeze)
    return model


def _to_dict(study: Study) -> dict[str, Any]:
    """What --json prints."""
    outlook, made = study.outlook, study.outlook.plan
    return {
        "fits": outlook.fit,
        "peak_bytes": dict(outlook.peak_bytes),
        "reserved_bytes": outlook.reserved_bytes,
        "step_time_s": outlook.step_time_s,
        "rows": [{"name": row.name, "bytes": row.num_bytes} for row in outlook.rows],
        "advice": [
            {
                "changes": one.changes,
                "text": one.sentence(outlook),
                "fits": one.outlook.fit,
                "peak_bytes": one.outlook.peak_bytes["device"],
                "step_time_s": one.outlook.step_time_s,
            }
            for one in study.advice
        ],
        "scaling": [dataclasses.asdict(point) for point in study.scaling],
        "memory_bytes": study.machine.memory_bytes,
        "plan": {
            "model": made.model_kind,
            "num_parameters": made.num_parameters,
            "strategy": made.strategy,
            "per_device_train_batch_size": round(outlook.job.batch.micro_batch),
            "gradient_accumulation_steps": round(outlook.job.batch.accumulation),
            "mesh": {"replicate": made.mesh.replicate, "shard": made.mesh.shard},
            "digest": made.digest(),
            "units": [
                {
                    "name": unit.name,
                    "kind": unit.kind,
                    "role": unit.role,
                    "numel": unit.numel,
                    "padding": unit.padding,
                    "trainable": unit.trainable,
                }
                for unit in made.units
            ],
        },
    }


def _print_plan(study: Study, hardware: Gpus | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fullshard.planner.render import human_bytes

    outlook = study.outlook
    print(outlook.plan.tree().partition("\nmemory of a rank")[0])
    console = Console(soft_wrap=True)
    lines = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(title="memory of the largest rank", title_justify="left", box=lines)
    table.add_column("name")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    totals = {place: size for place, size in outlook.peak_bytes.items() if size}
    is_split = len(totals) > 1  # offloaded
    if is_split:
        table.add_column("where")
    for row in outlook.rows:
        where = [row.place] if is_split else []
        table.add_row(row.name, f"{row.num_bytes:,}", human_bytes(row.num_bytes), *where)
    table.add_section()
    for place, size in totals.items():
        table.add_row("together", f"{size:,}", human_bytes(size), *([place] if is_split else []))
    console.print(table)
    how = "traced on the model" if outlook.is_traced else "counted from shapes"
    print(
        f"Activations, logits and gradients on their way are {how}, libraries' workspaces are "
        "estimated; everything else is exact."
    )
    if outlook.step_time_s is not None and outlook.tokens_per_s is not None:
        how = ", as this machine was calibrated" if outlook.is_calibrated else ""
        speed = f"{outlook.tokens_per_s:,.0f} tokens a second"
        print(f"{outlook.step_time_s:.3g} s a step, {speed}{how}.")
    if outlook.fit is not None and hardware is not None and hardware.memory_bytes is not None:
        name = f"{hardware.name} " if hardware.name else "GPU "
        held = human_bytes(hardware.memory_bytes)
        sentence = outlook.fit.sentence(outlook.peak_bytes["device"], hardware.memory_bytes)
        print(f"{name}({held}): {sentence}")
    for one in study.advice:
        print(f"  {one.sentence(outlook)}")
