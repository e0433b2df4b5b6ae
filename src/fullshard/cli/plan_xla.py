"""`fullshard plan` with `backend: jax`: what a device will hold, and with --exact what XLA says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullshard.cli.outcome import Outcome

if TYPE_CHECKING:
    from fullshard.config.schema import RunConfig
    from fullshard.outlook.memory import Fit
    from fullshard.outlook.predict import Machine
    from fullshard.planner.mesh import Topology
    from fullshard.run.xla_outlook import XlaOutlook
    from fullshard.xla.aot import Compiled


def plan_on_xla(
    config: RunConfig,
    world: Topology,
    machine: Machine,
    *,
    exact: bool,
    topology: str | None,
) -> Outcome:
    """Show the plan; compile the step where that is asked for.

    Args:
        config: Configuration of the run.
        world: Devices, where no topology is named.
        machine: That it is judged against.
        exact: Whether XLA compiles it.
        topology: For which TPUs or GPUs; None: CPUs.

    Raises:
        ConfigError: The decoder does not compute this model, or the devices are not to be had.
    """
    from fullshard.launch.exit_codes import ExitCode
    from fullshard.models.build import model_config_of
    from fullshard.models.config import quiet_libraries
    from fullshard.outlook.memory import Fit, judge_fit
    from fullshard.run.xla_outlook import compiled_step, look

    quiet_libraries()
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
    _print_outlook(outlook)
    if fit is not None and memory is not None:
        whose = "by XLA's figure" if found is not None else "by the plan"
        print(f"{whose}: {fit.sentence(needed, memory)}")
    if found is not None:
        target = topology or f"{world_size} CPU device(s) of this process"
        _print_exact(outlook, found, target)
    code = ExitCode.WILL_NOT_FIT if fit is Fit.NO else ExitCode.OK
    return Outcome(_to_dict(outlook, found, fit), code)


def _to_dict(outlook: XlaOutlook, exact: Compiled | None, fit: Fit | None) -> dict[str, Any]:
    """What --json prints: the keys of a plan for torch, and `exact`."""
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


def _print_outlook(outlook: XlaOutlook) -> None:
    from fullshard.planner.text import human_bytes

    table = outlook.plan
    print(table.tree().partition("\na step's collectives")[0])
    print("memory of a device:")
    for row in outlook.rows:
        print(f"  {row.name:28s} {human_bytes(row.num_bytes):>12s}")
    print(f"  {'together':28s} {human_bytes(outlook.peak_bytes):>12s}")
    print("Activations and what follows are estimates; everything above them is exact.")
    print("collectives of a step, whole tensors:")
    for kind, c in _moved(table.collectives(outlook.num_micro_batches)).items():
        print(f"  {kind:28s} {c['count']:5d} x, {human_bytes(c['bytes'])} in all")


def _print_exact(outlook: XlaOutlook, exact: Compiled, target: str) -> None:
    from fullshard.planner.text import human_bytes

    error = outlook.errors(exact)
    print(f"XLA's own figures, compiled for {target} in {exact.compile_s:.0f} s:")
    rows = [
        ("state and batch", exact.arguments, f"{error['state_bytes']:,} bytes above the plan's"),
        ("temporary", exact.temporary, ""),
        ("peak", exact.peak, f"the plan says {error['peak']:+.1%}"),
    ]
    for name, num_bytes, said in rows:
        print(f"  {name:28s} {human_bytes(num_bytes):>12s}  {said}".rstrip())
    if exact.collectives is None:
        print("  its collectives are not known: this jaxlib cannot read what the plugin compiled")
        return
    if error["collectives"]:
        print("  its collectives are the plan's, in number and bytes")
        return
    print("  its collectives are not the plan's:")
    for kind, c in _moved(exact.collectives).items():
        print(f"  {kind:28s} {c['count']:5d} x, {human_bytes(c['bytes'])} in all")
