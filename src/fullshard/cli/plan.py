"""`fullshard plan`: what a run will hold, before any rank, weight or GPU is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.words import OPEN_WORDS, ConfigFlag, JsonFlag, Words, load, placed
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fullshard.config.schema import RunConfig
    from fullshard.planner.hardware import Fit, Gpus
    from fullshard.planner.mesh import Topology
    from fullshard.planner.plan import Plan

app = typer.Typer()

FLAGS = ("--config", "--config_file", "--gpus", "--nodes", "--json", "--help")
NOT_COUNTED = ["activations", "logits", "the allocator's overhead"]


@app.command(context_settings=OPEN_WORDS)
def plan(
    words: Words = None,
    config: ConfigFlag = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of one machine: 8xH100-80GB, 4xA100-40GB, H200, 8."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines. Default: 1.")] = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Say what every rank will hold, and whether it fits.

    CONFIG may also be a Hugging Face model folder or its config.json.
    """
    from fullshard.launch.exit_codes import ExitCode
    from fullshard.planner.hardware import Fit, judge_fit, parse_gpus

    hardware = parse_gpus(gpus) if gpus is not None else None
    resolved = load(words, config, flags=FLAGS, accept_model=True)
    resolved.check_supported(planning=True)
    try:
        topology = _topology(resolved.config, hardware, nodes)
        made = _make_plan(resolved.config, topology)
    except ConfigError as error:
        raise placed(resolved, error) from error
    memory_bytes = hardware.memory_bytes if hardware is not None else None
    fit = judge_fit(made.peak_bytes["device"], memory_bytes) if memory_bytes else None
    _print_plan(made, fit, hardware)
    code = ExitCode.WILL_NOT_FIT if fit is Fit.NO else ExitCode.OK
    return Outcome(_to_dict(made, fit, memory_bytes), code)


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


def _make_plan(config: RunConfig, topology: Topology) -> Plan:
    import fullshard as fs

    return fs.plan(
        _model(config),
        config.sharding,
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
    )


def _model(config: RunConfig) -> nn.Module:
    """The run's model on meta, with what it freezes."""
    from pathlib import Path

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


def _to_dict(made: Plan, fit: Fit | None, memory_bytes: int | None) -> dict[str, Any]:
    """What --json prints; times and advice come with the simulator."""
    return {
        "fits": fit,
        "peak_bytes": made.peak_bytes,
        "reserved_bytes": None,
        "step_time_s": None,
        "rows": made.rows(),
        "advice": [],
        "not_counted": NOT_COUNTED,
        "memory_bytes": memory_bytes,
        "plan": {
            "model": made.model_kind,
            "num_parameters": made.num_parameters,
            "strategy": made.strategy,
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


def _print_plan(made: Plan, fit: Fit | None, hardware: Gpus | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fullshard.planner.render import human_bytes

    print(made.tree().partition("\nmemory of a rank")[0])
    console = Console(soft_wrap=True)
    lines = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(title="memory of the largest rank", title_justify="left", box=lines)
    table.add_column("name")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    for row in made.memory:
        table.add_row(row.name, f"{row.num_bytes:,}", human_bytes(row.num_bytes))
    table.add_section()
    total = made.peak_bytes["device"]
    table.add_row("together", f"{total:,}", human_bytes(total))
    console.print(table)
    print(f"Not counted yet: {', '.join(NOT_COUNTED)}.")
    if fit is not None and hardware is not None and hardware.memory_bytes is not None:
        name = f"{hardware.name} " if hardware.name else "GPU "
        held = human_bytes(hardware.memory_bytes)
        print(f"{name}({held}): {fit.sentence(total, hardware.memory_bytes)}")
