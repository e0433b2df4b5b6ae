"""Print the forecast of `fullshard plan` as tables or as one object, for both engines.

`fullshard plan` imports this module, and with it torch, after it checked the configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.cli.outcome import Outcome, print_table
from fullshard.config.environment import cache_folder
from fullshard.config.schema import RunConfig
from fullshard.errors import ConfigError
from fullshard.launch.exit_codes import ExitCode
from fullshard.launch.machine import describe_machine
from fullshard.models.build import model_config_of
from fullshard.outlook.devices import CALIBRATION_FILE, Gpus, read_calibration
from fullshard.outlook.memory import Fit, judge_fit
from fullshard.outlook.predict import Lack, Machine, Outlook
from fullshard.outlook.search import Study, choice_of, compare
from fullshard.planner.mesh import Topology
from fullshard.planner.text import human_bytes
from fullshard.run.outlook import View, leaves_choices

if TYPE_CHECKING:
    from fullshard.run.xla_outlook import XlaOutlook
    from fullshard.xla.aot import Compiled


def calibrated(
    machine: Machine, hardware: Gpus | None, world: Topology, given: Path | None
) -> Machine:
    """The machine with its measurements, if the plan is for this machine.

    Args:
        machine: Machine of a rank.
        hardware: GPUs of --gpus.
        world: Planned ranks.
        given: File of --calibration.

    Raises:
        ConfigError: A file was given for a plan of other machines.
    """
    if hardware is not None or world.num_hosts > 1:
        if given is not None:
            raise ConfigError(
                "--calibration: expected a plan for only this machine, which was measured; "
                "got --gpus or several machines. Remove one of the two."
            )
        return machine
    path = given or cache_folder() / CALIBRATION_FILE
    if given is None and not os.path.isfile(path):  # noqa: PTH113  (also in another user's home)
        return machine
    found = read_calibration(path)
    if given is None and found.machine != describe_machine():
        print(f"{path}: not used: another machine was measured. Run fullshard bench calibrate.")
        return machine
    if found.of(world.world_size) is None:
        known = ", ".join(map(str, found.hosts))
        print(
            f"{path}: no step time: {known} ranks were measured, not {world.world_size}. "
            f"Run fullshard bench calibrate --ranks {world.world_size}."
        )
    return dataclasses.replace(machine, calibration=found)


def show(config: RunConfig, view: View, hardware: Gpus | None, out: Path | None) -> Outcome:
    """Print the plan, and write a page if --out is given."""
    study, lack = view.study(), view.lack()
    print_plan(study, hardware, lack)
    if leaves_choices(config):
        print(f"auto selects {choice_of(study.outlook)}.")
    if out is not None:
        from fullshard.observe.report import write_plan_page

        strategies = compare(study.outlook, view.plan_of, hosts=view.topology.num_hosts)
        print(f"Figures: {write_plan_page(study, strategies, out)}")
    code = ExitCode.OK if lack is None else ExitCode.WILL_NOT_FIT
    return Outcome(to_dict(study), code)


def to_dict(study: Study) -> dict[str, Any]:
    """The object that --json prints."""
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
        "reserve": [
            {"name": one.name, "bytes": one.num_bytes, "why": one.why} for one in outlook.overhead()
        ],
        "phases": [dataclasses.asdict(one) for one in outlook.phases(study.storage)],
        "checkpoint_bytes": made.checkpoint_bytes,
        "scaling": [dataclasses.asdict(point) for point in study.scaling],
        "memory_bytes": study.outlook.machine.memory_bytes,
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
                    name: getattr(unit, name)
                    for name in ("name", "kind", "role", "numel", "padding", "trainable")
                }
                for unit in made.units
            ],
        },
    }


def print_plan(study: Study, hardware: Gpus | None, lack: Lack | None) -> None:
    """Print the forecast as tables."""
    outlook = study.outlook
    print(outlook.plan.tree().partition("\nmemory of a rank")[0])
    _print_memory(outlook)
    how = "traced on the model" if outlook.is_traced else "computed from the model's shapes"
    print(
        f"Activations, logits and gradients in flight are {how}. Workspaces of libraries are "
        "estimates. Everything else is exact."
    )
    _print_reserve(study)
    _print_phases(study)
    if outlook.step_time_s is not None and outlook.tokens_per_s is not None:
        how = ", from the calibration of this machine" if outlook.is_calibrated else ""
        speed = f"{outlook.tokens_per_s:,.0f} tokens per second"
        print(f"{outlook.step_time_s:.3g} s per step, {speed}{how}.")
    machine = study.outlook.machine
    name = f"a rank's share of {machine.limit}" if hardware is None else hardware.name or "GPU"
    if lack is not None:
        sentence = Fit.NO.sentence(lack.needed, lack.memory)
        print(f"{name} ({human_bytes(lack.memory)}): {sentence}")
    elif outlook.fit is not None and machine.memory_bytes is not None:
        sentence = outlook.fit.sentence(outlook.peak_bytes["device"], machine.memory_bytes)
        print(f"{name} ({human_bytes(machine.memory_bytes)}): {sentence}")
    if hardware is not None and hardware.name and study.outlook.machine.device is None:
        print(f"{hardware.name}: unknown speed. Describe the device in a file (--devices).")
    for one in study.advice:
        print(f"  {one.sentence(outlook)}")


def _print_memory(outlook: Outlook) -> None:
    totals = {place: size for place, size in outlook.peak_bytes.items() if size}
    rows = [(row.name, row.num_bytes, row.place) for row in outlook.rows]
    parts = [rows, [("together", size, place) for place, size in totals.items()]]
    is_split = len(totals) > 1  # offloaded
    shown = [
        (name, f"{size:,}", human_bytes(size), *([place] if is_split else []))
        for name, size, place in itertools.chain(*parts)
    ]
    columns = ("name", "bytes", "", *(["where"] if is_split else []))
    title = "memory of the largest rank"
    print_table(columns, shown, title, numbers=("bytes", ""), line_after=len(rows))


def _print_reserve(study: Study) -> None:
    rows = [(one.name, human_bytes(one.num_bytes), one.why) for one in study.outlook.overhead()]
    if rows:
        print_table(("name", "", "why"), rows, "overhead (estimates)", numbers=("",))


def _print_phases(study: Study) -> None:
    phases = study.outlook.phases(study.storage)
    places = [
        place for place in ("device", "host", "disk") if any(getattr(one, place) for one in phases)
    ]
    rows = [(one.name, *(human_bytes(getattr(one, place)) for place in places)) for one in phases]
    print_table(("phase", *places), rows, "peak of each phase", numbers=places)
    size = study.outlook.plan.checkpoint_bytes
    kept, sentence = study.storage.keep, f"A checkpoint needs {human_bytes(size)} of disk"
    if kept is not None:
        sentence += (
            f"; {kept} of them need {human_bytes(kept * size)}, and "
            f"{human_bytes((kept + 1) * size)} while another is written"
        )
    print(f"{sentence}.")


# ---- XLA -----------------------------------------------------------------------------------------


def plan_on_xla(
    config: RunConfig, world: Topology, machine: Machine, *, exact: bool, topology: str | None
) -> Outcome:
    """Print the plan of the XLA engine; with `exact`, compile the step and print XLA's figures.

    Args:
        config: Configuration of the run.
        world: Planned devices, if no topology is named.
        machine: Machine whose memory the plan must fit.
        exact: Compile the step with XLA.
        topology: TPUs or GPUs to compile for; None: CPUs.

    Raises:
        ConfigError: The decoder does not support this model, or the devices are not available.
    """
    from fullshard.run.xla_outlook import compiled_step, look

    model_config = model_config_of(config)
    found, world_size = None, world.world_size
    if exact:
        found, world_size = compiled_step(config, model_config, topology, world_size)
    on_cpu = topology is None and (exact or machine.is_host)
    outlook = look(config, model_config, world_size, on_cpu=on_cpu)
    fit: Fit | None = None
    needed = found.peak if found is not None else outlook.peak_bytes
    memory = None if topology is not None and machine.is_host else machine.memory_bytes
    if memory is not None:
        fit = judge_fit(needed, memory)
    _print_xla(outlook)
    if fit is not None and memory is not None:
        whose = "XLA's figure" if found is not None else "plan"
        print(f"{whose}: {fit.sentence(needed, memory)}")
    if found is not None:
        target = topology or f"{world_size} CPU device(s) of this process"
        _print_exact(outlook, found, target)
    code = ExitCode.WILL_NOT_FIT if fit is Fit.NO else ExitCode.OK
    return Outcome(_xla_to_dict(outlook, found, fit), code)


def _xla_to_dict(outlook: XlaOutlook, exact: Compiled | None, fit: Fit | None) -> dict[str, Any]:
    """The object that --json prints: the keys of a torch plan, and `exact`."""
    table = outlook.plan
    result: dict[str, Any] = {
        "fits": fit,
        "peak_bytes": {**table.peak_bytes, "device": outlook.peak_bytes},
        "reserved_bytes": None,
        "step_time_s": None,
        "rows": [{"name": row.name, "bytes": row.num_bytes} for row in outlook.rows],
        "advice": [],
        "plan": {
            "model": table.model_kind,
            "num_parameters": table.num_parameters,
            "strategy": table.strategy,
            "mesh": {"replicate": table.mesh.replicate, "shard": table.mesh.shard},
            "digest": table.digest(),
            "num_units": table.num_units,
            "collectives": _moved(table.collectives(outlook.num_micro_batches)),
        },
    }
    if exact is not None:
        result["exact"] = {
            "arguments_bytes": exact.arguments,
            "in_place_bytes": exact.in_place,
            "temporary_bytes": exact.temporary,
            "peak_bytes": exact.peak,
            "collectives": None if exact.collectives is None else _moved(exact.collectives),
            "compile_s": exact.compile_s,
            "error": outlook.errors(exact),
        }
    return result


def _moved(collectives: Any) -> dict[str, dict[str, int]]:
    return {
        kind: {"count": c.count, "bytes": c.num_bytes} for kind, c in collectives.items() if c.count
    }


def _print_xla(outlook: XlaOutlook) -> None:
    table = outlook.plan
    print(table.tree().partition("\na step's collectives")[0])
    print("memory of a device:")
    for row in outlook.rows:
        print(f"  {row.name:28s} {human_bytes(row.num_bytes):>12s}")
    print(f"  {'together':28s} {human_bytes(outlook.peak_bytes):>12s}")
    print("Activations and the rows below them are estimates; the rows above them are exact.")
    print("collectives per step, in bytes of whole tensors:")
    for kind, c in _moved(table.collectives(outlook.num_micro_batches)).items():
        print(f"  {kind:28s} {c['count']:5d} x, {human_bytes(c['bytes'])} in total")


def _print_exact(outlook: XlaOutlook, exact: Compiled, target: str) -> None:
    error = outlook.errors(exact)
    print(f"XLA's own figures, compiled for {target} in {exact.compile_s:.0f} s:")
    rows = [
        ("state and batch", exact.arguments, f"{error['state_bytes']:,} bytes more than planned"),
        ("temporary", exact.temporary, ""),
        ("peak", exact.peak, f"the plan differs by {error['peak']:+.1%}"),
    ]
    for name, num_bytes, said in rows:
        print(f"  {name:28s} {human_bytes(num_bytes):>12s}  {said}".rstrip())
    if exact.collectives is None:
        print("  collectives: unknown, this jaxlib cannot read what the plugin compiled")
        return
    if error["collectives"]:
        print("  collectives: as planned, in number and bytes")
        return
    print("  collectives: not as planned:")
    for kind, c in _moved(exact.collectives).items():
        print(f"  {kind:28s} {c['count']:5d} x, {human_bytes(c['bytes'])} in total")
