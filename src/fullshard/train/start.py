"""From a configuration to running ranks.

    resolve world size -> check everything -> make the folder -> start local ranks, or be one

Nothing is written before all checks have passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment
from fullshard.config.load import MAIN_JOB, Resolved
from fullshard.errors import ConfigError, DataError
from fullshard.launch.exit_codes import ExitCode
from fullshard.launch.spawn import LocalLaunch, launch_local_ranks
from fullshard.launch.supervise import LaunchResult
from fullshard.launch.topology import configured_topology
from fullshard.observe.report import write_report
from fullshard.planner.plan import Plan
from fullshard.train.prepare import Prepared, plan_run, prepare
from fullshard.train.run_folder import RunFolder, begin, check_output_dir

RANK_MODULE = "fullshard.train.rank_main"


@dataclass(frozen=True)
class CheckedRun:
    """A run that nothing is known to be wrong with.

    Attributes:
        resolved: The configuration.
        prepared: Data, model configuration, counts of steps.
        plan: What the engine will run.
        output_dir: Where it will be written.
    """

    resolved: Resolved
    prepared: Prepared
    plan: Plan
    output_dir: Path


def output_dir_of(resolved: Resolved, command: str) -> Path:
    """The run's folder."""
    return Path(resolved.config.training.output_dir or f"runs/{command}")


def world_size_of(resolved: Resolved, launch: LaunchEnvironment | None) -> int:
    """How many ranks a run has.

    Raises:
        ConfigError: The configuration and the launcher around us disagree.
    """
    asked = resolved.config.launch.num_processes
    if launch is None:
        return configured_topology(resolved.config.launch).world_size
    if asked is not None and asked != launch.world_size and _is_chosen(resolved):
        raise ConfigError(
            f"launch.num_processes: expected {launch.world_size}, the number of processes that "
            f"{launch.launcher} started, got {asked}. Leave it out."
        )
    return launch.world_size


def check(resolved: Resolved, world_size: int, command: str) -> CheckedRun:
    """Everything that can be found wrong before a rank starts.

    Raises:
        ConfigError: With the line of the file where there is one.
        DataError: The same for the data.
    """
    output_dir = output_dir_of(resolved, command)
    try:
        check_output_dir(output_dir)
        prepared = prepare(resolved.config, world_size)
        return CheckedRun(resolved, prepared, plan_run(prepared, world_size), output_dir)
    except ConfigError as error:
        raise resolved.located(error) from error
    except DataError as error:
        raise DataError(str(resolved.located(ConfigError(str(error))))) from error


def make_folder(checked: CheckedRun, command: str) -> tuple[RunFolder, Path | None]:
    """Makes the run's folder with all that ranks read; returns it and where an older run went."""
    folder, moved = begin(checked.output_dir, command)
    folder.config.write_text(checked.resolved.to_yaml(), encoding="utf-8")
    checked.prepared.dataset.save(folder.data)
    return folder, moved


def start_ranks(
    folder: RunFolder, world_size: int, stuck_s: float
) -> tuple[LocalLaunch, LaunchResult]:
    """Runs the ranks of a prepared run on this machine until they end."""
    arguments = (str(folder.path),)
    launch = LocalLaunch(RANK_MODULE, arguments, world_size, folder.logs, stuck_s=stuck_s)
    result = launch_local_ranks(launch)
    if result.exit_code != ExitCode.OK:
        _record_failure(folder, result)
    return launch, result


def _record_failure(folder: RunFolder, result: LaunchResult) -> None:
    """What the launcher knows goes before what a rank wrote: it has seen all of them end."""
    cause = result.failure
    if cause is None:
        folder.fail("Interrupted", "stopped by a signal", result.exit_code, final=True)
    else:
        folder.fail(cause.type, cause.message, result.exit_code, cause.rank, final=True)
    write_report(folder.path)


def _is_chosen(resolved: Resolved) -> bool:
    """Whether a person wrote the number of processes; the main job's own is a suggestion."""
    origin = resolved.origins.get("launch.num_processes")
    return origin is not None and origin.file != MAIN_JOB
